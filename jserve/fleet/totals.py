"""Adds up the statistics of replicas to those of one engine."""

from __future__ import annotations

from collections.abc import Iterable

from jserve.engine.wire import Stats

LEVELS = {
    "overload_level",
    "overload_load",
    "step_slowness",
    "steps_failed_in_row",
    "disk_read_only",
}
"""Values of which the worst counts; of all others the sum."""


def totals(every: Iterable[Stats]) -> Stats:
    """The sums of counters and gauges; of levels the highest."""
    found = list(every)
    values: dict[str, float] = {}
    for stats in found:
        for name, value in stats.values.items():
            before = values.get(name, 0.0)
            values[name] = max(before, value) if name in LEVELS else before + value
    return Stats(
        step=sum(stats.step for stats in found),
        waiting=sum(stats.waiting for stats in found),
        running=sum(stats.running for stats in found),
        in_flight=sum(stats.in_flight for stats in found),
        values=values,
    )
