"""What replicas on Ray Serve cost and give on one machine, beside the same engines as servers of their own.

It owns the loads and the faults. Everything that is compared is alive at once and asked in turn, through the face that
stands behind the HTTP side, so that a busy machine is the same for both; what matters are ratios and differences:

    first    one request at a time, of tokens that nobody has seen: one server and one replica, in turn
    through  many at once: two servers with half of them each, and two replicas, in turn
    stopped  the longest wait for a token of those at a replica that gets SIGSTOP
    killed   the same after SIGKILL

The device is a fake one whose steps sleep (``fake``), or the shipped model on the cores that all share (``shipped``).

    python -m bench.replicas [--device fake,shipped] [--prompts 64,512] [--repeats 40] [--rounds 3] [--faults 3]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import random
import signal
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.probe import record
from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import ProcClient
from jserve.engine.engine import Engine
from jserve.engine.face import EngineFace
from jserve.fleet.face import FleetEngine
from jserve.fleet.member import OVERDUE_S, OVERDUE_STEPS, Member
from jserve.ports import RunnerLimits
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.types import Request

ROOT = Path(__file__).parent.parent
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 2048,
    "structured_outputs": False,
    "prompt_logprobs": False,
}
BUILDS = {"fake": "bench.replicas:fake", "shipped": "jserve.build:engine"}
STEP_S, VOCAB = 0.004, 250
GOALS = {"added_ms": 3.0, "through": 0.95, "killed_ms": 50.0}
"""Of ``docs/fleet.md``; that after SIGKILL is without the prefill of what no other replica has."""
AT_ONCE, ASKED, ANSWER = 16, 64, 60
"""Requests at once, in all, and tokens of each, in ``through``."""
LONG = 400
"""Tokens of those that are disturbed."""
ENGINE = """
import sys
from bench.replicas import fake
from jserve.engine.process import main
sys.exit(main(int(sys.argv[1]), fake))
"""


def fake(config: EngineConfig, progress: Any) -> tuple[Engine, dict[str, Any]]:
    """An engine whose device sleeps ``STEP_S`` a step."""
    limits = RunnerLimits(
        n_slots=8,
        max_rows=8,
        max_decode_rows=8,
        max_prefill_tokens=256,
        max_prefill_rows=8,
        max_drafts=0,
        n_pages=1 + 8 * 2048 // 16,
        page_size=16,
        max_model_len=2048,
        vocab_size=VOCAB,
    )
    engine = Engine(Scheduler(limits, config), FakeRunner(limits, step_s=STEP_S), weights="fake")
    facts = {"max_model_len": 2048, "vocab_size": VOCAB, "max_num_seqs": 8}
    return engine, {"weights": engine.weights, **facts}


def server(device: str) -> AsyncEngine:
    """An engine in a process of its own, as ``jserve serve`` has it."""
    config = EngineConfig.of(**OPTIONS)
    if device == "shipped":
        return AsyncEngine(lambda: ProcClient(config))
    command = lambda fd: [sys.executable, "-c", ENGINE, str(fd)]  # noqa: E731
    return AsyncEngine(lambda: ProcClient(config, command=command))


class Load:
    """Requests of random tokens."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def request(self, n_prompt: int, n_out: int) -> Request:
        return Request(
            id=uuid.uuid4().hex,
            prompt_ids=tuple(self.rng.randrange(3, VOCAB) for _ in range(n_prompt)),
            params=SamplingParams(max_tokens=n_out, temperature=0.0, ignore_eos=True),
        )

    async def times(self, engine: EngineFace, request: Request) -> list[float]:
        """When each of its outputs came, the first entry is when it was asked."""
        found = [time.perf_counter()]
        async for output in engine.generate(request):
            if output.error:
                raise RuntimeError(output.error)
            if output.token_ids:
                found.append(time.perf_counter())
        return found

    async def first(
        self, one: EngineFace, other: EngineFace, n_prompt: int, repeats: int
    ) -> dict[str, float]:
        """Milliseconds to the first token of both, in turn, and the median of their differences."""
        ms: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats + 1):
            for engine, found in zip((one, other), ms, strict=True):
                asked, first, *_ = await self.times(engine, self.request(n_prompt, 2))
                found.append(1e3 * (first - asked))
        ms = ms[0][1:], ms[1][1:]
        added = [b - a for a, b in zip(*ms, strict=True)]
        medians = [statistics.median(found) for found in (*ms, added)]
        names = ("server_first_ms", "replica_first_ms", "added_ms")
        return {f"{name}_{n_prompt}": ms for name, ms in zip(names, medians, strict=True)}

    async def through(self, engines: list[EngineFace]) -> float:
        """Tokens a second of ``engines``, each of which has its share of the requests."""
        began = time.perf_counter()
        await asyncio.gather(*(self._work(one, len(engines)) for one in engines))
        return ASKED * ANSWER / (time.perf_counter() - began)

    async def _work(self, engine: EngineFace, n_engines: int) -> None:
        left = iter(range(ASKED // n_engines))

        async def work() -> None:
            for _ in left:
                await self.times(engine, self.request(64, ANSWER))

        await asyncio.gather(*(work() for _ in range(AT_ONCE // n_engines)))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def disturbed(fleet: FleetEngine, load: Load, number: int) -> dict[str, float]:
    """Send signal ``number`` to the replica that has most to do. The longest wait for a token, the usual one, and those
    that the goals allow. ``fleet`` has all its replicas when this returns."""
    n, asked = len(fleet.members), [load.request(64, LONG) for _ in range(6)]
    running = [asyncio.ensure_future(load.times(fleet, one)) for one in asked]
    await until(lambda: sum(any(s.said) for s in fleet._streams.values()) == len(asked))
    await asyncio.sleep(0.1)
    victim: Member = max(fleet.members, key=lambda one: one.n_open)
    view, pid = victim.view, victim.info["pid"]
    n_known = max(len(s.request.prompt_ids) + len(s.said[0]) for s in victim.streams.values())
    at = time.perf_counter()
    os.kill(pid, number)
    try:
        waits = [
            (b - a, b > at > a or a > at)
            for one in await asyncio.gather(*running)
            for a, b in itertools.pairwise(one[1:])
        ]
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    longest = max(wait for wait, after in waits if after)
    usual = statistics.median(wait for wait, _ in waits)
    await until(lambda: len(fleet.members) == n and not any(m.silent for m in fleet.members))
    prefill_s = len(victim.streams or asked) * n_known * view.prefill_token_s
    return {
        "gap_ms": 1e3 * longest,
        "usual_ms": 1e3 * usual,
        "prefill_ms": 1e3 * prefill_s,
        "overdue_ms": 1e3 * (OVERDUE_S + OVERDUE_STEPS * view.step_s),
    }


async def measure(device: str, args: argparse.Namespace) -> dict[str, Any]:
    """One device, from the start of its servers to their end."""
    from jserve.fleet.on_ray import RayReplicas

    found: dict[str, Any] = {"device": device}
    load, servers = Load(), [server(device)]
    config = EngineConfig.of(**OPTIONS, replicas=1)
    source = RayReplicas(config, BUILDS[device])
    fleet = FleetEngine(source)
    try:
        await servers[0].start()
        await fleet.start()
        for n in args.prompts:
            found |= await load.first(servers[0], fleet, n, args.repeats)
        servers.append(server(device))
        await servers[1].start()
        two = dataclasses.replace(config.fleet, replicas=2)
        await source.deploy(dataclasses.replace(config, fleet=two))
        await until(lambda: len(fleet.members) == 2)
        rates: tuple[list[float], list[float]] = ([], [])
        for round in range(args.rounds + 1):
            both = [await load.through([*servers]), await load.through([fleet])]
            for rate, kept in zip(both, rates, strict=True):
                kept.extend([rate] if round else [])  # the first one warms up
        found["servers_tokens_s"], found["replicas_tokens_s"] = map(statistics.median, rates)
        ratios = [b / a for a, b in zip(*rates, strict=True)]
        found["through"] = statistics.median(ratios)
        await asyncio.gather(*(one.close() for one in servers))
        for name, number in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
            all_of_them = [await disturbed(fleet, load, number) for _ in range(args.faults)]
            for key in all_of_them[0]:
                found[f"{name}_{key}"] = statistics.median(one[key] for one in all_of_them)
            found[f"{name}_gap_ms_most"] = max(one["gap_ms"] for one in all_of_them)
        return found
    finally:
        await asyncio.gather(*(one.close() for one in (*servers, fleet)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="fake,shipped")
    parser.add_argument("--prompts", default="64,512")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.prompts = [int(n) for n in args.prompts.split(",")]
    os.environ.setdefault(
        "RAY_AUTH_MODE", "disabled"
    )  # of the Ray that this starts on the loopback address
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    err, rows = Console(stderr=True), []
    for device in args.device.split(","):
        err.print(f"{device} ...")
        rows.append(asyncio.run(measure(device, args)))
    table = Table("", *(row["device"] for row in rows), title="milliseconds, tokens a second")
    for name in list(rows[0])[1:]:
        table.add_row(name, *(f"{row[name]:.4g}" for row in rows))
    Console(width=report.WIDTH).print(table)
    if args.json is not None:
        counts = {"repeats": args.repeats, "rounds": args.rounds, "faults": args.faults}
        options = {**counts, **OPTIONS, "goals": GOALS, "niceness": os.nice(0)}
        report.write(record("replicas", options, rows), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
