"""Tracks deadlines and finds the sequences that missed theirs.

* ``ttft_deadline_ms``: a sequence that still waits for its first admission when its prefill alone
  would miss the deadline ends; an admitted one continues, late or not.
* ``deadline_ms``: when it passes the sequence ends in any state; tokens already emitted remain.
* ``tpot_deadline_ms`` is a promise checked at arrival only.
"""

from __future__ import annotations

import heapq

from jserve.types import Sequence

TTFT, LAST = "ttft_deadline_ms", "deadline_ms"


class Deadlines:
    """A heap of (time, field, sequence); those that are over are dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Sequence]] = []
        self._n_added = self._n_over = 0

    def add(self, seq: Sequence, first_by: float | None, end_by: float | None) -> None:
        """Watch ``seq``: admitted by ``first_by`` and over by ``end_by``, or else."""
        for at, field in ((first_by, TTFT), (end_by, LAST)):
            if at is not None:
                self._n_added += 1
                heapq.heappush(self._heap, (at, self._n_added, field, seq))

    def passed(self, now: float) -> list[tuple[Sequence, str]]:
        """(sequence, request field) of those whose time is up; each sequence once."""
        found: list[tuple[Sequence, str]] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, field, seq = heapq.heappop(self._heap)
            entered = seq.charged is not None
            listed = any(seq is other for other, _ in found)
            if seq.finish is None and not listed and not (field == TTFT and entered):
                found.append((seq, field))
        return found

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over; its entries go when they are half of all."""
        request = seq.request
        n_mine = (request.ttft_deadline_ms is not None) + (request.deadline_ms is not None)
        if not n_mine:
            return
        self._n_over += n_mine
        if 2 * self._n_over > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[3].finish is None]
            heapq.heapify(self._heap)
            self._n_over = 0

    def __len__(self) -> int:
        return len(self._heap)
