"""The waiting sequences in the order of the policy.

Owns the order of waiting only. Must not know why a sequence waits or when it may run.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from jserve.sched import policy
from jserve.types import Sequence


class OrderedSeqs:
    """Sequences sorted by ``policy.order``; adding and removing keep the order."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._seqs, seq, key=policy.order)

    def remove(self, seq: Sequence) -> None:
        at = bisect.bisect_left(self._seqs, policy.order(seq), key=policy.order)
        assert self._seqs[at] is seq, f"{seq.request.id}/{seq.index} is not where its order says"
        del self._seqs[at]

    def after(self, seq: Sequence) -> list[Sequence]:
        """Those that come after ``seq``."""
        return self._seqs[bisect.bisect_right(self._seqs, policy.order(seq), key=policy.order) :]

    def snapshot(self) -> list[Sequence]:
        """A copy to walk over while members come and go."""
        return self._seqs[:]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)

    def __contains__(self, seq: Sequence) -> bool:
        return any(s is seq for s in self._seqs)
