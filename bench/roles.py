"""What disaggregated prefill costs and gives on one machine: one process, two replicas, two replicas with roles.

It owns the three set-ups and both loads. All of them run the same model on the same cores, one set-up after the other:

    idle     one prompt at a time that nobody has seen: milliseconds to its first token
    beside   some sequences decode, long prompts come: gaps between their tokens, the prompts' first tokens

With roles every prompt is computed by the prefill replica, whatever that costs: by itself the router would not have
most of them computed apart on an idle machine. So the difference to two replicas is the way of the KV pages.

    python -m bench.roles [--prompts 64,512,1024] [--repeats 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.probe import record
from jserve.build import serving_engine
from jserve.config import EngineConfig
from jserve.engine.face import EngineFace
from jserve.sampling import SamplingParams
from jserve.types import Request

SETUPS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two replicas": {"replicas": 2},
    "prefill + decode": {"replicas": 2, "roles": "prefill=1,decode=1"},
}
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 2048}
OPTIONS |= {"structured_outputs": False, "prompt_logprobs": False}
DECODERS, DECODED = 4, 1200
PAUSE_S = 0.5
"""Between two long prompts."""


class Load:
    """Requests of random tokens to one engine."""

    def __init__(self, engine: EngineFace, seed: int = 0) -> None:
        self.engine, self.rng = engine, random.Random(seed)

    async def times(self, n_prompt: int, n_out: int) -> list[float]:
        """Seconds from the request to each of its outputs."""
        request = Request(
            id=uuid.uuid4().hex,
            prompt_ids=tuple(self.rng.randrange(100, 2000) for _ in range(n_prompt)),
            params=SamplingParams(max_tokens=n_out, temperature=0.0, ignore_eos=True),
        )
        began, found = time.perf_counter(), []
        async for output in self.engine.generate(request):
            if output.error:
                raise RuntimeError(output.error)
            if output.token_ids:
                found.append(time.perf_counter() - began)
        return found

    async def idle(self, n_prompt: int, repeats: int) -> float:
        """Median milliseconds to the first token."""
        await self.times(n_prompt, 2)
        return 1e3 * statistics.median([(await self.times(n_prompt, 2))[0] for _ in range(repeats)])

    async def beside(self, n_prompt: int) -> dict[str, float]:
        """What decoders and long prompts get where both are there."""
        decoders = [asyncio.ensure_future(self.times(16, DECODED)) for _ in range(DECODERS)]
        firsts: list[float] = []
        await asyncio.sleep(PAUSE_S)
        while not any(one.done() for one in decoders):
            firsts.append((await self.times(n_prompt, 2))[0])
            await asyncio.sleep(PAUSE_S)
        gaps = [
            1e3 * (after - before)
            for one in await asyncio.gather(*decoders)
            for before, after in itertools.pairwise(one)
        ]
        cuts = statistics.quantiles(gaps, n=100)
        return {
            "itl_ms_p50": cuts[49],
            "itl_ms_p99": cuts[98],
            "itl_ms_max": max(gaps),
            "long_first_ms": 1e3 * statistics.median(firsts),
            "long_prompts": len(firsts),
        }


def all_remote(engine: Any) -> None:
    """Have every prompt computed by the prefill replica."""
    router = engine._router

    def choose_prefill(asked: Any) -> Any:
        number = next(one.number for one in engine.members if one.role == "prefill")
        return router.assign(asked, number)

    router.choose_prefill = choose_prefill


async def measure(setup: str, prompts: list[int], repeats: int) -> dict[str, Any]:
    """One set-up, from its start to its end."""
    engine = serving_engine(EngineConfig.of(**OPTIONS, **SETUPS[setup]))
    await engine.start()
    try:
        if "roles" in SETUPS[setup]:
            all_remote(engine)
        load = Load(engine)
        found: dict[str, Any] = {"setup": setup}
        for n in prompts:
            found[f"first_ms_{n}"] = await load.idle(n, repeats)
        found |= await load.beside(max(prompts))
        counters = engine.counters
        found["remote_prefills"] = counters.get("remote_prefills", 0)
        found["remote_prefills_failed"] = counters.get("remote_prefills_failed", 0)
        return found
    finally:
        await engine.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="64,512,1024")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    os.environ.setdefault(
        "RAY_AUTH_MODE", "disabled"
    )  # of the Ray that this starts on the loopback address
    prompts = [int(n) for n in args.prompts.split(",")]
    err = Console(stderr=True)
    rows = []
    for setup in SETUPS:
        err.print(f"{setup} ...")
        rows.append(asyncio.run(measure(setup, prompts, args.repeats)))
    table = Table(title="milliseconds")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=report.WIDTH).print(table)
    if args.json is not None:
        report.write(record("roles", {"repeats": args.repeats, **OPTIONS}, rows), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
