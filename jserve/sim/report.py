"""Summarises a simulation: percentiles per lane, goodput under an SLO, cache and queue figures.

Percentiles are linear between ranks. A request is good when it ended by itself and kept every
target it has: its own deadlines where it states them, else those of the SLO. Shares are of all
requests sent, the refused ones included. Rates are over the time from the first arrival to the
last end.
"""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jserve.sim.fault_report import fault_line, fault_report
from jserve.sim.records import Done, Record, seconds_of
from jserve.sim.simulate import Run
from jserve.sim.spread import spread
from jserve.sim.trace import TraceItem

ALL = "all"
WIDTH = 150
"""Columns of a table that goes to no terminal."""
Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets of requests that state none, in milliseconds; infinity asks nothing."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    def kept(self, done: Done) -> bool:
        """True for a request that counts as good."""
        ended = done.error is None and done.finish in ("stop", "length")
        ttft, tpot = self._targets(done.ttft_deadline, done.tpot_deadline)
        return (
            ended
            and (done.ttft or 0.0) <= ttft
            and (done.tpot or 0.0) <= tpot
            and done.end - done.at <= (math.inf if done.deadline is None else done.deadline)
        )

    def missed(self, record: Record) -> bool:
        """True for a request whose tokens so far are too late, whatever comes (but for its being sent again)."""
        item, times = record.item, record.times[0]
        if not times:
            return False
        ttft, tpot = self.targets(item)
        n_later = sum(piece[2] for piece in item.outputs[0])  # with the end token, if it is drawn
        return times[0] - record.at > ttft or (times[-1] - times[0]) / max(1, n_later) > tpot

    def targets(self, item: TraceItem) -> tuple[float, float]:
        """Seconds to the first token of a request, and per later one: its own, else these."""
        return self._targets(seconds_of(item.ttft_deadline_ms), seconds_of(item.tpot_deadline_ms))

    def _targets(self, ttft: float | None, tpot: float | None) -> tuple[float, float]:
        return (
            self.ttft_ms / 1e3 if ttft is None else ttft,
            self.tpot_ms / 1e3 if tpot is None else tpot,
        )


def summarise(run: Run, slo: Slo) -> Report:
    """Every figure of a run, ready for JSON. Times in milliseconds where the name says so."""
    lanes = sorted({done.lane for done in run.records.done})
    groups = {ALL: run.records.done} | {
        lane: [d for d in run.records.done if d.lane == lane] for lane in lanes
    }
    return {
        "seconds": _round(run.seconds),
        "steps": run.n_steps,
        "device_busy_share": _share(run.busy_s, run.seconds),
        "computed_tokens": run.n_tokens,
        "cache": _cache(run),
        "preemptions": run.stats.preemptions,
        "host": _host(run),
        "queue": _queue(run),
        "unsent_turns": run.records.n_unsent,
        "replicas": _replicas(run),
        "faults": fault_report(run, slo.kept),
        "lanes": {
            name: _lane(done, _gaps(run, name), slo, run.seconds) for name, done in groups.items()
        },
    }


def _gaps(run: Run, name: str) -> np.ndarray:
    kept = run.records.gaps
    parts = [gaps for lane, all in kept.items() if name in (ALL, lane) for gaps in all]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _cache(run: Run) -> dict[str, Any]:
    stats = run.stats
    return {
        "lookup_tokens": stats.cache_query_tokens,
        "hit_tokens": stats.cache_hit_tokens,
        "hit_rate": _share(stats.cache_hit_tokens, stats.cache_query_tokens),
        "evicted_pages": run.n_evicted,
        "pages": stats.pages_total,
    }


