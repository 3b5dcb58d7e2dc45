"""Ray Serve's autoscaling policy: the number of replicas that ``Autoscaler`` says is needed.

Serve's controller asks it a few times a second; it imports nothing of Ray. It never asks for fewer replicas than
there are: Serve would stop the youngest. The front chooses which one is stopped (``fleet.scale_down``); that one says
that it is retired, ends, and is not replaced::

    target = max(needed, target of now - retired replicas that are gone)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.fleet.autoscale import Autoscaler, load_of

RETIRED = "retired"
FIRST_START_S = 60.0
"""A replica is taken to need so long until it is ready, before one was seen to start."""


class ServePolicy:
    """Called with Serve's ``AutoscalingContext``; (replicas, policy state) is the answer.

    Args:
        options: of ``Autoscaler``.
    """

    def __init__(self, **options: float) -> None:
        self.autoscaler = Autoscaler(**options)
        self.start_s = FIRST_START_S
        """Seconds from the wish for more replicas until all run, when it was last seen."""
        self._wished: tuple[float, int] | None = None
        """(time, replicas) of the wish for more that do not all run yet."""
        self._retired: set[str] = set()

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        now, target = context.current_time, context.target_num_replicas
        most = context.capacity_adjusted_max_replicas
        running = {one.unique_id for one in context.running_replicas}
        said = _newest(context.raw_metrics or {})
        self._retired |= {name for name, values in said.items() if values.get(RETIRED)}
        gone = self._retired - running
        for name in self.autoscaler.saved_s.keys() - running:
            self.autoscaler.forget(name)
        self._retired &= running
        loads = {
            name: load_of(values)
            for name, values in said.items()
            if name in running and name not in self._retired
        }
        self.autoscaler.observe(now, loads, self.start_s)
        wanted = max(self.autoscaler.needed, target - len(gone))
        self._time_start(now, len(running), target, min(wanted, most))
        return wanted, {}

    def _time_start(self, now: float, running: int, target: int, wanted: int) -> None:
        """See how long replicas take that are started now."""
        if self._wished is None:
            if wanted > target:
                self._wished = now, wanted
        elif running >= self._wished[1]:
            self.start_s, self._wished = now - self._wished[0], None
        elif wanted < self._wished[1]:
            self._wished = None


def _newest(metrics: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, float]]:
    """By replica, the last value of each of ``metrics``: series of values by name and replica."""
    found: dict[str, dict[str, float]] = {}
    for name, by_replica in metrics.items():
        for replica, series in by_replica.items():
            if series:
                found.setdefault(replica.unique_id, {})[name] = series[-1].value
    return found
