"""Result files: written, read back, and shown as tables.

It owns the layout of tables and the list of figures that are compared.

    python -m bench.report FILE...      shows result files again
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.stats import pair_ratio

WIDTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of one workload: where it lies in a result and how it is shown."""

    workload: str
    """Name up to ``@``; empty fits every workload."""
    title: str
    path: tuple[str, ...]
    higher_is_better: bool | None = None
    """None: shown, not compared."""

    def of(self, result: dict[str, Any]) -> float | None:
        value: Any = result
        for key in self.path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


FIGURES = (
    Figure(workload="", title="out tok/s", path=("output_tok_s",), higher_is_better=True),
    Figure(workload="", title="decode tok/s", path=("decode_tok_s_p50",), higher_is_better=True),
    Figure(workload="", title="TTFT p50 ms", path=("ttft_ms", "p50"), higher_is_better=False),
    Figure(workload="", title="TTFT p99", path=("ttft_ms", "p99")),
    Figure(workload="", title="ITL p50 ms", path=("itl_ms", "p50"), higher_is_better=False),
    Figure(workload="", title="p95", path=("itl_ms", "p95")),
    Figure(workload="", title="p99", path=("itl_ms", "p99")),
    Figure(workload="", title="max", path=("itl_ms", "max")),
    Figure(workload="S3", title="TTFT 1st wave", path=("ttft_first_wave_ms",)),
    Figure(workload="S3", title="steady", path=("ttft_steady_ms",), higher_is_better=False),
    Figure(workload="S4", title="4k TTFT ms", path=("long_ttft_ms",), higher_is_better=False),
    Figure(workload="S4", title="longest gap ms", path=("longest_gap_ms",), higher_is_better=False),
    Figure(workload="S4", title="finished early", path=("finished_early",)),
    Figure(workload="", title="% of limit", path=("share_of_bandwidth",)),
    Figure(workload="", title="GFLOP/s", path=("gflop_s",)),
    Figure(workload="", title="triad GB/s", path=("bandwidth", "gb_s_best")),
    Figure(workload="", title="foreign cores", path=("cpu", "foreign_cores")),
    Figure(workload="", title="errors", path=("errors",)),
)
START = (
    Figure(workload="", title="ready s", path=("ready_s",)),
    Figure(workload="", title="first token s", path=("first_token_s",), higher_is_better=False),
    Figure(workload="", title="CPU s", path=("cpu_s",)),
    Figure(workload="", title="foreign cores", path=("cpu", "foreign_cores")),
)


