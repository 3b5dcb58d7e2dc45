"""What a row may try, and what is known of how often that stands.

Owns the values that the parts of speculation hand one another: a row's drafts, the load of a step, the
estimates per sequence and per proposer. Must not know times, steps or who decides.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jserve.speculation.policy.acceptance import ProposerRates, RequestRates, Shadow
from jserve.types import Sequence

GRAMMAR, DEVICE = "grammar", "device"
Gains = Seq[float]
NOTHING: Gains = (0.0,)
"""Of a row that has no drafts."""


@dataclass(slots=True)
class RowDrafts:
    """What one row shall try."""

    ids: Seq[int] = ()
    source: str = ""
    gains: Gains = NOTHING
    """Drafts expected to stand of 0, 1 ... len(ids)."""

    def cut(self, most: int) -> RowDrafts:
        """At most ``most`` of them."""
        return self if most >= len(self.ids) else RowDrafts(self.ids[: max(0, most)], self.source)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What else the step to be planned holds."""

    n_prefill: int
    n_context: int
    behind: bool
    """True when no step is in flight: the host's time is not hidden."""
    entering: Seq[Sequence] = ()
    """Sequences whose prompts the step may compute, in part or whole: they will decode soon."""


@dataclass(slots=True, eq=False)
class SequenceAcceptance:
    """What is known of one sequence."""

    rates: RequestRates = field(default_factory=RequestRates)
    shadow: Shadow = field(default_factory=Shadow)
    left: int = 0
    """Drafts that the device holds for it."""


class AcceptanceStats:
    """What is known of the proposer of an engine, and of each of its sequences."""

    def __init__(self, most: int, depths: Seq[int] = ()) -> None:
        self.depths = depths
        """Of a tree of drafts, the depth of each; (): they are chains."""
        self.rates = ProposerRates(max(1, most))
        self._of: dict[Sequence, SequenceAcceptance] = {}

    def of(self, seq: Sequence) -> SequenceAcceptance:
        watch = self._of.get(seq)
        if watch is None:
            watch = self._of[seq] = SequenceAcceptance()
        return watch

    def gains(self, seq: Sequence, most: int) -> list[float]:
        """Drafts of ``seq`` expected to stand of 0, 1 ... ``most``."""
        gains = self.of(seq).rates.gains(self.deep(most), self.rates, seq.request.lane)
        return [gains[self.deep(n)] for n in range(most + 1)] if self.depths else gains

    def deep(self, n: int) -> int:
        """Most of ``n`` drafts that can stand: of a tree, as many as it is deep."""
        return max(self.depths[:n], default=0) if self.depths else n

    def add(self, seq: Sequence, n_drafts: int, n_stood: int) -> None:
        """One round of ``seq`` is over."""
        self.rates.add(n_drafts, n_stood, seq.request.lane)
        self.of(seq).rates.add(n_drafts, n_stood)

    def forget(self, seq: Sequence) -> None:
        self._of.pop(seq, None)

    def __len__(self) -> int:
        return len(self._of)


def room(seq: Sequence, most: int) -> int:
    """Drafts, up to ``most``, for which the length of ``seq`` leaves room."""
    return max(0, min(most, seq.max_len - len(seq.tokens) - seq.in_flight - 1))


def may_hold(seq: Sequence) -> bool:
    """True for one that may use drafts of the device. A guide's masks follow the drafts' ids, which only the
    device knows."""
    return seq.request.speculative and seq.guide is None
