"""Deadlock guard: ends one sequence when work is left, nothing is in flight and no step can be planned.

It guards against bugs of the scheduler: what admission takes can run (alone it fits beside all pins, see
``kv.handles``), and every wait (for a prefix, a disk, a mask, a trial) has an end. Should that not hold, one
sequence ends with an error that names what it lacks, and the others continue.

Time counts only while plans are asked for, so a process that was suspended ends no sequence when it resumes.
"""

from __future__ import annotations

from typing import NamedTuple

from jserve.errors import Unschedulable
from jserve.sched.guided import lacks_mask
from jserve.sched.prefill import PrefillPlanner
from jserve.types import Sequence

LIMIT_S = 20.0
"""Seconds without progress until a sequence is ended. Longer than any wait that ends by itself."""
AGAIN_S = 1.0
"""Seconds until the next one ends, if there is still no progress."""
STRIDE_S = 1.0
"""Most that the time between two plans counts."""


class GivenUp(NamedTuple):
    """``seq`` ends with ``error``."""

    seq: Sequence
    error: Unschedulable


class DeadlockGuard:
    """Watches the plans of one scheduler.

    Args:
        prefill_planner: knows the order of the queue, and the resources that each sequence lacks.
    """

    def __init__(self, prefill_planner: PrefillPlanner) -> None:
        self.prefill_planner, self.resources = prefill_planner, prefill_planner.resources
        self.n_given_up = 0
        """Counter: sequences ended by this guard."""
        self._stood_s = 0.0
        self._asked: float | None = None
        """The time at which a plan was last asked for in vain."""

    def planned(self, now: float, *, moves: bool) -> None:
        """A plan was asked for. ``moves``: a step is in flight, perhaps that plan's, or there is nothing to do."""
        if moves:
            self._stood_s, self._asked = 0.0, None
            return
        if self._asked is not None:
            self._stood_s += min(max(0.0, now - self._asked), STRIDE_S)
        self._asked = now

    def find(self, step: int, now: float) -> GivenUp | None:
        """The sequence to end now, if any. ``step`` counts plans."""
        if self._stood_s < LIMIT_S:
            return None
        seq = self._first(step, now)
        if seq is None or now - seq.arrived < LIMIT_S:
            return None
        self._stood_s = LIMIT_S - AGAIN_S
        self.n_given_up += 1
        words = f"the request could not be run for {LIMIT_S:.0f} s: {self._lacks(seq, step)}"
        return GivenUp(seq, Unschedulable(words))

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {"requests_unschedulable_total": float(self.n_given_up)}

    def _first(self, step: int, now: float) -> Sequence | None:
        """The oldest of those who run; else the first in the queue that waits for nobody, for it keeps
        the others out; else the oldest."""
        running = list(self.resources.running)
        if running:
            return min(running, key=_age)
        candidates = self.resources.waiting.candidates(now)
        while (seq := candidates.next()) is not None:
            if not (self.prefill_planner.waits_for(seq, step) or self.prefill_planner.lacks(seq)):
                return seq
        return min(self.resources.waiting, key=_age, default=None)

    def _lacks(self, seq: Sequence, step: int) -> str:
        """The reason that ``seq`` waits, for the error message."""
        if lacks_mask(seq):
            return "what its structure allows next is not known"
        if seq.lease is not None:
            return "no step takes it"
        if seq.pending:
            return f"{seq.pending} of its steps have not come back"
        cache = self.resources.cache
        pages = f"{cache.n_available} of {cache.pool.n_usable} pages of KV are to be had"
        waits = self.prefill_planner.waits_for(seq, step) or self.prefill_planner.lacks(seq)
        return waits or f"it is not admitted, {pages}"


def _age(seq: Sequence) -> int:
    return seq.order[2]
