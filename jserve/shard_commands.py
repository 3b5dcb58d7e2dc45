"""Implements ``jserve bench shard``: shardings of one model side by side, priced for a device or run on those here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from jserve import build, shard_live, xla
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.progress import start_progress
from jserve.shard_live import Answers, Live, items_of
from jserve.sharding import Sharding
from jserve.sizing import show_compare
from jserve.sizing.show_compare import Row

if TYPE_CHECKING:
    from jserve.sizing.compare import Priced
    from jserve.sizing.twin import StepCost

ROOM = ("memory_utilization", "kv_memory_gb", "n_pages")
"""The fields of errors about weights that leave no room for KV."""
DECODE = 0
"""Number of the step of eight sequences among those that are priced."""


def bench_shard(
    config: EngineConfig,
    specs: Sequence[str],
    device: str,
    trace: str,
    *,
    lengths: str = "",
    compiled: bool,
    simulate: bool,
    live: bool,
    hour_usd: float = 0.0,
    plot: Path | None = None,
    as_json: bool,
    console: Any,
) -> int:
    """Print every sharding's prices; if asked for, what XLA makes of its steps for H200s (``compiled``), what ``trace``
    comes to over the prices (``simulate``), and what running it gave (``live``). Returns the exit code: 1 where a
    sharding cannot be honoured, which its row explains, or drew other tokens than the first one with float32 weights.

    Args:
        lengths: tokens of the sequences that are counted, as of ``jserve plan``.
        hour_usd: the price of a device for an hour; 0: unknown, and device-hours are all that is said.
        plot: an SVG of all of it.

    Raises:
        ConfigError: a model, device, trace, option or file that cannot be used, whatever the sharding.
    """
    import sys

    from jserve.sim import plot as plots
    from jserve.sizing import show
    from jserve.sizing.compare import priced
    from jserve.sizing.plan import lengths_of

    if plot is not None:
        plots.check(plot)
    if not 0 <= hour_usd < math.inf:
        raise ConfigError(f"hour_usd: must be 0 or a price, not {hour_usd}", field="hour_usd")
    if hour_usd and not simulate:
        raise ConfigError("hour_usd: prices what --simulate serves", field="hour_usd")
    if config.device.sharding:
        raise ConfigError("sharding: bench shard takes --spec", field="sharding")
    if not specs:
        raise ConfigError("spec: there is none to look at", field="spec")
    if compiled:
        from jserve.sizing import compiled as compiler

        compiler.check(device)
    model, counted = config.model.model or str(build.shipped()), lengths_of(lengths)
    items = items_of(config, trace) if live or simulate else []
    environ = xla.leave_memory() if live else {}
    rows: list[Row] = [{"spec": spec, "refused": ""} for spec in specs]
    for row in rows:
        _price(row, lambda spec: priced(model, spec, device, config, lengths=counted))
    if compiled:
        _compile(config, model, rows, console)
    if simulate:
        _each(rows, "simulated", lambda spec: _simulated(model, spec, device, config, items))
        for row in rows:
            if "simulated" in row:
                row["simulated"] |= _per_m_tokens(row, hour_usd)
    if live:
        _each(rows, "live", lambda spec: shard_live.ran(config, spec, trace, environ))
    runs = _compared(rows)
    about = {"model": model, "device": device, "rank_correlation": _rank_correlation(rows)}
    if plot is not None:
        show_compare.draw(rows, plot, f"{Path(model).name}, priced for {device}")
    if as_json:
        sys.stdout.write(json.dumps({**about, "specs": rows}, indent=1) + "\n")
    else:
        show_compare.as_text(
            rows, about, Console(width=None if sys.stdout.isatty() else show.WIDTH)
        )
    differ = any(run.n_other and run.dtype == "float32" for run in runs)
    return 1 if differ or any(row["refused"] for row in rows) else 0


def _price(row: Row, price: Callable[[Sharding], Priced]) -> None:
    """Add the prices of a row's sharding, or why it cannot be honoured."""
    with _refusal(row):
        made = price(Sharding.of(row["spec"]))
        row |= dataclasses.asdict(made) | {"sharding": made.sharding.as_mapping()}


def _each(rows: Sequence[Row], name: str, make: Callable[[Sharding], Any]) -> None:
    """Add what ``make`` gives of every sharding as ``name``, or why it cannot be honoured."""
    for row in rows:
        if not row["refused"]:
            with _refusal(row):
                row[name] = make(Sharding.of(row["spec"]))


