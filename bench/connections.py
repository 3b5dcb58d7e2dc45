"""Thousands of open connections beside active streams: health latency, gaps between chunks, what is left.

It owns one measurement of a running server in three phases, and its gates. The machine's noise is in both timed
phases, so they are compared with each other::

    alone     64 streams                               gaps between chunks, health latency
    crowded   64 streams beside 4,000 idle connections the same
    rounds    all connections opened and closed        open files and memory after each close

After the first close the allocator keeps the pages that connections had (``malloc_trim`` gives two thirds of them
back), and later connections use them again. So memory is judged twice: after all rounds against before
(``KEPT_KIB`` a connection), and after the last round against after the first, where a leak shows and slack does
not (``LEAK_KIB``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import psutil

from bench.client import connections, sse_data
from bench.engines import EngineError, Running
from bench.live import add_options, against_server
from bench.stats import percentile

HEALTH_EVERY_S = 0.2
SPARE = 16
"""Connections kept free for health probes."""
SETTLE_S = 3.0
KEPT_KIB, LEAK_KIB = 16, 1
"""Most memory after close: kept of one connection in all, and added by one connection of a later round.
A connection that the server forgets to drop costs 13 KiB."""


class Load:
    """Streams that are asked for again and again until told to stop; the gaps between chunks."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http
        self.gaps: list[float] = []
        self.health: list[float] = []
        self.n_streams = self.n_failed = 0

    async def stream(self, number: int, until: float) -> None:
        body = {
            "prompt": f"Story number {number}: once upon a time",
            "max_tokens": 96,
            "ignore_eos": True,
            "stream": True,
            "seed": number,
        }
        while time.perf_counter() < until:
            self.n_streams += 1
            last = None
            async with self.http.post(self.url + "/v1/completions", json=body) as response:
                if response.status != 200:
                    self.n_failed += 1
                    await asyncio.sleep(0.1)
                    continue
                async for now, payload in sse_data(response.content):
                    if payload != "[DONE]" and last is not None:
                        self.gaps.append(now - last)
                    last = now

    async def probe(self, until: float) -> None:
        while time.perf_counter() < until:
            begin = time.perf_counter()
            async with self.http.get(self.url + "/health") as response:
                await response.read()
                assert response.status == 200, "/health failed under load"
            self.health.append(time.perf_counter() - begin)
            await asyncio.sleep(HEALTH_EVERY_S)

    async def run(self, n_streams: int, seconds: float) -> dict[str, Any]:
        """Both for ``seconds``; what was seen."""
        until = time.perf_counter() + seconds
        await asyncio.gather(self.probe(until), *(self.stream(i, until) for i in range(n_streams)))
        return {
            "streams": self.n_streams,
            "failed": self.n_failed,
            "gap_p50_ms": 1e3 * percentile(self.gaps, 50),
            "gap_p99_ms": 1e3 * percentile(self.gaps, 99),
            "health_p50_ms": 1e3 * percentile(self.health, 50),
            "health_max_ms": 1e3 * max(self.health),
        }


async def idle_connection(port: int) -> asyncio.StreamWriter:
    """A keep-alive connection that was used once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise EngineError(f"a connection was refused: {head[:60]!r}")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return writer


def usage(pid: int) -> dict[str, float]:
    """Open files and MiB of the HTTP process (the engine's has no connections)."""
    process = psutil.Process(pid)
    return {"files": process.num_fds(), "mib": process.memory_info().rss / 2**20}


async def opened(port: int, n: int) -> list[asyncio.StreamWriter]:
    """``n`` connections that were used once."""
    writers: list[asyncio.StreamWriter] = []
    for i in range(0, n, 64):
        batch = (idle_connection(port) for _ in range(min(64, n - i)))
        writers += await asyncio.gather(*batch)
    return writers


async def closed(server: Running, writers: list[asyncio.StreamWriter]) -> dict[str, float]:
    """What the server has once it closed them too."""
    for writer in writers:
        writer.close()
    for writer in writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    await asyncio.sleep(SETTLE_S)
    return usage(server.pid)


async def measure(server: Running, args: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    n_idle = max(1, args.connections - args.streams - SPARE)
    async with connections() as http:
        await Load(server.url, http).run(min(8, args.streams), 2.0)  # pages and pools grow once
        before = usage(server.pid)
        alone = await Load(server.url, http).run(args.streams, args.seconds)
        writers = await opened(server.port, n_idle)
        open_ = usage(server.pid)
        crowded = await Load(server.url, http).run(args.streams, args.seconds)
    after = [await closed(server, writers)]
    while len(after) < args.rounds:
        after.append(await closed(server, await opened(server.port, n_idle)))
    return {
        "connections": args.connections,
        "alone": alone,
        "crowded": crowded,
        "before": before,
        "open": open_,
        "after": after,
        "kib_per_connection": 1024 * (open_["mib"] - before["mib"]) / n_idle,
        "kib_kept": 1024 * (after[-1]["mib"] - before["mib"]) / n_idle,
        "kib_added": 1024 * (after[-1]["mib"] - after[0]["mib"]) / n_idle / (len(after) - 1),
    }


def gates(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """What must hold, and whether it does."""
    alone, crowded, after = found["alone"], found["crowded"], found["after"]
    return [
        ("no stream failed", alone["failed"] == crowded["failed"] == 0),
        ("health under a second", crowded["health_max_ms"] < 1000),
        ("gap p99 under twice that without", crowded["gap_p99_ms"] < 2 * alone["gap_p99_ms"]),
        ("under 100 KiB a connection", found["kib_per_connection"] < 100),
        ("no file left open", all(a["files"] <= found["before"]["files"] + 4 for a in after)),
        (f"at most {KEPT_KIB} KiB kept of a closed connection", found["kib_kept"] <= KEPT_KIB),
        (f"at most {LEAK_KIB} KiB added by one of a later round", found["kib_added"] <= LEAK_KIB),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """0: every gate holds. 1: one does not. 2: no server."""
    parser = argparse.ArgumentParser(prog="bench.connections", description=__doc__)
    add_options(parser, extra="--max-model-len 1024 --max-num-seqs 64")
    parser.add_argument("--connections", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each timed phase")
    parser.add_argument("--rounds", type=int, default=3, help="of opening and closing all (3)")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: a leak shows between two of them")
    return against_server(args, 600.0, measure, gates)


if __name__ == "__main__":
    sys.exit(main())