def _host(run: Run) -> dict[str, Any]:
    """Counts of pages that went to host memory and came back; empty without such a tier."""
    counters = run.counters
    if "host_pages" not in counters:
        return {}
    return {
        "pages": int(counters["host_pages"]),
        "swaps_out": int(counters["swaps_out_total"]),
        "swaps_back": int(counters["swaps_back_total"]),
        "swaps_lost": int(counters["swaps_lost_total"]),
        "swapped_pages": int(counters["host_pages_stowed_total"]),
        "saved_pages": int(counters["host_pages_saved_total"]),
        "loaded_pages": int(counters["host_pages_loaded_total"]),
        "moves_s": _round(run.moved_s),
    }


def _replicas(run: Run) -> dict[str, Any]:
    """The balance between several engines; empty for one."""
    tokens = run.by_replica
    if not tokens:
        return {}
    mean = sum(tokens) / len(tokens)
    found = {
        "n": len(tokens),
        "mean": _share(run.replica_s, run.seconds),
        "computed_tokens": tokens,
        "most_over_mean": _share(max(tokens), mean),
    }
    if run.n_remote is not None:
        found["remote_prefills"] = run.n_remote
        found["pages_handed_over"] = int(run.counters["disk_pages_read_total"])
    if run.role_changes is not None:
        found["role_changes"] = len(run.role_changes)
    return found


def _queue(run: Run) -> dict[str, Any]:
    samples = np.array(run.samples or [(0, 0, 0, 0, 0)], float)
    total = max(1, run.stats.pages_total)
    held = 1 - (samples[:, 3] + samples[:, 4]) / total
    return {
        "waiting_mean": _round(samples[:, 1].mean()),
        "waiting_max": int(samples[:, 1].max()),
        "running_mean": _round(samples[:, 2].mean()),
        "running_max": int(samples[:, 2].max()),
        "pages_held_mean": _round(held.mean()),
        "pages_held_max": _round(held.max()),
    }


def _lane(done: list[Done], gaps_s: np.ndarray, slo: Slo, seconds: float) -> dict[str, Any]:
    ended = [d for d in done if d.error is None and d.finish in ("stop", "length")]
    good = sum(map(slo.kept, done))
    ran = [d for d in done if d.ttft is not None]
    errors = Counter(d.error for d in done if d.error is not None)
    return {
        "requests": len(done),
        "ended": len(ended),
        "cancelled": sum(d.finish == "abort" for d in done),
        "errors": dict(sorted(errors.items())),
        "retries": sum(d.n_sent - 1 for d in done),
        "ttft_ms": spread([d.ttft for d in ran if d.ttft is not None]),
        "itl_ms": spread(gaps_s),
        "e2e_ms": spread([d.end - d.at for d in ended]),
        "request_s": _rate(len(ended), seconds),
        "output_tok_s": _rate(sum(d.n_output for d in done), seconds),
        "prompt_tok_s": _rate(sum(d.n_prompt for d in ran), seconds),
        "cached_share": _share(sum(d.n_cached for d in ran), sum(d.n_prompt for d in ran)),
        "preempted_share": _share(sum(d.n_preempted > 0 for d in ran), len(ran)),
        "good_share": _share(good, len(done)),
        "goodput_request_s": _rate(good, seconds),
        "goodput_tok_s": _rate(sum(d.n_output for d in done if slo.kept(d)), seconds),
    }


