"""The replicas that a choice is made between, and the table that their prices are computed from.

Prices are a few numpy expressions over columns of all replicas. The row of a replica is written when it changes, and
whatever depends on the replica alone is decided then::

    number    before_s (of each lane)    prefill_token_s    row_s    rows    ...    takes_requests
    0         0.0    0.1    0.4          2e-5               1e-5     12             True
    1         0.2    0.2    1.7          2e-5               1e-5     30             False
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from jserve.engine.view import View
from jserve.request_options import Lane

PREFILL = "prefill"
"""The role of a replica that computes prompts for others: it answers where no other is left."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A replica's view, and what the front knows beyond it."""

    view: View
    n_sent: int = 0
    """Requests sent since the view was made."""
    n_ended: int = 0
    """Sequences that ended since."""
    sent_s: float = 0.0
    """Seconds of prefill that these bring."""
    suspicion: float = 1.0
    """Its times over those that its prices promise, at least 1."""
    out: bool = False
    """It gets nothing new, whatever its view says."""
    role: str = ""
    """``PREFILL``, or any other."""


class CandidateTable:
    """Candidates by number, and what prices read of them, as columns.

    Attributes:
        before_s: by lane, seconds until a request is begun, float64 [n].
        prefill_token_s, row_s, page_s, suspicion: as ``View`` and ``Candidate`` have them, float64 [n].
        rows: sequences that run or wait, with those that were sent and without those that ended, float64 [n].
        takes_requests: whether it is ready and not out, bool [n].
        answers: whether its role is another than ``PREFILL``, bool [n].
    """

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._candidates = list(candidates)
        self._write_all()

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)

    def __getitem__(self, number: int) -> Candidate:
        return self._candidates[number]

    def append(self, candidate: Candidate) -> None:
        """``candidate`` gets the next number."""
        self._candidates.append(candidate)
        self._write_all()

    def replace(self, number: int, candidate: Candidate) -> None:
        """``candidate`` is number ``number`` from now on."""
        self._candidates[number] = candidate
        self._write(number, candidate)

    def change(self, number: int, **fields: Any) -> None:
        """Candidate ``number`` has these ``fields`` from now on."""
        self.replace(number, msgspec.structs.replace(self._candidates[number], **fields))

    def _write_all(self) -> None:
        n = len(self._candidates)
        self.before_s: dict[str, np.ndarray] = {lane: np.zeros(n) for lane in Lane}
        figures = np.zeros((5, n))
        self.prefill_token_s, self.row_s, self.page_s, self.rows, self.suspicion = figures
        self.takes_requests, self.answers = np.zeros((2, n), bool)
        for number, one in enumerate(self._candidates):
            self._write(number, one)

    def _write(self, number: int, one: Candidate) -> None:
        """Write the row of ``one``."""
        view, left = one.view, _share_left(one)
        for lane, before_s in self.before_s.items():
            before_s[number] = view.wait_s.get(lane, 0.0) * left + one.sent_s
        self.prefill_token_s[number] = view.prefill_token_s
        self.row_s[number] = view.row_s
        self.page_s[number] = view.page_s
        self.rows[number] = max(0, view.n_rows + one.n_sent - one.n_ended)
        self.suspicion[number] = one.suspicion
        self.takes_requests[number] = view.ready and not one.out
        self.answers[number] = one.role != PREFILL


def _share_left(one: Candidate) -> float:
    """The share of the view's wait that is left, since places became free that no request was sent to."""
    n_before = one.view.n_before
    if not n_before:
        return 1.0
    n_free = min(n_before, max(0, one.n_ended - one.n_sent))
    return (n_before - n_free) / n_before
