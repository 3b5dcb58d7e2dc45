"""What long prompts do to those who decode: inter-token latency with chunking and a bound, and without.

It owns the three settings and the figures they are judged by.

Eight requests decode; one after another, prompts of 4096 tokens arrive among them. A gap between two
chunks of a decoder counts as disturbed when it overlaps the time from a long prompt's sending to its
first text. Undisturbed is the same eight alone, in the same server, just before::

    decoder   | . . . . . . .   .   .   .   . . . . . .   .   .   .  . . . |
    long 1                   |sent ......... first text|
    long 2                                         after more tokens |sent ...

Settings: ``whole`` reads a prompt in one step, ``chunked`` in the default budget of a step,
``bounded`` in chunks that keep a step within ``--itl-bound-ms`` (by default twice the undisturbed
median of ``chunked``).

    python -m bench.interference MODEL_DIR --json bench/results/NAME.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import command, probe, stats
from bench.client import Target, drive
from bench.engines import Engine, EngineError, Paths, Running, build
from bench.models import facts
from bench.workloads import HIGH_ID, LOW_ID, Draw, Item, Workload, make

SETTINGS = ("whole", "chunked", "bounded")
DECODERS, LONG = 8, 4096
FIRST, EVERY = 16, 48
"""Tokens that every decoder has when the first long prompt is sent, and between two of them."""
BOUND_FACTOR = 2.0
GOAL = 2.5
"""Most that the disturbed p99 may be of the undisturbed median, with the bound set."""
err = Console(stderr=True, highlight=False)


def workload(n_long: int, seed: int, *, long_tokens: int = LONG) -> Workload:
    """Eight decoders, and ``n_long`` prompts that arrive one after another."""
    draw = Draw(np.random.default_rng((seed, 31, n_long)), LOW_ID, HIGH_ID)
    n_out = FIRST + EVERY * max(1, n_long) + EVERY
    items = [Item(prompt=draw.prompt(64), max_tokens=n_out) for _ in range(DECODERS)]
    items += [
        Item(prompt=draw.prompt(long_tokens), max_tokens=8, after_tokens=FIRST + EVERY * i)
        for i in range(n_long)
    ]
    return Workload(name=f"interference@{n_long}", items=tuple(items), concurrency=0)


def disturbed(traces: Sequence[stats.Trace]) -> list[float]:
    """Gaps of the decoders that overlap a long prompt's wait for its first text."""
    spans = [(t.sent, t.text[0]) for t in traces if t.late and t.text]
    return [
        b - a
        for t in traces
        if not t.late
        for a, b in itertools.pairwise(t.text)
        if any(b > begin and a < end for begin, end in spans)
    ]


def figures(alone: Sequence[stats.Trace], mixed: Sequence[stats.Trace]) -> dict[str, Any]:
    """What one setting is judged by, in milliseconds."""
    complaints = [t.complaint for t in (*alone, *mixed) if t.complaint]
    quiet = [gap for t in alone for gap in t.gaps]
    hit = disturbed(mixed)
    out: dict[str, Any] = {"errors": len(complaints), "first_errors": complaints[:3]}
    if not quiet or not hit or not statistics.median(quiet):
        return out
    waits = [t.text[0] - t.sent for t in mixed if t.late and t.text]
    median = statistics.median(quiet)
    return out | {
        "undisturbed_ms": stats.spread(quiet),
        "disturbed_ms": stats.spread(hit),
        "p99_over_median": round(stats.percentile(hit, 99) / median, 3),
        "long_ttft_ms": stats.spread(waits),
        "decoder_tok_s": round(
            1 / statistics.fmean(g for t in mixed if not t.late for g in t.gaps), 2
        ),
    }


def measure(
    target: Target, n_long: int, seed: int, long_tokens: int, pid: int | None = None
) -> dict[str, Any]:
    """Warm up, the decoders alone, then the decoders with long prompts among them.

    ``pid``: the server's process, whose load and whose children's is ``server_cores``; without it
    (``--url``) that load is in ``foreign_cores``.
    """
    asyncio.run(drive(target, make("warmup", seed=seed)))
    before = probe.Clock.read(pid)
    alone = asyncio.run(drive(target, workload(0, seed)))
    mixed = asyncio.run(drive(target, workload(n_long, seed + 1, long_tokens=long_tokens)))
    return figures(alone, mixed) | {"cpu": before.until(probe.Clock.read(pid))}


