"""Finds the request that makes a step raise: retries the step's requests in halves until one fails alone.

A step that raised loses the device's state, so all sequences restart from their tokens; outputs do not
change. The step's requests are retried in groups: the first group runs alone, the next joins when it has
passed::

    a b c d e f g h   raised
    a b c d           runs past the place where it was: cleared, goes on
    a b c d  e f g h  raised
             e f      raised
             e        runs past: cleared
             e  f     raised
                f     raised alone: faulty. All others continue

A request is faulty only if it raised for the second time, as the only request of a step. A fault that does
not recur when its suspects run again is attributed to no request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence as Seq

from jserve.types import Sequence

WINDOW_S = 60.0
MAX_UNEXPLAINED = 3
"""Faults within ``WINDOW_S`` that no request explains, after which the device is not trusted."""
MAX_FAULTY = 8
"""Requests found faulty one after the other, with no step between them that succeeded, after which
the device is not trusted either."""


class FaultBisection:
    """Suspects among the live requests, by request id.

    Args:
        live: the sequences of every request that has not ended.
    """

    def __init__(self, live: Mapping[str, Seq[Sequence]]) -> None:
        self.n_faults = self.n_faulty = 0
        """Counters: steps that raised, requests that ended for it."""
        self.n_in_row = 0
        """Steps that raised since one came back."""
        self._live = live
        self._groups: deque[list[str]] = deque()
        """Suspects not yet cleared; the first group is on trial."""
        self._marks: dict[Sequence, int] = {}
        """Tokens that clear a suspect: those it would have had after all lost steps."""
        self._found_any = False
        self._unexplained: list[float] = []
        self._faulty_in_row: list[float] = []

    def holds(self, seq: Sequence) -> bool:
        """True while ``seq`` may not start because others are on trial."""
        return bool(self._groups) and seq.request.id not in self._groups[0]

    def clear_passed(self, now: float) -> None:
        """Clear who has passed the place where the fault was, or has ended."""
        while self._groups and all(self._cleared(id) for id in self._groups[0]):
            self._groups.popleft()
            if not self._groups:
                self._close(now)

    def succeeded(self) -> None:
        """A step came back: the device works."""
        self._faulty_in_row.clear()
        self.n_in_row = 0

    def step_failed(self, lost: Iterable[Sequence], now: float) -> str | None:
        """A step raised and took the rows of ``lost`` (its own, and of all launched with it) along.

        Call it before any rollback. Returns the faulty request, if it is known now; all others are to
        restart.
        """
        self.n_faults += 1
        self.n_in_row += 1
        present = list(dict.fromkeys(seq.request.id for seq in lost if seq.finish is None))
        self.clear_passed(now)
        if not self._groups:
            self._open(present, now)
            return None
        first = self._groups.popleft()
        if present == first and len(first) == 1:
            return self._isolate(first[0], now)
        self._groups.extendleft(reversed(_halves(first)))
        return None

    def device_fault(self, now: float) -> str | None:
        """The reason why the device itself must be at fault; None while it need not be."""
        if len(self._recent(self._unexplained, now)) >= MAX_UNEXPLAINED:
            return f"{MAX_UNEXPLAINED} times within {WINDOW_S:.0f} s, and no request is to blame"
        if not self._groups and len(self._recent(self._faulty_in_row, now)) >= MAX_FAULTY:
            return f"with {MAX_FAULTY} requests, each alone, and with no other"
        return None

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "step_faults_total": float(self.n_faults),
            "steps_failed_in_row": float(self.n_in_row),
            "requests_faulty_total": float(self.n_faulty),
        }

    def _open(self, present: list[str], now: float) -> None:
        self._marks = {
            seq: len(seq.tokens) + max(1, seq.in_flight) for id in present for seq in self._live[id]
        }
        self._found_any = False
        self._groups.extend(_halves(present))
        if not present:
            self._close(now)  # only rows of those that had ended meanwhile

    def _cleared(self, id: str) -> bool:
        return all(
            seq.finish is not None or len(seq.tokens) >= self._marks.get(seq, 0)
            for seq in self._live.get(id, ())
        )

    def _isolate(self, id: str, now: float) -> str:
        self.n_faulty += 1
        self._found_any = True
        self._faulty_in_row.append(now)
        if not self._groups:
            self._close(now)
        return id

    def _close(self, now: float) -> None:
        self._marks = {}
        if not self._found_any:
            self._unexplained.append(now)

    @staticmethod
    def _recent(times: list[float], now: float) -> list[float]:
        times[:] = [at for at in times if now - at < WINDOW_S]
        return times


def _halves(ids: list[str]) -> list[list[str]]:
    half = (len(ids) + 1) // 2
    return [part for part in (ids[:half], ids[half:]) if part]
