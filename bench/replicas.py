"""What replicas on Ray Serve cost and give on one machine, beside the same engines as servers of their own.

It owns the loads and the faults. Everything that is compared is alive at once and asked in turn, through the face that
stands behind the HTTP side, so that a busy machine is the same for both; what matters are ratios and differences:

    first    one request at a time, of tokens that nobody has seen: one server and one replica, in turn
    through  many at once: two servers with half of them each, and two replicas, in turn
    stopped  the longest wait for a token of those at a replica that gets SIGSTOP
    killed   the same after SIGKILL

The device is a fake one whose steps sleep (``fake``), or the shipped model on the cores that all share (``shipped``).

    python -m bench.replicas [--device fake,shipped] [--parts first,through,stopped,killed] [--prompts 64,512]
        [--repeats 40] [--rounds 3] [--faults 3] [--json FILE]
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
from jserve.fleet.member import OVERDUE_STEPS, Member
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
AT_ONCE, ANSWERS, THROUGH_S = 16, (30, 90), 3.0
"""Requests at once, fewest and most tokens of each, and for how long they are counted, in ``through``. Were all of one
length, batches would end as a whole, and those of one more request would last as long as a batch."""
DISTURBED, LONG, STOPPED_S = 6, 400, 10.0
"""Requests of which some are disturbed, tokens of each, and how long a replica is stopped at most."""
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
        workers = [engine for engine in engines for _ in range(AT_ONCE // len(engines))]
        counts = await asyncio.gather(*(self._work(one, began + THROUGH_S) for one in workers))
        return sum(counts) / THROUGH_S

    async def _work(self, engine: EngineFace, end: float) -> int:
        """Tokens until ``end`` of requests one after the other."""
        n = 0
        while time.perf_counter() < end:
            told = await self.times(engine, self.request(64, self.rng.randint(*ANSWERS)))
            n += sum(at < end for at in told[1:])
        return n


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def disturbed(fleet: FleetEngine, load: Load, number: int) -> dict[str, float]:
    """Send signal ``number`` to the replica that has most to do. The longest wait for a token from then on, the usual
    one, the price of the prefill that goes on elsewhere, and when those of a silent replica should go on there.
    ``fleet`` has all its replicas when this returns."""
    n, asked = len(fleet.members), [load.request(64, LONG) for _ in range(DISTURBED)]
    running = [asyncio.ensure_future(load.times(fleet, one)) for one in asked]
    await until(lambda: sum(any(s.said) for s in fleet._streams.values()) == len(asked))
    victim: Member = max(fleet.members, key=lambda one: one.n_open)
    view, pid, moved = victim.view, victim.info["pid"], list(victim.streams.values())
    n_prefill = sum(len(stream.request.prompt_ids) + len(stream.said[0]) for stream in moved)
    at = time.perf_counter()
    os.kill(pid, number)
    try:
        await asyncio.wait(running, timeout=STOPPED_S)
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    told = [itertools.pairwise(one[1:]) for one in await asyncio.gather(*running)]
    waits = [(b, b - a) for one in told for a, b in one]
    await until(lambda: len(fleet.members) == n and not any(m.silent for m in fleet.members))
    return {
        "gap_ms": 1e3 * max(wait for end, wait in waits if end > at),
        "usual_ms": 1e3 * statistics.median(wait for _, wait in waits),
        "prefill_ms": 1e3 * n_prefill * view.prefill_token_s,
        "due_ms": 1e3 * (1.0 + OVERDUE_STEPS * view.step_s),
    }


class Comparison:
    """One server and one replica, later two of each, of one device."""

    def __init__(self, device: str, args: argparse.Namespace) -> None:
        from jserve.fleet.on_ray import RayReplicas

        self.device, self.args, self.load = device, args, Load()
        self.servers = [server(device)]
        self.config = EngineConfig.of(**OPTIONS, replicas=1)
        self.source = RayReplicas(self.config, BUILDS[device])
        self.fleet = FleetEngine(self.source)
        self.found: dict[str, Any] = {"device": device}

    async def measure(self) -> dict[str, Any]:
        parts = self.args.parts
        try:
            await self.servers[0].start()
            await self.fleet.start()
            if "first" in parts:
                await self.first()
            if parts != ["first"]:
                two = dataclasses.replace(self.config.fleet, replicas=2)
                await self.source.deploy(dataclasses.replace(self.config, fleet=two))
                await until(lambda: len(self.fleet.members) == 2)
            if "through" in parts:
                await self.through()
            await asyncio.gather(*(one.close() for one in self.servers))
            for name, number in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
                if name in parts:
                    await self.faults(name, number)
            return self.found
        finally:
            await asyncio.gather(*(one.close() for one in (*self.servers, self.fleet)))

    async def first(self) -> None:
        for n in self.args.prompts:
            self._tell(await self.load.first(self.servers[0], self.fleet, n, self.args.repeats))

    async def through(self) -> None:
        self.servers.append(server(self.device))
        await self.servers[1].start()
        rates: tuple[list[float], list[float]] = ([], [])
        for round in range(self.args.rounds + 1):
            both = [await self.load.through([*self.servers]), await self.load.through([self.fleet])]
            for rate, kept in zip(both, rates, strict=True):
                kept.extend([rate] if round else [])  # the first one warms up
        ratios = [b / a for a, b in zip(*rates, strict=True)]
        names = ("servers_tokens_s", "replicas_tokens_s", "through")
        medians = map(statistics.median, (*rates, ratios))
        self._tell(dict(zip(names, medians, strict=True)))

    async def faults(self, name: str, number: int) -> None:
        every = [await disturbed(self.fleet, self.load, number) for _ in range(self.args.faults)]
        medians = {
            f"{name}_{key}": statistics.median(one[key] for one in every) for key in every[0]
        }
        self._tell({**medians, f"{name}_gap_ms_most": max(one["gap_ms"] for one in every)})

    def _tell(self, found: dict[str, float]) -> None:
        self.found |= found
        said = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        print(f"{self.device}: {said}", file=sys.stderr, flush=True)


async def compared(device: str, args: argparse.Namespace) -> dict[str, Any]:
    """All parts, from the start of the servers to their end."""
    return await Comparison(device, args).measure()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="fake,shipped")
    parser.add_argument("--parts", default="first,through,stopped,killed")
    parser.add_argument("--prompts", default="64,512")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.parts, args.prompts = args.parts.split(","), [int(n) for n in args.prompts.split(",")]
    os.environ.setdefault(
        "RAY_AUTH_MODE", "disabled"
    )  # of the Ray that this starts on the loopback address
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    rows = [asyncio.run(compared(device, args)) for device in args.device.split(",")]
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
