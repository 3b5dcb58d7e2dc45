"""A long mixed load with clients that leave, stall and lie, and a look for anything that grows.

It owns the samples and the gates. With ``--journal`` the run is computed again afterwards, token by token:
``python -m bench.soak --minutes 2 --journal FILE --json FILE``. ::

    warm (up to 20 s)   quiet   | the soak: clients, a control request, memory every 5 s |   quiet
                          before                                                              after
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from bench import probe
from bench.client import connections
from bench.engines import Running, free_port
from bench.live import add_options, against_server
from bench.soak_traffic import KINDS, Soak

SAMPLE_S = 5.0
RSS_GATE_MINUTES = 15.0
RSS_GATE_MIB = 24.0


async def scrape(url: str, http: aiohttp.ClientSession) -> dict[str, float]:
    """The server's metrics that tell of leaks."""
    async with http.get(url + "/metrics") as response:
        text = await response.text()
    found = re.findall(r"^jserve:([a-z0-9_]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.M)
    return {name: float(value) for name, value in found}


def usage(pid: int) -> dict[str, float]:
    """Memory in MiB, files and threads of the server's processes."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        "mib": sum(p.memory_info().rss for p in processes) / 2**20,
        "files": sum(p.num_fds() for p in processes),
        "threads": sum(p.num_threads() for p in processes),
    }


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes of all pairs."""
    pairs = [
        (b - a) / (t - s) for i, (s, a) in enumerate(samples) for t, b in samples[i + 1 :] if t > s
    ]
    return median(pairs) if pairs else 0.0


async def run(server: Running, args: argparse.Namespace) -> dict[str, Any]:
    """The soak, then quiet, then what is left."""
    began, samples = time.monotonic(), []
    admin = f"http://127.0.0.1:{args.admin_port}"
    async with connections() as http:
        warm_until = began + min(20.0, 6 * args.minutes)
        warm = Soak(server.url, admin, http, random.Random(1), warm_until)
        await asyncio.gather(*(warm.client() for _ in range(args.clients)))
        await quiet(server.url, http)
        before = usage(server.pid) | {"tasks": (await scrape(server.url, http))["server_tasks"]}
        until = time.monotonic() + 60 * args.minutes
        soak = Soak(server.url, admin, http, random.Random(args.seed), until)

        async def watch() -> None:
            while time.monotonic() < until:
                samples.append((time.monotonic() - began, usage(server.pid)["mib"]))
                await asyncio.sleep(SAMPLE_S)

        await asyncio.gather(watch(), soak.control(), *(soak.client() for _ in range(args.clients)))
        await quiet(server.url, http)
        end = await scrape(server.url, http)
    after = usage(server.pid) | {"tasks": end["server_tasks"]}
    late = samples[len(samples) // 3 :]
    third = max(1, len(late) // 3)
    return {
        "minutes": args.minutes,
        "counts": dict(sorted(soak.counts.items())),
        "wrong": warm.wrong + soak.wrong,
        "logged": _errors(server),
        "before": before,
        "after": after,
        "mib_per_hour": 3600 * slope(late),
        "mib_by_slope": slope(late) * (late[-1][0] - late[0][0]),
        "mib_grown": median(m for _, m in late[-third:]) - median(m for _, m in late[:third]),
        "metrics": {
            name: end.get(name, -1.0)
            for name in (
                "num_requests_active",
                "num_requests_running",
                "kv_pages",
                "kv_pages_free",
                "kv_pages_cached",
                "compiles_after_ready_total",
                "engine_deaths_total",
                "step_faults_total",
                "num_preemptions_total",
                "prefix_cache_hits_total",
            )
        },
    }


def _errors(server: Running) -> list[str]:
    """Lines of the server's log that say that something went wrong."""
    lines = server.log.read_text(errors="replace").splitlines()
    return [line[:300] for line in lines if re.search(r" (ERROR|CRITICAL) |Traceback", line)][:20]


async def quiet(url: str, http: aiohttp.ClientSession) -> None:
    """Wait until the server has nothing to do, for a minute at most."""
    for _ in range(120):
        await asyncio.sleep(0.5)
        seen = await scrape(url, http)
        if seen["num_requests_active"] == seen["num_requests_running"] == 0:
            break
    await asyncio.sleep(1.0)


def gates(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """What must hold, and whether it does."""
    m, before, after = found["metrics"], found["before"], found["after"]
    checked = [
        ("every answer is as it must be", not found["wrong"]),
        ("every kind of client came", all(found["counts"].get(k) for k in (*KINDS, "control"))),
        ("the server logged no error", not found["logged"]),
        ("no request is left", m["num_requests_active"] == m["num_requests_running"] == 0),
        ("all pages are back", m["kv_pages_free"] + m["kv_pages_cached"] == m["kv_pages"] > 0),
        ("nothing compiled after ready", m["compiles_after_ready_total"] == 0),
        ("the engine never died", m["engine_deaths_total"] == m["step_faults_total"] == 0),
        ("no file left open", after["files"] <= before["files"] + 4),
        ("no thread left", after["threads"] <= before["threads"] + 2),
        ("no task left", after["tasks"] <= before["tasks"] + 2),
    ]
    if found["minutes"] >= RSS_GATE_MINUTES:
        grown = max(found["mib_grown"], found["mib_by_slope"])
        checked.append((f"memory grew under {RSS_GATE_MIB} MiB", grown < RSS_GATE_MIB))
    return checked


def main(argv: Sequence[str] | None = None) -> int:
    """0: every gate holds. 1: one does not, or the journal is computed again otherwise. 2: no server."""
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    # So few pages that sequences give way to each other now and then.
    add_options(parser, extra="--max-model-len 1024 --max-num-seqs 8 --n-pages 96")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--journal", type=Path, default=None, help="written by the server, then computed again"
    )
    parser.add_argument("--json", type=Path, default=None, help="file to write: figures and replay")
    args = parser.parse_args(argv)
    args.admin_port, options = free_port(), args.extra
    args.extra += f" --enable-admin --admin-port {args.admin_port}"
    if args.journal is not None:
        args.extra += f" --journal {args.journal}"
    found: dict[str, Any] = {}

    async def noted(server: Running, args: argparse.Namespace) -> dict[str, Any]:
        found.update(await run(server, args))
        return found

    code = against_server(args, 900.0, noted, gates)
    if code == 2:
        return code
    if args.journal is not None:
        found["replay"] = replayed(args.journal)
        code = max(code, int(found["replay"]["differs"]))
    if args.json is not None:
        how = {"seed": args.seed, "clients": args.clients, "extra": options}
        args.json.write_text(json.dumps(probe.record("soak", how, [found]), indent=1) + "\n")
    return code


def replayed(journal: Path) -> dict[str, Any]:
    """What ``jserve replay --device`` says of a journal, and the seconds that it takes."""
    command = [sys.executable, "-m", "jserve.cli", "replay", str(journal), "--device"]
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    seconds = round(time.monotonic() - began, 1)
    return {"differs": done.returncode != 0, "said": done.stdout.strip(), "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