def timeline(done: Iterable[Done], slo: Slo, bin_s: float) -> list[tuple[float, int, int, int]]:
    """(start of the bin, arrived, good, refused) by time of arrival."""
    bins: dict[int, list[int]] = {}
    for d in done:
        counts = bins.setdefault(int(d.at // bin_s), [0, 0, 0])
        counts[0] += 1
        counts[1] += slo.kept(d)
        counts[2] += d.refused
    return [(number * bin_s, *bins[number]) for number in sorted(bins)]  # type: ignore[misc]


def recovery_s(done: Iterable[Done], slo: Slo, since: float) -> float:
    """Seconds after ``since`` at which the last request arrived that was not good; 0 for none."""
    return max([d.at - since for d in done if d.at >= since and not slo.kept(d)], default=0.0)


def _round(value: float) -> float:
    return round(float(value), 4)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds else None


Get = Callable[[Report, dict[str, Any]], Any]
"""From (report, one lane of it) to what a column shows."""

COLUMNS: tuple[tuple[str, Get], ...] = (
    ("requests", lambda _, lane: lane["requests"]),
    ("refused", lambda _, lane: sum(lane["errors"].values())),
    ("req/s", lambda _, lane: lane["request_s"]),
    ("out tok/s", lambda _, lane: lane["output_tok_s"]),
    ("TTFT p50", lambda _, lane: _point(lane, "ttft_ms", "p50")),
    ("p99 ms", lambda _, lane: _point(lane, "ttft_ms", "p99")),
    ("ITL p50", lambda _, lane: _point(lane, "itl_ms", "p50")),
    ("p99 ms", lambda _, lane: _point(lane, "itl_ms", "p99")),
    ("cached", lambda _, lane: _percent(lane["cached_share"])),
    ("good", lambda _, lane: _percent(lane["good_share"])),
    ("good req/s", lambda _, lane: lane["goodput_request_s"]),
)


def _point(lane: dict[str, Any], name: str, point: str) -> float | None:
    return lane[name][point] if lane[name] else None


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tables(reports: Seq[tuple[str, Report]], title: str) -> str:
    """One row per lane and report, as text; reports of a sweep carry their setting as label."""
    console = Console(file=io.StringIO(), width=None if sys.stdout.isatty() else WIDTH)
    _show(reports, title, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _show(reports: Seq[tuple[str, Report]], title: str, console: Console) -> None:
    table = Table(title=title)
    swept = len(reports) > 1
    if swept:
        table.add_column("setting", no_wrap=True)
    table.add_column("lane")
    for heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for label, report in reports:
        lanes = report["lanes"]
        for name in [ALL] if len(lanes) == 2 else lanes:
            cells = [_text(get(report, lanes[name])) for _, get in COLUMNS]
            table.add_row(*([label] if swept else []), name, *cells)
    console.print(table)
    for label, report in reports:
        console.print(f"{label + ': ' if swept else ''}{_line(report)}", highlight=False)
        if report["faults"]:
            console.print(
                fault_line(report["faults"], report["lanes"][ALL]["itl_ms"]), highlight=False
            )


def _line(report: Report) -> str:
    cache, queue = report["cache"], report["queue"]
    return (
        f"{report['seconds']:.1f} s simulated, {report['steps']} steps,"
        f" device busy {_percent(report['device_busy_share'])},"
        f" cache hits {_percent(cache['hit_rate'])}, {cache['evicted_pages']} pages evicted,"
        f" {report['preemptions']} preemptions, queue mean {queue['waiting_mean']:.1f}"
        f" max {queue['waiting_max']}, pages held at most {_percent(queue['pages_held_max'])}"
        f"{_moved(report['host'])}{_spread_over(report['replicas'])}"
    )


def _spread_over(replicas: dict[str, Any]) -> str:
    if not replicas:
        return ""
    apart = ""
    if "remote_prefills" in replicas:
        apart = (
            f", {replicas['remote_prefills']} prompts computed apart,"
            f" {replicas['pages_handed_over']} pages handed over"
        )
    if "role_changes" in replicas:
        apart += f", {replicas['role_changes']} role changes"
    return (
        f", {replicas['n']} replicas ({replicas['mean']:.2f} at a time),"
        f" the busiest {replicas['most_over_mean']:.2f} times the mean{apart}"
    )


def _moved(host: dict[str, Any]) -> str:
    if not host:
        return ""
    return (
        f", {host['swaps_out']} swaps ({host['swaps_back']} came back) of {host['swapped_pages']} pages,"
        f" {host['saved_pages']} pages saved and {host['loaded_pages']} loaded,"
        f" {host['moves_s']:.2f} s of moves"
    )
