"""Leases of the device's vocab rows, which hold the token counts and biases of one sequence each.

Sequences without penalties and biases need none. A sequence that needs one waits in the queue while all
are leased; others that need none go before it, and like one that finds no pages it is offered before all
others after some entries (``queue.PASSES``), so the next row that comes free is its. A lease ends when its
sequence leaves its slot, so whoever holds a row is running, and every row comes back.
"""

from __future__ import annotations

from collections import deque

from jserve.types import Sequence


class VocabRows:
    """``n`` rows and who holds them."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.n_waits = 0
        """Counter: sequences that found no row when their turn came."""
        self._free = deque(range(n))
        self._waiting: set[Sequence] = set()

    @property
    def n_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def lacks(self, seq: Sequence) -> bool:
        """True while ``seq`` (in the queue) needs a row and none is free."""
        return not self._free and seq.request.params.needs_vocab_row

    def refuse(self, seq: Sequence) -> None:
        """``seq`` was offered a place and lacks a row."""
        if seq not in self._waiting:
            self._waiting.add(seq)
            self.n_waits += 1

    def lease(self, seq: Sequence) -> None:
        """Give ``seq`` a row, if it needs one."""
        if seq.request.params.needs_vocab_row:
            seq.vocab_row = self._free.popleft()
            self._waiting.discard(seq)

    def release(self, seq: Sequence) -> None:
        """Take back what ``seq`` holds."""
        if seq.vocab_row >= 0:
            self._free.append(seq.vocab_row)
            seq.vocab_row = -1

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self._waiting.discard(seq)

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "vocab_rows": float(self.n),
            "vocab_rows_used": float(self.n - self.n_free),
            "vocab_row_waits_total": float(self.n_waits),
        }

    def check(self, running: list[Sequence]) -> None:
        """Audit the rows against those who run."""
        held = [seq.vocab_row for seq in running if seq.vocab_row >= 0]
        assert sorted([*self._free, *held]) == list(range(self.n)), "vocab rows lost or held twice"
        for seq in running:
            needs = seq.request.params.needs_vocab_row
            assert needs == (seq.vocab_row >= 0), f"{seq.request.id} holds row {seq.vocab_row}"
