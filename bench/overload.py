"""Ten times what the server can do, over HTTP: what lane interactive keeps, and how refusals are answered.

It owns the traffic (open loop, three phases, clients that send again) and what it is judged by. Capacity is
measured first, with as many requests open as keep the server full; then::

    calm    0.9 of capacity         flood   10 times capacity        after   0.9 again
    |-------------------------------|--------------------------------|--------------------------|

Three lanes (interactive 0.3, standard 0.4, bulk 0.3). Of the refused, most wait as long as
``Retry-After`` says and send again; one in five does not and sends again at once, again and again (a
retry storm). A request is good when it was served whole, its first token within ``--slo-ttft-ms`` of
its first sending and the others ``--slo-tpot-ms`` apart in the mean.

Judged: every refusal is 429 or 503 with ``Retry-After``, every request gets an answer, interactive
keeps at least 0.8 of its calm goodput in the flood, and misses nothing ten seconds after it.

    python -m bench.overload checkpoints/jserve-mini --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import command, probe, stats
from bench.client import StreamError, Target, connections, sse_data, take
from bench.engines import Engine, EngineError, Paths, Running, build
from bench.stats import Trace

SHARES = {"interactive": 0.3, "standard": 0.4, "bulk": 0.3}
CALM, FLOOD = 0.9, 10.0
STORM = 0.2
"""Share of the clients that send again at once, whatever ``Retry-After`` says."""
STORM_S = 0.05
GOAL, RECOVERY_S = 0.8, 10.0
HTTP_BUSY = (429, 503)
err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size and limits of every request."""

    prompt: int
    output: int
    ttft_s: float
    tpot_s: float
    most_retries: int


@dataclass(slots=True, kw_only=True)
class Client:
    """One request and all its sendings. ``at`` counts from the begin of the run."""

    at: float
    lane: str
    stormy: bool
    trace: Trace = field(default_factory=lambda: Trace(sent=0.0))
    refusals: list[tuple[int, float | None, float]] = field(default_factory=list)
    """(status, Retry-After in seconds or None, seconds until the answer) of each refusal."""
    first_sent: float = 0.0

    def good(self, shape: Shape) -> bool:
        """It was served whole and in time."""
        t = self.trace
        if t.complaint:
            return False
        tpot = (t.text[-1] - t.text[0]) / max(1, t.tokens - 1)
        return t.text[0] - self.first_sent <= shape.ttft_s and tpot <= shape.tpot_s

    @property
    def answered(self) -> bool:
        """It was served, or it was told no."""
        return not self.trace.complaint or bool(self.refusals)


def arrivals(rate: float, seconds: Sequence[float], seed: int) -> list[Client]:
    """Poisson arrivals of the three phases at ``rate`` requests per second of capacity."""
    rng = np.random.default_rng((seed, 53))
    clients, start = [], 0.0
    for load, length in zip((CALM, FLOOD, CALM), seconds, strict=True):
        at = start + rng.exponential(1 / (rate * load))
        while at < start + length:
            lane = str(rng.choice(list(SHARES), p=list(SHARES.values())))
            clients.append(Client(at=at, lane=lane, stormy=bool(rng.random() < STORM)))
            at += rng.exponential(1 / (rate * load))
        start += length
    return clients


def body(lane: str, shape: Shape, model: str, seed: int) -> bytes:
    rng = np.random.default_rng((seed, 7))
    return json.dumps(
        {
            "model": model,
            "prompt": rng.integers(10, 250, shape.prompt).tolist(),
            "max_tokens": shape.output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "lane": lane,
        }
    ).encode()


async def send(http: aiohttp.ClientSession, url: str, payload: bytes, client: Client) -> bool:
    """One sending. False if it was refused; any other failure is the trace's error."""
    began = time.perf_counter()
    client.first_sent = client.first_sent or began
    client.trace = Trace(sent=began, wanted=client.trace.wanted)
    trace, headers = client.trace, {"content-type": "application/json"}
    try:
        async with http.post(url, data=payload, headers=headers) as reply:
            if reply.status in HTTP_BUSY:
                after = reply.headers.get("Retry-After")
                took = time.perf_counter() - began
                client.refusals.append((reply.status, float(after) if after else None, took))
                trace.error = f"refused with {reply.status}"
                return False
            if reply.status != 200:
                raise StreamError(f"status {reply.status}: {(await reply.text())[:160]}")
            async for now, event in sse_data(reply.content):
                take(trace, now, event)
    except (aiohttp.ClientError, OSError, StreamError, TimeoutError, ValueError) as e:
        trace.error = f"{type(e).__name__}: {e}"
    trace.ended = time.perf_counter()
    return True


