"""Takes what an engine was made of, its options and its runner's limits, to and from the first event of its journal.

Options of the server and of replicas are left out, as is what is secret: a replay needs none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from jserve.config import EngineConfig, FleetOptions, ServerOptions
from jserve.errors import ConfigError
from jserve.ports import RunnerLimits
from jserve.sched.record.journal import JournalFile, Started

Functions = Mapping[str, Callable[..., Any]]
FUNCTIONS = ("features", "kv_names", "prompt_features")
"""Limits that are functions by name: names are written."""


def write_start(
    journal: JournalFile, config: EngineConfig, limits: RunnerLimits, weights: str, sharding: str
) -> None:
    """``weights`` is the stamp of their files, ``sharding`` the name of their layout."""
    cache = dataclasses.replace(config.cache, kv_transfer_key="")
    own = dataclasses.replace(config, cache=cache, server=ServerOptions(), fleet=FleetOptions())
    values = {f.name: getattr(limits, f.name) for f in dataclasses.fields(limits)}
    values |= {name: sorted(values[name]) for name in FUNCTIONS}
    journal.start(own.flat(), msgspec.to_builtins(values), weights, sharding)


def read_start(path: Path) -> tuple[EngineConfig, Started]:
    """The options, and the event that has them.

    Raises:
        ConfigError: the file cannot be read, or does not begin with what an engine was made of.
    """
    try:
        with path.open("rb") as file:
            event = msgspec.json.decode(file.readline(), type=Started)
        return EngineConfig.of(**event.options), event
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}", field="journal") from None
    except (msgspec.DecodeError, ConfigError) as error:
        why = f"its first line is no start event of this version: {error}"
        raise ConfigError(f"journal {path}: {why}", field="journal") from None


def limits_of(event: Started, known: Mapping[str, Functions]) -> RunnerLimits:
    """The limits again.

    Args:
        known: by name of a limit of ``FUNCTIONS``, those of the step features that are registered here.

    Raises:
        ConfigError: limits of another version, or a feature that is not registered.
    """
    limits = event.limits
    functions = {}
    for field in FUNCTIONS:
        names, functions_of = limits.get(field, []), known.get(field, {})
        if missing := [name for name in names if name not in functions_of]:
            why = f"the engine had a step feature {missing[0]!r}, which is not registered: a plugin is missing"
            raise ConfigError(f"plugins: {why}", field="plugins")
        functions[field] = {name: functions_of[name] for name in names}
    kinds = get_type_hints(RunnerLimits)
    try:
        numbers = {n: msgspec.convert(v, kinds[n]) for n, v in limits.items() if n not in FUNCTIONS}
        return RunnerLimits(**numbers, **functions)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"journal: limits of another version: {error}", field="journal") from None
