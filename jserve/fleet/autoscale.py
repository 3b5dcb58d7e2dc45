"""Says how many replicas a load needs. Deterministic, and reads no clock: the caller hands in times and figures.

The load is the work that replicas admit, in device seconds of a full engine a second (``sched.admission.demand``): 2.0
keeps two replicas busy with full batches. More are needed at once, one start-up time ahead; fewer only where fewer were
enough for a while::

    load  = mean of the window; where it grew from third to third, what it will be when a new replica is ready
    left  = seconds of work that wait, less what the replicas have time for until then
    needed = load / TARGET + left / QUEUE_S          replicas, at once
    enough = most that was needed in hold_s, where REST stands for TARGET
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

TARGET = 0.7
"""Load of one replica for which others are started above."""
REST = 0.6
"""Load of one replica up to which others are stopped."""
QUEUE_S = 10.0
"""So many seconds of work that wait ask for one more replica."""
WINDOW_S, HOLD_S = 60.0, 300.0
THIRDS = 3
SAVED_S = 300.0
"""Seconds after which what a cache saved counts 1/e."""
EVERY_S = 1.0
"""Samples that are closer to the last one are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A replica's work, as it says itself, in seconds."""

    offered_s: float
    """Work of the requests that it admitted since its start."""
    saved_s: float = 0.0
    """Prefill that its prefix cache saved since its start."""
    queue_s: float = 0.0
    """Work that waits."""


LOAD_VALUES = ("offered_seconds_total", "saved_seconds_total", "queue_seconds")
"""Of an engine's statistics, those that ``ReplicaLoad`` is made of."""


def load_of(values: Mapping[str, float]) -> ReplicaLoad:
    """From an engine's statistics."""
    offered_s, saved_s, queue_s = [values.get(name, 0.0) for name in LOAD_VALUES]
    return ReplicaLoad(offered_s=offered_s, saved_s=saved_s, queue_s=queue_s)


class Autoscaler:
    """Counts the replicas that are needed, from what they said so far.

    Args:
        window_s: the load is the mean of so many seconds.
        hold_s: fewer are enough where they were for so many seconds.

    Attributes:
        load: device seconds a second that are offered now.
        needed: replicas that are needed at once; 0 before the first window.
        saved_s: by replica, prefill that its cache saved of late.
    """

    def __init__(self, *, window_s: float = WINDOW_S, hold_s: float = HOLD_S) -> None:
        self.load, self.needed = 0.0, 0
        self.saved_s: dict[str, float] = {}
        self._window_s, self._hold_s = window_s, hold_s
        self._last: dict[str, ReplicaLoad] = {}
        self._offered: deque[tuple[float, float]] = deque()
        """(time, work offered to all so far), from the last sample before the window on."""
        self._sufficed: deque[tuple[float, int]] = deque()
        """(time, replicas that sufficed), over ``hold_s``."""

    def observe(self, now: float, loads: Mapping[str, ReplicaLoad], start_s: float) -> None:
        """Take what the replicas, by name, say at ``now``. A replica that is started now is ready in ``start_s``."""
        before_at, total = self._offered[-1] if self._offered else (now - EVERY_S, 0.0)
        if now - before_at < EVERY_S:
            return
        fading = math.exp(-(now - before_at) / SAVED_S)
        for name, load in loads.items():
            before = self._last.get(name, load)
            total += max(0.0, load.offered_s - before.offered_s)
            saved_s = max(0.0, load.saved_s - before.saved_s)
            self.saved_s[name] = self.saved_s.get(name, 0.0) * fading + saved_s
        self._last = self._last | dict(loads)
        self._offered.append((now, total))
        while len(self._offered) > 1 and self._offered[1][0] <= now - self._window_s:
            self._offered.popleft()
        self._decide(now, loads.values(), start_s)

    def forget(self, name: str) -> None:
        """Replica ``name`` is gone for good."""
        self._last.pop(name, None)
        self.saved_s.pop(name, None)

    def enough(self, now: float) -> int | None:
        """Replicas that were enough for all of the last ``hold_s``; None: that is not known yet."""
        if not self._sufficed or self._sufficed[0][0] > now - self._hold_s:
            return None
        return max([n for _, n in self._sufficed])

    def _decide(self, now: float, loads: Iterable[ReplicaLoad], start_s: float) -> None:
        if now - self._offered[0][0] < self._window_s:
            return
        queues_s = [load.queue_s for load in loads]
        thirds = self._thirds(now)
        self.load = sum(thirds) / THIRDS
        coming = max(self.load, self._grown(thirds, start_s))
        idle = max(0.0, len(queues_s) - coming)
        more = max(0.0, sum(queues_s) - idle * start_s) / QUEUE_S
        self.needed = _ceil(coming / TARGET + more)
        self._sufficed.append((now, max(self.needed, _ceil(self.load / REST))))
        while len(self._sufficed) > 1 and self._sufficed[1][0] <= now - self._hold_s:
            self._sufficed.popleft()

    def _thirds(self, now: float) -> list[float]:
        """The load in each third of the window, oldest first."""
        third_s = self._window_s / THIRDS
        totals = [self._total_at(now - i * third_s) for i in range(THIRDS, -1, -1)]
        return [(after - before) / third_s for before, after in pairwise(totals)]

    def _grown(self, thirds: list[float], start_s: float) -> float:
        """The load in ``start_s``, if it goes on to grow as it did at least from third to third; 0 where it did not. It
        is foreseen no further than the window is long."""
        growth = min([after - before for before, after in pairwise(thirds)])
        if growth <= 0:
            return 0.0
        ahead_s = self._window_s / 2 + min(start_s, self._window_s)
        return self.load + growth * ahead_s * THIRDS / self._window_s

    def _total_at(self, at: float) -> float:
        """Work offered until ``at``, between two samples."""
        for (t0, before), (t1, after) in pairwise(self._offered):
            if t0 <= at <= t1 and t1 > t0:
                return before + (after - before) * (at - t0) / (t1 - t0)
        return self._offered[-1][1] if at > self._offered[-1][0] else self._offered[0][1]


def _ceil(n: float) -> int:
    """At least one replica; rounding errors ask for none."""
    return max(1, math.ceil(n - 1e-9))