@contextmanager
def _refusal(row: Row) -> Iterator[None]:
    """Within, an error that is about the row's sharding is noted in the row, and the end of its process."""
    try:
        yield
    except shard_live.RunFailed as error:
        row["refused"] = error.message
    except ConfigError as error:
        field = error.field or ""
        if field.partition(".")[0] != "sharding" and field not in ROOM:
            raise
        row["refused"] = error.message


def _compile(config: EngineConfig, model: str, rows: Sequence[Row], console: Any) -> None:
    """Add, of every sharding, the figures of its two steps as XLA compiles them for H200s."""
    from jserve.sizing.compiled import compiled_steps

    with start_progress(console) as progress:
        for done, row in enumerate(rows):
            progress("compile shardings", done, len(rows))
            n_bytes = row.get("device_bytes", 0)
            _each([row], "compiled", lambda spec, n=n_bytes: compiled_steps(model, spec, n, config))
        progress("compile shardings", len(rows), len(rows))


def _simulated(
    model: str, sharding: Sharding, device: str, config: EngineConfig, items: Sequence[Any]
) -> dict[str, Any]:
    """Figures of the scheduler that serves, on a device that takes the priced time for each step."""
    from jserve.sim.fleet import simulated
    from jserve.sim.report import ALL, Slo, summarise
    from jserve.sizing.compare import simulation

    report = summarise(simulated(items, simulation(model, sharding, device, config)), Slo())
    lane: dict[str, Any] = report["lanes"][ALL]
    return {
        "ttft_p99_ms": (lane["ttft_ms"] or {}).get("p99", 0.0),
        "itl_p99_ms": (lane["itl_ms"] or {}).get("p99", 0.0),
        "output_tok_s": lane["output_tok_s"] or 0.0,
        "busy_share": report["device_busy_share"] or 0.0,
    }


def _per_m_tokens(row: Row, hour_usd: float) -> dict[str, float | None]:
    """The device-hours of a million output tokens, served as was simulated, and what these cost."""
    if not (per_s := row["simulated"]["output_tok_s"]):
        return {"device_hours_per_m_tokens": None, "usd_per_m_tokens": None}
    hours = row["devices"] * 1e6 / per_s / 3600
    return {
        "device_hours_per_m_tokens": round(hours, 4),
        "usd_per_m_tokens": round(hours * hour_usd, 4) if hour_usd else None,
    }


def _compared(rows: Sequence[Row]) -> list[Live]:
    """The runs, each compared with the first one; rows have their figures in place of them."""
    ran, runs = [row for row in rows if "live" in row], []
    for row in ran:
        run: Live = row["live"]
        first: Answers = (runs or [run])[0].answers
        other = [name for name, tokens in first.items() if run.answers.get(name) != tokens]
        first_other = other[0] if other else ""
        runs.append(dataclasses.replace(run, n_other=len(other), first_other=first_other))
        row["live"] = _figures(runs[-1])
    return runs


def _figures(run: Live) -> dict[str, Any]:
    return {
        "requests": len(run.answers),
        "output_tok_s": round(run.n_drawn / run.wall_s, 1),
        "step_ms": round(run.step_ms, 3),
        "other_requests": run.n_other,
        "first_other": run.first_other,
        "programs": [_cost(program) for program in run.programs],
    }


def _cost(program: StepCost) -> dict[str, Any]:
    return {
        name: round(x, 4) if isinstance(x, float) else x
        for name, x in dataclasses.asdict(program).items()
    }


def _rank_correlation(rows: Sequence[dict[str, Any]]) -> float | None:
    """Spearman's, of the priced step of eight sequences and the one that was measured here; None: there is no
    order."""
    pairs = [
        (row["steps"][DECODE]["step_ms"], row["live"]["step_ms"])
        for row in rows
        if row.get("steps") and "live" in row
    ]
    if len(pairs) < 2:
        return None
    priced, measured = (_ranks(np.array(column)) for column in zip(*pairs, strict=True))
    if not (priced.std() and measured.std()):
        return None
    return round(float(np.corrcoef(priced, measured)[0, 1]), 3)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Equal values share the mean of their ranks."""
    return np.array([(values < x).sum() + ((values == x).sum() - 1) / 2 for x in values])