async def live(
    http: aiohttp.ClientSession, target: Target, client: Client, shape: Shape, begin: float, n: int
) -> None:
    """Wait for the client's time, send, and send again as its temper says."""
    await asyncio.sleep(max(0.0, begin + client.at - time.perf_counter()))
    client.trace.wanted = shape.output
    payload, url = body(client.lane, shape, target.model, n), f"{target.url}/v1/completions"
    for _ in range(1 + shape.most_retries):
        if await send(http, url, payload, client):
            return
        wait = STORM_S if client.stormy else client.refusals[-1][1] or 1.0
        if time.perf_counter() + wait - client.first_sent > shape.ttft_s and not client.stormy:
            return  # it would be too late to be good
        await asyncio.sleep(wait)


async def capacity(target: Target, shape: Shape, width: int, n: int) -> float:
    """Requests served per second with ``width`` of them open."""
    gate = asyncio.Semaphore(width)
    clients = [Client(at=0.0, lane="standard", stormy=False) for _ in range(n)]

    async def one(http: aiohttp.ClientSession, i: int) -> None:
        async with gate:
            await live(http, target, clients[i], shape, 0.0, i)

    async with connections() as http:
        await asyncio.gather(*(one(http, i) for i in range(min(n, width))))  # warm
        began = time.perf_counter()
        await asyncio.gather(*(one(http, i) for i in range(n)))
    failed = [c.trace.complaint for c in clients if c.trace.complaint]
    if failed:
        raise EngineError(f"{len(failed)} requests failed while capacity was measured: {failed[0]}")
    return n / (time.perf_counter() - began)


async def storm(target: Target, clients: Sequence[Client], shape: Shape) -> None:
    """All phases, every client on a connection of its own."""
    async with connections() as http:
        begin = time.perf_counter()
        await asyncio.gather(
            *(live(http, target, c, shape, begin, n) for n, c in enumerate(clients))
        )


def figures(clients: Sequence[Client], shape: Shape, seconds: Sequence[float]) -> dict[str, Any]:
    """What the run is judged by."""
    edges = np.concatenate([[0.0], np.cumsum(seconds)])
    phases = {}
    for name, low, high in zip(("calm", "flood", "after"), edges, edges[1:], strict=False):
        for lane in SHARES:
            mine = [c for c in clients if c.lane == lane and low <= c.at < high]
            n_good = sum(c.good(shape) for c in mine)
            phases[name, lane] = (len(mine), round(n_good / (high - low), 3))
    refusals = [r for c in clients for r in c.refusals]
    calm, flood = phases["calm", "interactive"][1], phases["flood", "interactive"][1]
    after = [c for c in clients if c.lane == "interactive" and c.at >= edges[2]]
    missed = [c.at - edges[2] for c in after if not c.good(shape)]
    out = {
        "phases": {
            f"{name} {lane}": {"sent": n, "good_per_s": good}
            for (name, lane), (n, good) in phases.items()
        },
        "sendings": sum(len(c.refusals) + bool(c.trace.text) for c in clients),
        "refused": {str(status): n for status, n in Counter(r[0] for r in refusals).items()},
        "without_retry_after": sum(r[1] is None for r in refusals),
        "unanswered": sum(not c.answered for c in clients),
        "kept": round(flood / calm, 3) if calm else None,
        "recovery_s": round(float(max(missed, default=0.0)), 2),
        "first_errors": sorted({c.trace.error or "" for c in clients if not c.answered})[:3],
    }
    if refusals:
        out["refusal_ms"] = stats.spread([r[2] for r in refusals])
        out["retry_after_s"] = round(statistics.median(r[1] or 0.0 for r in refusals), 1)
    return out


