"""Loads step times for a live engine from a file of ``jserve bench steps``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError
from jserve.ports import StepTime
from jserve.sim.costs import TableFile, read_table

KEY = ("source", "dtype", "kv_dtype", "device", "sharding", "backend", "kernels")
"""Facts on which a step's time depends, besides its bucket."""


def step_times(
    path: Path, facts: Mapping[str, Any], buckets: Iterable[tuple[int, int]]
) -> tuple[StepTime, ...]:
    """The times in ``path`` of the programs (decode rows, prefill tokens) that the engine has.

    Raises:
        ConfigError: no such file, or it was measured on something else; the message says what differs.
    """
    table, wanted = read_table(path, "step_times"), set(buckets)
    differs = [*_facts(table, facts), *_buckets(table, wanted)]
    if differs:
        raise ConfigError(
            f"step_times {path} was measured on another engine: {'; '.join(differs)}",
            field="step_times",
        )
    return tuple(step for step in table.steps if (step.n_decode, step.n_prefill) in wanted)


def _facts(table: TableFile, facts: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {facts[name]!r} here and {table.about.get(name)!r} in the file"
        for name in KEY
        if table.about.get(name) != facts[name]
    ]


def _buckets(table: TableFile, wanted: set[tuple[int, int]]) -> list[str]:
    measured = {(step.n_decode, step.n_prefill) for step in table.steps}
    lacking = sorted(wanted - measured)
    if not lacking:
        return []
    shown = ", ".join(f"{d} + {p}" for d, p in lacking[:4]) + (" ..." if len(lacking) > 4 else "")
    return [f"it lacks {len(lacking)} programs (decode rows + prefill tokens: {shown})"]
