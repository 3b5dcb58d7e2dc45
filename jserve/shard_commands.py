"""Implements ``jserve bench shard``: shardings of one model side by side, priced for a device or run on those here."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jserve import build
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.progress import start_progress
from jserve.sampling import SamplingParams
from jserve.sharding import Sharding
from jserve.sizing.explain import BUCKETS
from jserve.types import Request

if TYPE_CHECKING:
    from jserve.sizing.compare import Priced

DECODE, ROWS = 0, BUCKETS[0].D
"""Number of the step of eight sequences among those that are priced, and its sequences."""
PACED_TOKENS = 48
"""Of each sequence whose tokens are timed."""
Answers = dict[str, tuple[int, ...]]
"""Id of a request -> the tokens that it drew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A trace run under one sharding on the devices there are."""

    answers: Answers
    wall_s: float
    n_drawn: int
    step_ms: float
    """Between two tokens of a sequence where each group decodes as many as the priced step has: a median."""
    dtype: str
    """Of the weights."""
    first_other: str = ""
    """The first request whose tokens are others than under the first sharding; empty: none is."""
    n_other: int = 0


def bench_shard(
    config: EngineConfig,
    specs: Sequence[str],
    device: str,
    trace: str,
    *,
    compiled: bool,
    simulate: bool,
    live: bool,
    plot: Path | None = None,
    as_json: bool,
    console: Any,
) -> int:
    """Print every sharding's prices; if asked for, what XLA makes of its steps for H200s (``compiled``), what ``trace``
    comes to over the prices (``simulate``), and what running it gave (``live``). Returns the exit code: 1 where weights
    are float32 and a sharding drew other tokens than the first one.

    Args:
        plot: an SVG of all of it.

    Raises:
        ConfigError: a sharding, device, trace or file that cannot be honoured.
    """
    import sys

    from jserve.sim import plot as plots
    from jserve.sim.study import load_trace
    from jserve.sizing import show
    from jserve.sizing.compare import priced

    if plot is not None:
        plots.check(plot)
    if config.device.sharding:
        raise ConfigError("sharding: bench shard takes --spec", field="sharding")
    if not specs:
        raise ConfigError("spec: there is none to look at", field="spec")
    model = config.model.model or str(build.shipped())
    shardings = [Sharding.of(spec) for spec in specs]
    if compiled:
        from jserve.sizing import compiled as compiler

        compiler.check(device)
    prices = [priced(model, spec, device, dtype=config.model.dtype) for spec in shardings]
    made = _compiled(config, model, prices, console) if compiled else []
    runs: list[Live] = []
    items = load_trace(trace, config.model.seed) if live or simulate else []
    foreseen = [_simulated(model, spec, device, config, items) for spec in shardings if simulate]
    for sharding in shardings if live else []:
        runs.append(_run(config, sharding, items, console))
        if len(runs) > 1:
            runs[-1] = _compared(runs[-1], runs[0].answers)
    rows = [
        {"spec": spec, **dataclasses.asdict(price), "sharding": price.sharding.as_mapping()}
        | ({"compiled": made[i]} if made else {})
        | ({"simulated": foreseen[i]} if foreseen else {})
        | ({"live": _figures(runs[i])} if runs else {})
        for i, (spec, price) in enumerate(zip(specs, prices, strict=True))
    ]
    about = {"model": model, "device": device, "rank_correlation": _rank_correlation(rows)}
    if plot is not None:
        _draw(rows, plot, f"{Path(model).name}, priced for {device}")
    if as_json:
        sys.stdout.write(json.dumps({**about, "specs": rows}, indent=1) + "\n")
    else:
        _print(rows, about, Console(width=None if sys.stdout.isatty() else show.WIDTH))
    return 1 if any(run.n_other and run.dtype == "float32" for run in runs) else 0


def _compiled(
    config: EngineConfig, model: str, prices: Sequence[Priced], console: Any
) -> list[tuple[dict[str, Any], ...]]:
    """Of every sharding, the figures of its two steps as XLA compiles them for H200s."""
    from jserve.sizing.compiled import compiled_steps

    found = []
    with start_progress(console) as progress:
        for done, price in enumerate(prices):
            progress("compile shardings", done, len(prices))
            found.append(compiled_steps(model, price.sharding, price.device_bytes, config))
        progress("compile shardings", len(prices), len(prices))
    return found


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
    finally:
        build.close(engine)
    n_drawn = sum(map(len, drawn.values()))
    return Live(
        answers=drawn,
        wall_s=wall_s,
        n_drawn=n_drawn,
        step_ms=step_ms,
        dtype=info["dtype"],
    )


def _step_ms(engine: Any, n_sequences: int, longest: int) -> float:
    """The median time from one token to the next of so many sequences that decode at once."""
    n_tokens = min(PACED_TOKENS, longest - 1)
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    for i in range(n_sequences):
        engine.submit(Request(id=f"paced-{i}", prompt_ids=(i % 7,), params=params))
    came: dict[str, list[float]] = {}
    while engine.busy:
        for out in engine.step():
            came.setdefault(out.request_id, []).extend([time.monotonic()] * len(out.token_ids))
    gaps = [np.diff(times[n_tokens // 4 :]) for times in came.values()]
    return float(np.median(np.concatenate(gaps))) * 1e3


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


def _compared(run: Live, first: Answers) -> Live:
    other = [name for name, tokens in first.items() if run.answers.get(name) != tokens]
    return dataclasses.replace(run, n_other=len(other), first_other=other[0] if other else "")


def _figures(run: Live) -> dict[str, Any]:
    return {
        "requests": len(run.answers),
        "output_tok_s": round(run.n_drawn / run.wall_s, 1),
        "step_ms": round(run.step_ms, 3),
        "other_requests": run.n_other,
        "first_other": run.first_other,
    }


def _rank_correlation(rows: Sequence[dict[str, Any]]) -> float | None:
    """Spearman's, of the priced step of eight sequences and the one that was measured here; None: there is no
    order."""
    pairs = [
        (row["steps"][DECODE]["step_ms"], row["live"]["step_ms"])
        for row in rows
        if row["steps"] and "live" in row
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


def _draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """A panel for each priced step, with its collectives apart, and one for what ran here."""
    from jserve.sim.plot import figure

    specs, live = [row["spec"] for row in rows], "live" in rows[0]
    with figure(path, 2 + live, title) as axes:
        for i, name in enumerate(("8 sequences", "256 prompt tokens")):
            steps = [row["steps"][i] if row["steps"] else None for row in rows]
            links = [step["collective_ms"] if step else 0.0 for step in steps]
            work = [step["step_ms"] - step["collective_ms"] if step else 0.0 for step in steps]
            axes[i].barh(specs, work, label="weights and products")
            axes[i].barh(specs, links, left=work, label="collectives")
            axes[i].set(xlabel=f"ms, {name}")
            axes[i].invert_yaxis()
        axes[0].legend()
        if live:
            axes[2].barh(specs, [row["live"]["step_ms"] for row in rows], color="grey")
            axes[2].set(xlabel="ms, 8 sequences, here")
            axes[2].invert_yaxis()


def _in_short(figures: dict[str, Any]) -> str:
    """Of a step as compiled."""
    n = sum(figures["collectives"].values())
    return f"{n}; {figures['nodes']}; {figures['temp_bytes'] / 2**20:.1f}"


def _print(rows: Sequence[dict[str, Any]], about: dict[str, Any], console: Console) -> None:
    table = Table("spec", "weights MiB a device")
    for step in ("8 sequences", "256 prompt tokens"):
        table.add_column(f"{step}: collectives, MiB, ms; step ms", justify="right")
    if "compiled" in rows[0]:
        table.add_column("compiled: collectives; nodes; scratch MiB of both steps", justify="right")
    if "simulated" in rows[0]:
        table.add_column("simulated: first token p99 ms, between tokens p99 ms", justify="right")
        table.add_column("output tok/s", justify="right")
    if "live" in rows[0]:
        table.add_column("here: step ms", justify="right")
        table.add_column("output tok/s", justify="right")
        table.add_column("other tokens than the first", justify="right")
    for row in rows:
        cells = [
            f"{s['collectives']}, {s['collective_mib']:.2f}, {s['collective_ms']:.2f}; {s['step_ms']:.2f}"
            for s in row["steps"]
        ] or ["XLA's, not known here"] * 2
        if made := row.get("compiled"):
            cells.append("\n".join(map(_in_short, made)))
        if seen := row.get("simulated"):
            cells.append(f"{seen['ttft_p99_ms']:.1f}, {seen['itl_p99_ms']:.2f}")
            cells.append(f"{seen['output_tok_s']:.0f}")
        if live := row.get("live"):
            same = f"{live['other_requests']} of {live['requests']}"
            first = f", {live['first_other']} first" if live["first_other"] else ""
            cells += [f"{live['step_ms']:.2f}", f"{live['output_tok_s']:.0f}", same + first]
        table.add_row(row["spec"], f"{row['device_bytes'] / 2**20:.1f}", *cells)
    console.print(table, highlight=False)
    console.print(
        f"[dim]Times of steps and collectives are a roofline's, of {about['device']}; what ran here says so.[/]",
        highlight=False,
    )
    if (agreement := about["rank_correlation"]) is not None:
        console.print(f"order of steps, priced and here: rank correlation {agreement:.2f}")
