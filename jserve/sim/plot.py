"""Plots simulations as SVG: a run over time and by percentile, or a sweep.

It owns looks only; ``bench`` draws panels of its own with ``figure``. Needs matplotlib (the extra ``plot``), which
is imported when a plot is drawn.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from jserve.errors import ConfigError
from jserve.sim.report import ALL, Report, Slo, timeline
from jserve.sim.simulate import Run

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jserve",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "path.simplify_threshold": 1.0,
}
BINS = 120
"""Points of a line over time, so that a file stays small however long the run."""


def _pyplot() -> Any:
    """Raises ConfigError where matplotlib is missing."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError(
            "plots need matplotlib: pip install 'jserve[plot]'", field="plot"
        ) from None
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    return importlib.import_module("matplotlib.pyplot")


def check(path: Path) -> None:
    """Before a long run: can a plot be drawn and written?

    Raises:
        ConfigError: no matplotlib, another suffix than .svg, no such directory.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"plot {path}: the name must end in .svg", field="plot")
    if not path.parent.is_dir():
        raise ConfigError(f"plot {path}: there is no directory {path.parent}", field="plot")
    _pyplot()


@contextlib.contextmanager
def figure(path: Path, panels: int, title: str) -> Iterator[Any]:
    """Axes of ``panels`` panels side by side; written to ``path`` when all is drawn."""
    plt = _pyplot()
    drawn, axes = plt.subplots(
        1, panels, figsize=(3.7 * panels, 3.6), layout="constrained", squeeze=False
    )
    yield axes[0]
    drawn.suptitle(title)
    _save(plt, drawn, path)


def draw_run(run: Run, report: Report, slo: Slo, path: Path, title: str) -> None:
    """Four panels of one run: TTFT and ITL by percentile, queue and pages, good requests."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    _percentiles(axes[0, 0], _ttfts(run), "time to first token, ms")
    gaps = {lane: np.concatenate(parts) for lane, parts in run.records.gaps.items()}
    _percentiles(axes[0, 1], gaps, "inter-token latency, ms")
    _state(axes[1, 0], run, report["cache"]["pages"])
    _goodput(axes[1, 1], run, slo)
    figure.suptitle(title)
    _save(plt, figure, path)


def _ttfts(run: Run) -> dict[str, np.ndarray]:
    lanes = sorted({d.lane for d in run.records.done})
    return {
        lane: np.array([d.ttft for d in run.records.done if d.lane == lane and d.ttft is not None])
        for lane in lanes
    }


def _percentiles(axis: Any, by_lane: dict[str, np.ndarray], label: str) -> None:
    shares = np.concatenate([np.linspace(0, 90, 46), np.linspace(90.5, 100, 40)])
    for lane, seconds in sorted(by_lane.items()):
        if len(seconds):
            axis.plot(np.percentile(seconds, shares) * 1e3, shares, label=lane)
    axis.set_xscale("log")
    axis.set(xlabel=label, ylabel="% of requests" if "first" in label else "% of tokens")
    axis.legend()


def _state(axis: Any, run: Run, n_pages: int) -> None:
    samples = _thinned(np.array(run.samples or [(0, 0, 0, 0, 0)], float))
    at = samples[:, 0] - run.began
    axis.plot(at, samples[:, 1], label="waiting")
    axis.plot(at, samples[:, 2], label="running")
    axis.set(xlabel="seconds", ylabel="sequences")
    axis.legend(loc="upper left")
    pages = axis.twinx()
    held = 100 * (1 - (samples[:, 3] + samples[:, 4]) / max(1, n_pages))
    pages.plot(at, held, color="grey", linewidth=0.8)
    pages.set(ylabel="% of pages held", ylim=(0, 105))
    pages.grid(False)


def _thinned(samples: np.ndarray) -> np.ndarray:
    """At most ``BINS`` means of neighbours."""
    if len(samples) <= BINS:
        return samples
    return np.array([part.mean(axis=0) for part in np.array_split(samples, BINS)])


def _goodput(axis: Any, run: Run, slo: Slo) -> None:
    bin_s = max(1e-3, run.seconds / 40)
    for lane in sorted({d.lane for d in run.records.done}):
        done = [d for d in run.records.done if d.lane == lane]
        rows = np.array(timeline(done, slo, bin_s), float)
        line = axis.plot(rows[:, 0] - run.began, rows[:, 2] / bin_s, label=f"{lane}, good")
        color = line[0].get_color()
        axis.plot(rows[:, 0] - run.began, rows[:, 1] / bin_s, ":", color=color, label="sent")
    axis.set_yscale("symlog", linthresh=10)  # a flood would press the rest flat
    axis.set(xlabel="seconds (of arrival)", ylabel="requests per second", ylim=(0, None))
    axis.legend()


def draw_sweep(reports: Seq[tuple[str, Report]], path: Path, title: str) -> None:
    """Three panels over the values of a sweep: TTFT and ITL, throughput, good share.

    One line per lane, or per value of a second axis.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    settings = [report["setting"] for _, report in reports]
    name, *second = settings[0]
    values = list(dict.fromkeys(setting[name] for setting in settings))
    for tag, rows in _lines([report for _, report in reports], second):
        at = np.arange(len(rows))
        line = axes[0].plot(at, _values(rows, "ttft_ms", "p99"), "o-", label=f"{tag}TTFT p99")
        color = line[0].get_color()
        itl = _values(rows, "itl_ms", "p99")
        axes[0].plot(at, itl, "s--", color=color, label=f"{tag}ITL p99")
        axes[1].plot(at, _values(rows, "output_tok_s"), "o-", label=f"{tag}output tok/s")
        shares = [100 * value for value in _values(rows, "good_share")]
        axes[2].plot(at, shares, "o-", label=f"{tag}good")
    axes[0].set_yscale("log")
    for axis, label in zip(axes, ("ms", "tokens per second", "% of requests"), strict=True):
        axis.set_xticks(range(len(values)), values, rotation=30 if len(values) > 7 else 0)
        axis.set(xlabel=name, ylabel=label)
        axis.legend(fontsize=7)
    axes[1].set_ylim(bottom=0)
    axes[2].set_ylim(0, 105)
    figure.suptitle(title)
    _save(plt, figure, path)


def _lines(reports: list[Report], second: list[str]) -> list[tuple[str, list[Any]]]:
    """(prefix of the labels, the lane's figures at each point) of every line."""
    if second:
        tags = list(dict.fromkeys(report["setting"][second[0]] for report in reports))
        return [
            (f"{tag} ", [r["lanes"][ALL] for r in reports if r["setting"][second[0]] == tag])
            for tag in tags
        ]
    lanes = list(reports[0]["lanes"])
    if len(lanes) == 2:
        return [("", [report["lanes"][ALL] for report in reports])]
    return [
        (f"{lane} ", [report["lanes"].get(lane) for report in reports])
        for lane in lanes
        if lane != ALL
    ]


def _values(rows: Seq[dict[str, Any] | None], *keys: str) -> list[float]:
    found = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        found.append(float("nan") if value is None else float(value))
    return found


def _save(plt: Any, figure: Any, path: Path) -> None:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    try:
        path.write_text(compact(drawn.getvalue()))
    except OSError as e:
        raise ConfigError(f"plot {path}: {e.strerror}", field="plot") from None
    finally:
        plt.close(figure)


def compact(svg: str) -> str:
    """The same picture in fewer bytes: a hundredth of a point is fine enough."""
    return "".join(line.strip() + "\n" for line in re.sub(r"(\.\d\d)\d+", r"\1", svg).splitlines())
