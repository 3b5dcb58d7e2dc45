"""The few figures a release is judged by, as a markdown table over serving results.

It owns which figures these are and what is aimed at.

    python -m bench.headline RESULT.json...
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

Turn = dict[str, Any]
PEERS = ("vllm", "llamacpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row: a figure of a turn, and the bound that its value or its ratios must keep."""

    title: str
    of: Callable[[Turn], float | None]
    aim: str
    holds: Callable[[float | None, dict[str, float]], bool | None]
    """(jserve's value, peer -> median ratio inside rounds) -> kept; None: cannot be said."""


def _at(*path: str) -> Callable[[Turn], float | None]:
    def read(turn: Turn) -> float | None:
        value: Any = turn
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return read


def _start(cold: bool) -> Callable[[Turn], float | None]:
    def read(turn: Turn) -> float | None:
        start = turn.get("start")
        own = start and (turn["engine"] != "jserve" or start["cold"] == cold)
        return start["first_token_s"] if start and own else None

    return read


def _against(peers: Sequence[str], ok: Callable[[float], bool]) -> Callable[..., bool | None]:
    """Every named peer that was measured must satisfy ``ok``; None when none was."""

    def holds(_: float | None, ratios: dict[str, float]) -> bool | None:
        known = [ratios[p] for p in peers if p in ratios]
        return all(map(ok, known)) if known else None

    return holds


def _below(bound: float) -> Callable[..., bool | None]:
    return lambda value, _: None if value is None else value < bound


LARGE = ("llama-1b",)
"""The models whose aims are those of the 1 B shape."""


def lines_of(model: str) -> tuple[Line, ...]:
    """The rows of a model by name."""
    large = model in LARGE
    chat, prefix = (1.0, 1.1) if large else (1.1, 1.2)
    warm, cold = (8, 35) if large else (4, 25)
    return (
        Line(
            title="batch-1 decode, tok/s",
            of=_at("workloads", "S1", "decode_tok_s_p50"),
            aim="at least 1.0 of the better peer",
            holds=_against(PEERS, lambda r: r >= 1.0),
        ),
        Line(
            title="chat mix at 16, out tok/s",
            of=_at("workloads", "S2", "output_tok_s"),
            aim=f"at least {chat} of vllm",
            holds=_against(["vllm"], lambda r: r >= chat),
        ),
        Line(
            title="shared prefix of 1,500 at 8, out tok/s",
            of=_at("workloads", "S3", "output_tok_s"),
            aim=f"at least {prefix} of vllm",
            holds=_against(["vllm"], lambda r: r >= prefix),
        ),
        Line(
            title="a 4k prompt amid 8 decoders, out tok/s",
            of=_at("workloads", "S4", "output_tok_s"),
            aim="at least 1.0 of vllm",
            holds=_against(["vllm"], lambda r: r >= 1.0),
        ),
        Line(
            title="longest gap while a 4k prompt arrives, ms",
            of=_at("workloads", "S4", "longest_gap_ms"),
            aim="at most 0.5 of vllm",
            holds=_against(["vllm"], lambda r: r <= 0.5),
        ),
        Line(
            title="start to first token, warm compile cache, s",
            of=_start(cold=False),
            aim=f"below {warm} s",
            holds=_below(warm),
        ),
        Line(
            title="start to first token, cold, s",
            of=_start(cold=True),
            aim=f"below {cold} s",
            holds=_below(cold),
        ),
    )


def by_round(turns: Sequence[Turn], line: Line, engine: str) -> dict[int, float]:
    """Round -> this engine's figure, where it has one."""
    mine = [t for t in turns if t["engine"] == engine]
    return {t["round"]: value for t in mine if (value := line.of(t)) is not None}


def row(turns: Sequence[Turn], line: Line) -> list[str]:
    """Cells: jserve, each peer with the ratio jserve / peer, the aim and whether it is kept."""
    ours = by_round(turns, line, "jserve")
    value = statistics.median(ours.values()) if ours else None
    cells, ratios = [_shown(ours)], {}
    for peer in PEERS:
        theirs = by_round(turns, line, peer)
        pairs = [ours[n] / theirs[n] for n in ours if theirs.get(n)]
        if pairs:
            ratios[peer] = statistics.median(pairs)
        cells.append(_shown(theirs) + (f" (x{ratios[peer]:.2f})" if pairs else ""))
    kept = line.holds(value, ratios)
    verdict = "not measured" if kept is None or value is None else ("kept" if kept else "MISSED")
    return [*cells, line.aim, verdict]


def _shown(values: dict[int, float]) -> str:
    return f"{statistics.median(values.values()):.4g}" if values else "-"


def markdown(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of the table, with the machine's state during the runs below it."""
    yield f"| model | figure | jserve | {' | '.join(PEERS)} | aim | verdict |"
    yield "|" + "---|" * (5 + len(PEERS))
    for result in results:
        name = result.get("model", {}).get("name", "?")
        for line in lines_of(name):
            yield f"| {' | '.join([name, line.title, *row(result['turns'], line)])} |"
    yield ""
    for result in results:
        yield noise(result)


def noise(result: dict[str, Any]) -> str:
    """One line on how quiet the machine was, and which share of its limits jserve reached."""
    runs = [w for t in result["turns"] for w in t.get("workloads", {}).values()]
    ours = [t for t in result["turns"] if t["engine"] == "jserve"]
    bandwidth = [r["bandwidth"]["gb_s_best"] for r in runs]
    foreign = [r["cpu"]["foreign_cores"] for r in runs]
    shares = [s for t in ours if (s := _at("workloads", "S1", "share_of_bandwidth")(t)) is not None]
    compute = [s for t in ours if (s := _at("workloads", "S2", "gflop_s")(t)) is not None]
    parts = [
        f"{result.get('model', {}).get('name', '?')}, {result['machine']['date']}",
        f"triad {min(bandwidth):.0f}-{max(bandwidth):.0f} GB/s" if bandwidth else "",
        f"foreign load {max(foreign):.1f} cores at most" if foreign else "",
        f"jserve batch-1 decode {statistics.median(shares):.0f} % of the triad" if shares else "",
        f"chat mix {statistics.median(compute):.0f} GFLOP/s" if compute else "",
    ]
    return "; ".join(p for p in parts if p)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.headline", description="Headline figures.")
    p.add_argument("files", nargs="+", type=Path, help="results of bench.serving, one per model")
    results = [json.loads(f.read_text()) for f in p.parse_args(argv).files]
    print("\n".join(markdown(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