def holds(found: dict[str, Any]) -> bool:
    """What must hold on any machine: answers, all of them, that say when to come back."""
    return not found["unanswered"] and not found["without_retry_after"] and found["refused"] != {}


def measure(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(
        prompt=args.prompt,
        output=args.output,
        ttft_s=args.slo_ttft_ms / 1e3,
        tpot_s=args.slo_tpot_ms / 1e3,
        most_retries=args.retries,
    )
    easy = Shape(
        prompt=args.prompt, output=args.output, ttft_s=600, tpot_s=600, most_retries=args.retries
    )
    rate = args.rate or asyncio.run(capacity(target, easy, 2 * args.seqs, 8 * args.seqs))
    err.print(f"capacity {rate:.1f} requests/s")
    seconds = (args.seconds, args.seconds, args.seconds + RECOVERY_S)
    clients = arrivals(rate, seconds, args.seed)
    asyncio.run(storm(target, clients, shape))
    return {"capacity_per_s": round(rate, 2), **figures(clients, shape, seconds)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Raises EngineError if the server does not start or fails before the flood."""
    head = {"format": 1, "kind": "overload", "machine": probe.machine()}
    if args.url:
        target = Target(url=args.url.rstrip("/"), model=args.served_model)
        return head | measure(target, args)
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as fresh:
        cache = args.compile_cache or Path(fresh)
        cache.mkdir(parents=True, exist_ok=True)
        extra = f"--max-num-seqs {args.seqs} --no-prompt-logprobs --max-queue-s {args.queue_s}"
        extra += f" --max-model-len {args.model_len} {args.jserve_args}"
        engine = build(
            "jserve", Paths(model=args.model, compile_cache=cache, extra={"jserve": extra.strip()})
        )
        assert isinstance(engine, Engine)
        with Running(engine, args.log_dir) as server:
            server.wait_ready(args.ready_timeout)
            return head | measure(Target(url=server.url, model=engine.model), args)


def show(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"good requests per second (capacity {found['capacity_per_s']:g})")
    for name in ("phase", "sent", "good/s"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for name, one in found["phases"].items():
        table.add_row(name, str(one["sent"]), f"{one['good_per_s']:.3g}")
    console.print(table)
    kept, recovery = found["kept"], found["recovery_s"]
    console.print(f"interactive kept {kept} of its calm goodput (goal {GOAL})")
    console.print(f"last miss of interactive {recovery} s after the flood (goal {RECOVERY_S:g})")
    console.print(f"sendings {found['sendings']}, refused {found['refused']}", markup=False)
    for name in ("refusal_ms", "retry_after_s", "without_retry_after", "unanswered"):
        console.print(f"{name} {found.get(name)}", markup=False)
    for error in found["first_errors"]:
        console.print(error, markup=False)


def parser() -> argparse.ArgumentParser:
    p = command.parser("bench.overload", __doc__)
    add = p.add_argument
    add("--seconds", type=float, default=15.0, help="of calm and of flood (15)")
    add("--rate", type=float, default=0.0, help="capacity in requests per second; 0 measures it")
    add("--prompt", type=int, default=64, help="tokens of a prompt (64)")
    add("--output", type=int, default=48, help="tokens of an answer (48)")
    add("--slo-ttft-ms", type=float, default=1500.0, help="first token within (1500)")
    add("--slo-tpot-ms", type=float, default=200.0, help="mean time between tokens (200)")
    add("--retries", type=int, default=20, help="times a refused client sends again (20)")
    add("--queue-s", type=float, default=1.0, help="--max-queue-s of the server (1)")
    add("--seqs", type=int, default=8, help="--max-num-seqs of the server (8)")
    add("--model-len", type=int, default=512, help="--max-model-len of the server (512)")
    add("--seed", type=int, default=0, help="seed of the arrivals (0)")
    command.add_server(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all were answered, refusals with Retry-After; 1: not; 2: bad usage."""
    p = parser()
    args = p.parse_args(argv)
    if args.seconds <= 0 or min(args.prompt, args.output, args.seqs) < 1 or args.rate < 0:
        p.error("--seconds, --prompt, --output and --seqs must be positive, --rate not negative")
    return int(not holds(command.measured(p, args, run, show)))


if __name__ == "__main__":
    sys.exit(main())
