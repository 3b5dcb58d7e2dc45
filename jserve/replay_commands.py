"""Implements ``jserve replay``: a journal decided again, and computed again on a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jserve.build import close, engine, guides_of
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.plugins import load_plugins
from jserve.progress import start_progress
from jserve.sched.record.journal import Started
from jserve.sched.record.replay import Diverged, replay as replayed
from jserve.sched.record.start import FUNCTIONS, limits_of, read_start


def replay(path: Path, *, device: bool, console: Any) -> str:
    """Decide again what a journal has; with ``device`` compute it again, too; a summary as text.

    Raises:
        ConfigError: no journal of an engine, or this machine cannot make the same engine.
        Diverged: the first decision or token that is another; or, once all are known to be the same, the first
            log-probability.
    """
    config, start = read_start(path)
    load_plugins(config.model.plugins)
    features: list[Any] = []
    if device or start.limits.get("features"):
        from jserve.model.features import registered  # imports jax

        features = list(registered())
    kinds = {"features": "check", "kv_names": "kv_name", "prompt_features": "of_prompt"}
    known = {
        kind: {f.name: made for f in features if (made := getattr(f, name)) is not None}
        for kind, name in kinds.items()
    }
    limits = limits_of(start, known)
    if not device:
        done = replayed(path, limits, config)
        return f"{done.n_events} events, {done.n_steps} steps: every decision as recorded\n"
    with start_progress(console) as progress:
        made, info = engine(_again(config, limits.n_pages), progress)
    try:
        runner: Any = made.runner
        _check_same(limits, runner.limits, start, info)
        masks = guides_of(config, limits.vocab_size)
        done = replayed(path, limits, config, runner=runner, masks=masks)
        if masks is not None:
            masks.close()
    finally:
        close(made)
    end = f"; computed up to {done.until}" if done.until else ""
    bits = done.bits
    if bits.n_other:
        raise Diverged(
            f"{bits.first}. {bits.n_other} of {bits.n} log-probabilities are others, by"
            f" {bits.largest:.3g} at most; all {done.n_tokens} tokens are as recorded{end}"
        )
    return (
        f"{done.n_events} events, {done.n_steps} steps, {done.n_tokens} tokens computed again, {bits.n}"
        f" log-probabilities: every one as recorded{end}\n"
    )


def _again(config: EngineConfig, n_pages: int) -> EngineConfig:
    """The options of an engine as large as the recorded one, which writes no journal."""
    scheduler = dataclasses.replace(config.scheduler, journal="", step_times="")
    away = dict.fromkeys(
        ("disk_dir", "kv_transfer_address", "kv_events", "kv_events_replay", "kv_events_topic"), ""
    )
    cache = dataclasses.replace(config.cache, n_pages=n_pages, **away)
    return dataclasses.replace(config, scheduler=scheduler, cache=cache)


def _check_same(recorded: Any, made: Any, start: Started, info: dict[str, Any]) -> None:
    """Raises ConfigError where plans of one engine are none of the other, or sums are added in another order."""
    if start.weights and info["weights"] != start.weights:
        raise ConfigError("model: its weights are others than those of the journal", field="model")
    if start.sharding and (now := info["sharding"]) != start.sharding:
        why = f"{start.sharding} in the journal, {now} here"
        raise ConfigError(f"sharding: {why}", field="sharding")
    measured = ("step_times", "page_move_s", *FUNCTIONS)
    for name in (f.name for f in dataclasses.fields(recorded) if f.name not in measured):
        then, now = getattr(recorded, name), getattr(made, name)
        if then != now:
            raise ConfigError(f"{name}: {then} in the journal, {now} here", field=name)