def write(result: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


def exit_code(result: dict[str, Any]) -> int:
    """0 when every turn ran and every request was served, else 1."""
    runs = [w for turn in result["turns"] for w in turn.get("workloads", {}).values()]
    failed = any("error" in turn for turn in result["turns"]) or any(w["errors"] for w in runs)
    return int(failed or not runs)


def one_line(name: str, result: dict[str, Any]) -> str:
    """Progress: the most telling figures of one workload."""
    shown = [
        f"{f.title} {_text(value)}"
        for f in (START if name == "start" else FIGURES)
        if _fits(f, name) and (value := f.of(result)) is not None
    ]
    return f"{name}: {', '.join(shown)}"


def _fits(figure: Figure, workload: str) -> bool:
    return figure.workload in ("", workload.partition("@")[0])


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def add_limits(result: dict[str, Any]) -> None:
    """Put each run beside its physical limit, in place, where the model's size is known.

    ``share_of_bandwidth`` (%): weight bytes read per second by single-stream decoding (S1) over the
    probed bandwidth. ``gflop_s``: multiplications and additions of the weights' matrix products
    over the wall time; attention is not counted.
    """
    model = result.get("model")
    if not model:
        return
    for turn in result["turns"]:
        for name, run in turn.get("workloads", {}).items():
            if not run.get("wall_s"):
                continue
            tokens = run["prompt_tokens"] + run["output_tokens"]
            flop = 2 * (model["body_params"] * tokens + model["head_params"] * run["output_tokens"])
            run["gflop_s"] = round(flop / run["wall_s"] / 1e9, 2)
            probed, rate = run.get("bandwidth", {}).get("gb_s_best"), run.get("decode_tok_s_p50")
            if name == "S1" and probed and rate:
                share = rate * model.get("read_bytes", model["weight_bytes"]) / 1e9 / probed
                run["share_of_bandwidth"] = round(100 * share, 1)


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """All tables of one result."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    for line in _head(result):
        console.print(line, highlight=False, markup=False)
    for table in tables(result):
        console.print(table)
    for turn in result["turns"]:
        if "error" in turn:
            console.print(f"{turn['engine']} round {turn['round']}: {turn['error']}", markup=False)


def _head(result: dict[str, Any]) -> Iterator[str]:
    m = result["machine"]
    yield f"{result['kind']} | {m['date']} | {m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB"
    if "model" in result:
        model = result["model"]
        yield f"model {model['name']}, {model['weight_bytes'] / 1e9:.3f} GB of weights"
    for name, version in result.get("engines", {}).items():
        yield f"{name}: {version}"
    yield "cells: median over rounds (single rounds in brackets)"


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """One table per workload, then start-up, then ratios."""
    for name in workload_names(result):
        yield _engine_table(result, name, FIGURES, lambda t, n=name: t.get("workloads", {}).get(n))
    if any("start" in turn for turn in result["turns"]):
        yield _start_table(result)
    rows = list(ratios(result))
    if rows:
        yield _ratio_table(rows)


def workload_names(result: dict[str, Any]) -> list[str]:
    names = [name for turn in result["turns"] for name in turn.get("workloads", {})]
    return list(dict.fromkeys(names))


def _engines(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(turn["engine"] for turn in result["turns"]))


def _engine_table(
    result: dict[str, Any],
    title: str,
    figures: Sequence[Figure],
    pick: Callable[[dict[str, Any]], dict[str, Any] | None],
) -> Table:
    """Rows are engines; a cell is the median over rounds."""
    by_engine = {
        name: [run for t in result["turns"] if t["engine"] == name and (run := pick(t))]
        for name in _engines(result)
    }
    everything = [run for runs in by_engine.values() for run in runs]
    shown = [f for f in figures if _fits(f, title) and any(f.of(r) is not None for r in everything)]
    table = Table("engine", *(f.title for f in shown), title=title, title_justify="left")
    for name, runs in by_engine.items():
        if runs:
            table.add_row(name, *(_cell([f.of(r) for r in runs]) for f in shown))
    return table


def _cell(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return _text(known[0])
    return f"{_text(statistics.median(known))} ({' '.join(map(_text, known))})"


def _start_table(result: dict[str, Any]) -> Table:
    """Start-up, where a cold compile cache is a row of its own."""
    split = {
        **result,
        "turns": [
            {**t, "engine": f"{t['engine']} cold" if t["start"]["cold"] else t["engine"]}
            for t in result["turns"]
            if "start" in t
        ],
    }
    return _engine_table(split, "start", START, lambda t: t["start"])


def ratios(result: dict[str, Any], ours: str = "jserve") -> Iterator[dict[str, Any]]:
    """jserve over each peer, figure by figure, paired by round."""
    for name in workload_names(result):
        for figure in FIGURES:
            if figure.higher_is_better is None or not _fits(figure, name):
                continue
            for peer in _engines(result):
                pair = _pairs(result, name, figure, ours, peer) if peer != ours else None
                if pair:
                    yield {"workload": name, "figure": figure.title, "peer": peer, **pair}


def _pairs(
    result: dict[str, Any], name: str, figure: Figure, ours: str, peer: str
) -> dict[str, float] | None:
    found: dict[int, dict[str, float]] = {}
    for turn in result["turns"]:
        value = figure.of(turn.get("workloads", {}).get(name, {}))
        if value is not None:
            found.setdefault(turn["round"], {})[turn["engine"]] = value
    both = [r for r in found.values() if ours in r and peer in r]
    return pair_ratio([r[ours] for r in both], [r[peer] for r in both])


def _ratio_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "workload",
        "figure",
        "jserve / peer",
        "median",
        "min",
        "max",
        "pairs",
        title="ratios, taken inside each round",
        title_justify="left",
    )
    for row in rows:
        numbers = (f"{row[k]:.2f}" for k in ("median", "min", "max"))
        table.add_row(row["workload"], row["figure"], row["peer"], *numbers, str(row["pairs"]))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.report", description="Show result files.")
    p.add_argument("files", nargs="+", type=Path, help="files written by --json")
    for file in p.parse_args(argv).files:
        show(json.loads(file.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
