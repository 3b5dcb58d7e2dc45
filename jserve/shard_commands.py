"""Implements ``jserve bench shard``: shardings of one model side by side, priced for a device or run on those here."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from jserve import build
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.progress import start_progress
from jserve.sampling import SamplingParams
from jserve.sharding import Sharding
from jserve.sizing import show_compare
from jserve.sizing.explain import BUCKETS
from jserve.sizing.show_compare import Row
from jserve.types import Request

if TYPE_CHECKING:
    from jserve.sizing.compare import Priced
    from jserve.sizing.twin import StepCost

ROOM = ("memory_utilization", "kv_memory_gb", "n_pages")
"""The fields of errors about weights that leave no room for KV."""
DECODE, ROWS = 0, BUCKETS[0].D
"""Number of the step of eight sequences among those that are priced, and its sequences."""
PACED_TOKENS = 48
"""Of each sequence whose tokens are timed."""
TIMED_STEPS = 15
"""Of each program whose collectives are timed."""
Answers = dict[str, tuple[int, ...]]
"""Id of a request -> the tokens that it drew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A trace run under one sharding on the devices there are."""

    answers: Answers
    wall_s: float
    n_drawn: int
    step_ms: float
    """Between two tokens of a sequence where each group decodes as many as the priced step has: the median over
    sequences of each one's mean."""
    dtype: str
    """Of the weights."""
    programs: tuple[StepCost, ...] = ()
    """Those of the priced steps, and what their collectives cost; () where XLA chose these (mode auto)."""
    first_other: str = ""
    """The first request whose tokens are others than under the first sharding; empty: none is."""
    n_other: int = 0


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
    items = _items(config, model, trace) if live or simulate else []
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
        _each(rows, "live", lambda spec: _run(config, spec, items, console))
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


def _items(config: EngineConfig, model: str, trace: str) -> Sequence[Any]:
    """The requests that ``trace`` names: as of ``load_trace``, or the lines of an OpenAI batch file, all at once."""
    from jserve.sim import recorded, study
    from jserve.sizing.models import find

    if not recorded.is_batch(Path(trace)):
        return study.load_trace(trace, config.model.seed)
    from jserve.serve_commands import batch_requests

    arch = find(model, max_model_len=config.model.max_model_len).arch
    longest = config.model.max_model_len or arch.max_position
    asked = batch_requests(config, Path(trace), vocab_size=arch.V, max_model_len=longest)
    return recorded.of_requests(asked, longest)


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
    """Within, an error that is about the row's sharding is noted in the row."""
    try:
        yield
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


def _run(config: EngineConfig, sharding: Sharding, items: Sequence[Any], console: Any) -> Live:
    # No request of a trace has a structure, and programs with masks are a third of what there is to compile.
    device = dataclasses.replace(config.device, sharding=str(sharding), structured_outputs=False)
    with start_progress(console) as progress:
        engine, info = build.engines(dataclasses.replace(config, device=device), progress)
    try:
        limits = build.each_of(engine)[0].scheduler.limits
        for request in _requests(items, limits.vocab_size, limits.max_model_len):
            engine.submit(request)
        began, drawn = time.monotonic(), dict[str, tuple[int, ...]]()
        for out in engine.drain():
            if out.error is not None:
                raise ConfigError(f"{out.request_id}: {out.error}", field="trace")
            drawn[out.request_id] = (*drawn.get(out.request_id, ()), *out.token_ids)
        wall_s = time.monotonic() - began
        step_ms = _step_ms(engine, min(ROWS, limits.n_slots) * sharding.dp, limits.max_model_len)
        programs = () if sharding.mode == "auto" else _costs(build.each_of(engine)[0].runner)
    finally:
        build.close(engine)
    n_drawn = sum(map(len, drawn.values()))
    return Live(
        answers=drawn,
        wall_s=wall_s,
        n_drawn=n_drawn,
        step_ms=step_ms,
        dtype=info["dtype"],
        programs=programs,
    )


def _costs(runner: Any) -> tuple[StepCost, ...]:
    """Of the programs of an engine that take the priced steps, or its largest ones."""
    from jserve.sizing.twin import step_cost

    decode = [b for b in runner.plain_buckets if not b.P]
    prefill = [b for b in runner.plain_buckets if b.P]
    most = min(BUCKETS[1].P, max(b.P for b in prefill))
    buckets = (
        min(decode, key=lambda b: (b.D < ROWS, abs(b.D - ROWS))),
        min((b for b in prefill if most <= b.P), key=lambda b: (b.P, b.T)),
    )
    return tuple(step_cost(runner, bucket, TIMED_STEPS) for bucket in buckets)


def _step_ms(engine: Any, n_sequences: int, longest: int) -> float:
    """Milliseconds from one token to the next of so many sequences that decode at once, after a quarter of them: the
    mean, since tokens of two steps may come together."""
    n_tokens = min(PACED_TOKENS, longest - 1)
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    for i in range(n_sequences):
        engine.submit(Request(id=f"paced-{i}", prompt_ids=(i % 7,), params=params))
    came: dict[str, list[float]] = {}
    while engine.busy:
        for out in engine.step():
            came.setdefault(out.request_id, []).extend([time.monotonic()] * len(out.token_ids))
    first = n_tokens // 4
    means = [(times[-1] - times[first]) / (n_tokens - 1 - first) for times in came.values()]
    return float(np.median(means)) * 1e3


def _requests(items: Sequence[Any], vocab: int, longest: int) -> list[Request]:
    """Those of a trace all at once, every other one sampled by a seed."""
    from jserve.sim.trace import Streams, request_of

    streams, found = Streams(), []
    for i, item in enumerate(items):
        ids = tuple(t % vocab for t in request_of(item, streams, 0.0).prompt_ids)
        n = max(sum(piece[2] for piece in pieces) for pieces in item.outputs)
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=n, ignore_eos=True)
        if len(ids) + n > longest:
            raise ConfigError(
                f"trace: {item.id} takes {len(ids) + n} tokens, the context is {longest}",
                field="trace",
            )
        found.append(Request(id=item.id, prompt_ids=ids, params=params))
    return found


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
