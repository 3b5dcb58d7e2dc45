"""Two versions of weights side by side: the sequences that end under the old one, and whose turn a plan is.

A step computes with one set of weights, so a plan has rows of one version. While sequences of both can run, plans take
turns::

    plan      1     2     3     4     5     6
    version   new   old   new   old   new   new      the last sequence of the old one has ended in 4
"""

from __future__ import annotations

from collections.abc import Iterable

from jserve.types import FIRST_WEIGHTS, Sequence


class WeightVersions:
    """The versions that sequences draw with.

    Attributes:
        version: of the weights in use, for all that is not in ``ending``.
        old_version: of those in ``ending``.
        ending: sequences that end under the weights of before; no others find their KV, nor they that of others.
        old_turn: the plan at hand is theirs.
        n_recomputed: counter, tokens of running sequences whose KV was computed anew for other weights.
    """

    def __init__(self) -> None:
        self.version = self.old_version = FIRST_WEIGHTS
        self.ending: set[Sequence] = set()
        self.old_turn = False
        self.n_recomputed = 0

    def replace(self, version: str, ending: Iterable[Sequence] = ()) -> None:
        """Other weights, of that name, for all but ``ending``."""
        assert not self.ending, f"{len(self.ending)} sequences have other weights than those in use"
        self.old_version, self.version, self.ending = self.version, version, set(ending)
        for seq in self.ending:
            seq.old_weights = True

    def of(self, seq: Sequence) -> str:
        """The version that draws the tokens of ``seq``."""
        return self.old_version if seq.old_weights else self.version

    def turns(self) -> tuple[bool, ...]:
        """``old_turn`` of the next plan, and what it may be where that has no rows."""
        return (not self.old_turn, self.old_turn) if self.ending else (False,)

    def waits(self, seq: Sequence) -> bool:
        """True where it is the other version's turn."""
        return seq.old_weights != self.old_turn

    def running(self, seqs: Iterable[Sequence]) -> Iterable[Sequence]:
        """Those whose turn it is."""
        return [seq for seq in seqs if not self.waits(seq)] if self.ending else seqs

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self.ending.discard(seq)

    def __len__(self) -> int:
        return len(self.ending)
