"""Says which replica changes its role, so that those that compute prompts and those that answer are equally loaded.

Deterministic, and reads no clock: the caller hands in times and figures. The load is what requests of the last window
bring, as views price it, wherever it is computed::

    prefill, decode = seconds of prompts and of answers, a second
    load(p) = max(prefill / p, decode / (n - p))     of the busier kind, where p of n replicas compute prompts

One replica changes at a time, towards the p of the least load, where that is at most GAIN times the load of now: a load
that stays as it is ends the changes, and one that moves by less than that brings none back.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from jserve.fleet.candidates import CandidateTable

WINDOW_S, CHANGE_S = 20.0, 10.0
GAIN = 0.8
LEAST = 0.1
"""A busier kind of less load is not worth a change: it is a handful of requests."""
EVERY_S = 1.0
"""Samples that are closer to the last one are left out."""


class RoleControl:
    """Watches the work that is sent.

    Args:
        window_s: the load is the mean of so many seconds.
        change_s: between two changes.

    Attributes:
        prefill, decode: the load in seconds a second; 0 before the first window.
    """

    def __init__(self, *, window_s: float = WINDOW_S, change_s: float = CHANGE_S) -> None:
        self._window_s, self._change_s = window_s, change_s
        self.prefill = self.decode = 0.0
        self._totals: deque[tuple[float, float, float]] = deque()
        """(time, seconds of prompts, seconds of answers), from the last sample before the window on."""
        self._changed_at = -math.inf

    def look(
        self, now: float, prefill_s: float, decode_s: float, candidates: CandidateTable
    ) -> int | None:
        """The number of the replica that changes its role at ``now``; None: none does. ``prefill_s`` and ``decode_s``
        are all that was sent so far, in seconds."""
        totals = self._totals
        if totals and now - totals[-1][0] < EVERY_S:
            return None
        totals.append((now, prefill_s, decode_s))
        while len(totals) > 1 and totals[1][0] <= now - self._window_s:
            totals.popleft()
        began, prefill_before_s, decode_before_s = totals[0]
        passed_s = now - began
        if passed_s < self._window_s:
            return None
        self.prefill = (prefill_s - prefill_before_s) / passed_s
        self.decode = (decode_s - decode_before_s) / passed_s
        if now - self._changed_at < self._change_s:
            return None
        found = who_changes(self.prefill, self.decode, candidates)
        if found is not None:
            self._changed_at = now
        return found


def who_changes(prefill: float, decode: float, candidates: CandidateTable) -> int | None:
    """The number of the candidate that takes the other role under this load; None: none does. Of those that take
    requests at least one of each kind stays."""
    able, answers = candidates.takes_requests, candidates.answers
    n, p = int(able.sum()), int((able & ~answers).sum())
    if n < 2:
        return None
    loads = {k: _load(prefill, decode, k, n) for k in range(n + 1)}
    best = min(range(1, n), key=lambda k: (loads[k], abs(k - p)))
    if loads[p] < LEAST or loads[best] > GAIN * loads[p]:
        return None
    changing = np.flatnonzero(able & (~answers if best < p else answers))
    return int(changing[candidates.rows[changing].argmin()])


def _load(prefill: float, decode: float, p: int, n: int) -> float:
    """Of the busier kind, where ``p`` of ``n`` replicas compute prompts; infinite without one of each."""
    return max(prefill / p, decode / (n - p)) if 0 < p < n else math.inf