def arguments(setting: str, bound_ms: float, long_tokens: int) -> str:
    """The server's options for a setting."""
    common = "--max-num-seqs 16 --no-prompt-logprobs"
    if setting == "whole":
        return f"{common} --max-num-batched-tokens {long_tokens + DECODERS}"
    return common + (f" --itl-bound-ms {bound_ms:.3f}" if setting == "bounded" else "")


def serve(setting: str, args: argparse.Namespace, cache: Path, bound_ms: float) -> dict[str, Any]:
    """One setting on a server of its own."""
    extra = f"{arguments(setting, bound_ms, args.long)} {args.jserve_args}".strip()
    paths = Paths(model=args.model, compile_cache=cache, extra={"jserve": extra})
    engine = build("jserve", paths)
    assert isinstance(engine, Engine)
    with Running(engine, args.log_dir) as server:
        server.wait_ready(args.ready_timeout)
        target = Target(url=server.url, model=engine.model, timeout_s=args.request_timeout)
        found = measure(target, args.prompts, args.seed, args.long, server.pid)
    return {"setting": setting, "options": extra, **found}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every setting that was asked for.

    Raises:
        EngineError: a server did not start.
    """
    head = {"format": 1, "kind": "interference", "machine": probe.machine()}
    head["options"] = {"prompts": args.prompts, "long": args.long, "seed": args.seed}
    if args.url:
        target = Target(
            url=args.url.rstrip("/"), model=args.served_model, timeout_s=args.request_timeout
        )
        found = measure(target, args.prompts, args.seed, args.long)
        return head | {"settings": [{"setting": "url", "options": "", **found}]}
    head["model"] = facts(args.model)
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as fresh:
        cache = args.compile_cache or Path(fresh)
        cache.mkdir(parents=True, exist_ok=True)
        for setting in args.setting or SETTINGS:
            bound = args.bound_ms or _bound(done)
            if setting == "bounded" and not bound:
                raise EngineError("bounded needs --bound-ms, or chunked before it")
            err.print(f"[bold]{setting}[/]")
            done.append(serve(setting, args, cache, bound))
    return head | {"settings": done}


def _bound(done: list[dict[str, Any]]) -> float:
    """Twice the undisturbed median of the chunked setting; 0 where it was not measured."""
    medians = [
        d["undisturbed_ms"]["p50"] for d in done if d["setting"] == "chunked" and not d["errors"]
    ]
    return BOUND_FACTOR * medians[0] if medians else 0.0


def show(result: dict[str, Any], console: Console) -> None:
    """The figures as a table."""
    table = Table(title="inter-token latency of 8 decoders while long prompts arrive, ms")
    columns = (
        "setting",
        "alone p50",
        "disturbed p50",
        "p99",
        "max",
        "p99 / alone p50",
        "long TTFT p50",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "setting" else "right")
    for one in result["settings"]:
        if "disturbed_ms" not in one:
            table.add_row(one["setting"], *["-"] * (len(columns) - 1))
            continue
        hit = one["disturbed_ms"]
        values = (one["undisturbed_ms"]["p50"], hit["p50"], hit["p99"], hit["max"])
        values += (one["p99_over_median"], one["long_ttft_ms"]["p50"])
        table.add_row(one["setting"], *(f"{value:.4g}" for value in values))
    console.print(table)
    for one in result["settings"]:
        for error in one["first_errors"]:
            console.print(f"{one['setting']}: {error}", markup=False)
    console.print(f"goal: p99 / alone p50 at most {GOAL} where bounded")


def parser() -> argparse.ArgumentParser:
    p = command.parser("bench.interference", __doc__)
    add = p.add_argument
    add("--setting", action="append", choices=SETTINGS, help="repeatable; default all")
    add("--bound-ms", type=float, default=0.0, help="step bound of 'bounded'; 0 derives it")
    add("--prompts", type=int, default=6, help="long prompts (6)")
    add("--long", type=int, default=LONG, help="tokens of a long prompt (4096)")
    add("--seed", type=int, default=0, help="seed of the prompts (0)")
    add("--request-timeout", type=float, default=600.0, help="seconds per request (600)")
    command.add_server(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every request was served; 1: not; 2: bad usage."""
    p = parser()
    args = p.parse_args(argv)
    if args.prompts < 1 or args.long < 1 or args.seed < 0 or args.bound_ms < 0:
        p.error("--prompts and --long must be at least 1, --seed and --bound-ms not negative")
    result = command.measured(p, args, run, show)
    return int(any(one["errors"] or "disturbed_ms" not in one for one in result["settings"]))


if __name__ == "__main__":
    sys.exit(main())
