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
    from jserve.sizing.twin import StepCost

ROOM = ("memory_utilization", "kv_memory_gb", "n_pages")
"""The fields of errors about weights that leave no room for KV."""
DECODE, ROWS = 0, BUCKETS[0].D
"""Number of the step of eight sequences among those that are priced, and its sequences."""
PACED_TOKENS = 48
"""Of each sequence whose tokens are timed."""
TIMED_STEPS = 15
"""Of each program whose collectives are timed."""
Row = dict[str, Any]
"""The figures of one sharding, or why it is refused."""
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
        _draw(rows, plot, f"{Path(model).name}, priced for {device}")
    if as_json:
        sys.stdout.write(json.dumps({**about, "specs": rows}, indent=1) + "\n")
    else:
        _print(rows, about, Console(width=None if sys.stdout.isatty() else show.WIDTH))
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


def _draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """A panel for each priced step, with its collectives apart, and one for what ran here."""
    from jserve.sim.plot import figure

    rows = [row for row in rows if not row["refused"]]
    specs, live = [row["spec"] for row in rows], _has(rows, "live")
    cost = _has(rows, "simulated")
    with figure(path, 2 + 3 * live + cost, title) as axes:
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
            axes[2].set(xlabel="ms from token to token, 8 sequences, here")
            axes[2].invert_yaxis()
            for i in range(2):
                _draw_exposed(axes[3 + i], rows, i)
        if cost:
            _draw_cost(axes[-1], rows)


def _draw_exposed(axis: Any, rows: Sequence[Row], i: int) -> None:
    """Of the program of each sharding that takes a priced step, the time of its twin and the rest."""
    ran = [row for row in rows if row["live"]["programs"]]
    programs = [row["live"]["programs"][i] for row in ran]
    specs, exposed = [row["spec"] for row in ran], [p["exposed_ms"] for p in programs]
    work = [p["step_ms"] - p["exposed_ms"] for p in programs]
    axis.barh(specs, work, color="grey")
    axis.barh(specs, exposed, left=work, label="exposed collectives")
    axis.set(xlabel=f"ms, program of {('8 sequences', '256 prompt tokens')[i]}, here")
    axis.invert_yaxis()
    axis.legend()


def _draw_cost(axis: Any, rows: Sequence[Row]) -> None:
    made = [row["simulated"] for row in rows]
    priced = any(m["usd_per_m_tokens"] is not None for m in made)
    name = "usd_per_m_tokens" if priced else "device_hours_per_m_tokens"
    axis.barh([row["spec"] for row in rows], [m[name] or 0.0 for m in made], color="grey")
    axis.set(xlabel=f"{'$' if priced else 'device-hours'} a million output tokens, simulated")
    axis.invert_yaxis()


def _in_short(figures: dict[str, Any]) -> str:
    """Of a step as compiled."""
    n = sum(figures["collectives"].values())
    return f"{n}; {figures['nodes']}; {figures['temp_bytes'] / 2**20:.1f}"


def _has(rows: Sequence[Row], name: str) -> bool:
    return any(name in row for row in rows)


def _print(rows: Sequence[Row], about: dict[str, Any], console: Console) -> None:
    table = Table("spec", "weights MiB a device")
    table.add_column("KV of it: B a token, pages; sequences of so many tokens", justify="right")
    for step in ("8 sequences", "256 prompt tokens"):
        table.add_column(f"{step}: collectives, MiB, expected ms; step ms", justify="right")
    if _has(rows, "compiled"):
        table.add_column("compiled: collectives; nodes; scratch MiB of both steps", justify="right")
    if _has(rows, "simulated"):
        table.add_column("simulated: first token p99 ms, between tokens p99 ms", justify="right")
        table.add_column("output tok/s; device-hours and $ a million", justify="right")
    if _has(rows, "live"):
        table.add_column("here: step ms", justify="right")
        table.add_column("its two programs: collectives, MiB, exposed ms; ms", justify="right")
        table.add_column("output tok/s", justify="right")
        table.add_column("other tokens than the first", justify="right")
    for row in rows:
        if "device_bytes" in row:
            table.add_row(*_cells(row, rows))
    console.print(table, highlight=False)
    console.print(
        f"[dim]Times of steps and collectives are a roofline's, of {about['device']}; what ran here says so.[/]",
        highlight=False,
    )
    if (agreement := about["rank_correlation"]) is not None:
        console.print(f"order of steps, priced and here: rank correlation {agreement:.2f}")
    for row in rows:
        if row["refused"]:
            console.print(
                f"{row['spec']} is refused: {row['refused']}", highlight=False, markup=False
            )


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Of the table, in the order of its columns."""
    cells = [row["spec"], f"{row['device_bytes'] / 2**20:.1f}", _kv_in_short(row["kv"])]
    cells += [
        f"{s['collectives']}, {s['collective_mib']:.2f}, {s['collective_ms']:.2f}; {s['step_ms']:.2f}"
        for s in row["steps"]
    ] or ["XLA's, not known here"] * 2
    if _has(rows, "compiled"):
        cells.append("\n".join(map(_in_short, row.get("compiled", ()))))
    if _has(rows, "simulated"):
        seen = row.get("simulated")
        cells.append(f"{seen['ttft_p99_ms']:.1f}, {seen['itl_p99_ms']:.2f}" if seen else "")
        cells.append(_cost_in_short(seen) if seen else "")
    if live := row.get("live"):
        same = f"{live['other_requests']} of {live['requests']}"
        first = f", {live['first_other']} first" if live["first_other"] else ""
        programs = "\n".join(map(_program_in_short, live["programs"])) or "XLA's, not known here"
        cells += [f"{live['step_ms']:.2f}", programs, f"{live['output_tok_s']:.0f}", same + first]
    return cells


def _cost_in_short(seen: dict[str, Any]) -> str:
    hours, usd = seen["device_hours_per_m_tokens"], seen["usd_per_m_tokens"]
    cost = "" if hours is None else f"; {hours:.3f} h" + ("" if usd is None else f", ${usd:.3f}")
    return f"{seen['output_tok_s']:.0f}{cost}"


def _program_in_short(p: dict[str, Any]) -> str:
    size = f"{p['collective_mib']:.2f}, {p['exposed_ms']:.2f}; {p['step_ms']:.2f}"
    return f"{p['collectives']}, {size}"


def _kv_in_short(kv: dict[str, Any]) -> str:
    if kv["pages"] is None:
        return f"{kv['token_bytes']}, not known"
    held = ", ".join(f"{n} of {length}" for length, n in kv["sequences"].items())
    return f"{kv['token_bytes']}, {kv['pages']}; {held}"
