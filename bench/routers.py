"""Policies of routing compared in the simulator: the tables and the plot of ``docs/fleet.md``.

It owns the settings. The device is a roofline (in ``one_cache`` and ``skew`` one with fixed prices), so this compares
policies on the same traffic, and a busy machine changes nothing but how long it takes:

    policies   llm-d's published workload (docs/fleet.traffic) by load; writes docs/routers.svg
    longer     the same with ``--longer`` times the requests, so that those who have no luck build a queue
    demand     the same at caches of all contexts over --demands: 0.3 needs a third of the cache, 3 three times as much
    one_cache  tokens that four replicas find of those that one cache of their size finds
    skew       one prefix is asked for by 80 % of requests: computed tokens of the busiest replica over the mean
    ramp       an hour of docs/ramp.traffic by a number of replicas: fixed, and by the load

    python -m bench.routers [--parts policies,longer,...] [--longer 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.probe import record
from jserve.config import EngineConfig
from jserve.sim import traffic
from jserve.sim.costs import Device
from jserve.sim.fleet import simulated
from jserve.sim.report import Report, Slo, summarise
from jserve.sim.simulate import Setup, simulate
from jserve.sim.study import SimulateOptions, study
from jserve.sizing.models import simulated as sizes_of

DOCS = Path(__file__).parent.parent / "docs"
MODEL = "qwen3-32b"
LLM_D = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 4096,
    "page_size": 64,
    "n_pages": 2400,
    "max_queue_s": 0,
    "max_waiting": 100_000,
}
RAMP = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "page_size": 32}
CONTEXTS = 150 * 6000
"""Tokens of all contexts of docs/fleet.traffic."""
DEMANDS = (0.3, 0.75, 1.5, 3.0)
ROUTERS = "seconds,lmetric,p2c,round_robin,random"
SHARED = (
    "prefixes=24,prefix=120,zipf=0,prompt=24,prompt_sigma=0.2,output=6,context=400,rate=6,n=240"
)
SKEWED = "prefixes=1,prefix=120,prompt=24,output=20,context=400,rate=8,n=160"
SKEWED += ";rate=2,n=40,prompt=140,output=20,context=400"
SEEDS = range(1, 6)
Line = dict[str, Any]


class FixedCosts:
    """A tenth of a second a step, and a hundredth more for each prompt token."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        return 0.1 + 0.01 * n_prefill


def line(part: str, found: Report, **setting: Any) -> Line:
    """What of a simulation's report the tables show."""
    lane, ttft = found["lanes"]["all"], found["lanes"]["all"]["ttft_ms"]
    return {
        "part": part,
        **setting,
        "ttft_ms_p50": ttft["p50"],
        "ttft_ms_p90": ttft["p90"],
        "ttft_ms_p99": ttft["p99"],
        "output_tok_s": lane["output_tok_s"],
        "good_share": lane["good_share"],
        "hit_rate": found["cache"]["hit_rate"],
        "hit_tokens": found["cache"]["hit_tokens"],
        "replicas": found["replicas"].get("mean", 1.0),
        "most_over_mean": found["replicas"].get("most_over_mean", 1.0),
    }


def studied(part: str, options: dict[str, Any], **wish: Any) -> Iterator[Line]:
    """The lines of a study of the roofline, one for each setting."""
    asked = SimulateOptions(model=sizes_of(MODEL), **wish)
    for _, found in study(asked, EngineConfig.of(**options), told):
        yield line(part, found, **found["setting"])


def told(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def policies(args: argparse.Namespace) -> Iterator[Line]:
    wish = {"trace": str(DOCS / "fleet.traffic"), "replicas": 8, "slo_ttft_ms": 2000.0}
    wish |= {"sweep": "load=0.5,1,2", "against": f"router={ROUTERS}"}
    yield from studied("policies", LLM_D, **wish, plot=DOCS / "routers.svg")


def llm_d(times: int = 1) -> str:
    """Its traffic, with so many times the requests."""
    lines = (DOCS / "fleet.traffic").read_text().splitlines()
    text = next(line for line in lines if not line.startswith("#"))
    return text.replace("n=600", f"n={600 * times}")


def longer(args: argparse.Namespace) -> Iterator[Line]:
    wish = {"trace": llm_d(args.longer), "replicas": 8, "slo_ttft_ms": 2000.0, "load": 2.0}
    for one in studied("longer", LLM_D, **wish, sweep="router=seconds,random"):
        yield {**one, "requests": 600 * args.longer}


def demand(args: argparse.Namespace) -> Iterator[Line]:
    wish = {"trace": llm_d(), "replicas": 8, "slo_ttft_ms": 2000.0}
    for share in DEMANDS:
        n_pages = round(CONTEXTS / share / 8 / LLM_D["page_size"])
        options = LLM_D | {"n_pages": n_pages}
        for one in studied("demand", options, **wish, sweep="router=seconds,lmetric,random"):
            yield {**one, "demand": share}


def fixed(text: str, seed: int, replicas: int, n_pages: int, n_seqs: int = 4) -> Report:
    """A simulation with fixed prices."""
    options = {"max_num_seqs": n_seqs, "max_num_batched_tokens": 64, "page_size": 8, "overlap": 0}
    config = EngineConfig.of(**options, max_queue_s=0, max_waiting=10_000)
    device = Device(
        name="fixed", costs=FixedCosts(), n_pages=n_pages, max_model_len=512, host_s=0.0
    )
    setup = Setup(config=config, device=device)
    trace = traffic.generate(traffic.parse(text), seed)
    if replicas == 1:
        return summarise(simulate(trace, setup), Slo())
    return summarise(simulated(trace, dataclasses.replace(setup, replicas=replicas)), Slo())


def one_cache(args: argparse.Namespace) -> Iterator[Line]:
    ratios = []
    for seed in SEEDS:
        large = line("one_cache", fixed(SHARED, seed, 1, 2000, 64), seed=seed, router="one cache")
        found = line("one_cache", fixed(SHARED, seed, 4, 8 * 19 + 60), seed=seed, router="seconds")
        ratios.append(found["hit_tokens"] / large["hit_tokens"])
        yield from (large, {**found, "of_one_cache": ratios[-1]})
    told(
        f"of one cache: {min(ratios):.3f} to {max(ratios):.3f}, mean {statistics.mean(ratios):.3f}"
    )


def skew(args: argparse.Namespace) -> Iterator[Line]:
    for seed in SEEDS:
        yield line("skew", fixed(SKEWED, seed, 4, 200), seed=seed, router="seconds")


def ramp(args: argparse.Namespace) -> Iterator[Line]:
    wish = {"trace": str(DOCS / "ramp.traffic"), "slo_ttft_ms": 1000.0, "slo_tpot_ms": 50.0}
    yield from studied("ramp", RAMP, **wish, sweep="replicas=3,4,5")
    scaled = {"replicas": 1, "max_replicas": 8, "sweep": "start_s=60,180"}
    yield from studied("ramp", RAMP, **wish, **scaled)


PARTS = {part.__name__: part for part in (policies, longer, demand, one_cache, skew, ramp)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--longer", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows: list[Line] = []
    for part in args.parts.split(","):
        for row in PARTS[part](args):
            rows.append(row)
            told(
                ", ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                )
            )
        if args.json is not None:
            options = {"model": MODEL, "llm_d": LLM_D, "ramp": RAMP, "longer": args.longer}
            report.write(record("routers", options, rows), args.json)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names, title="routers")
    for row in rows:
        values = (row.get(name, "") for name in names)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    Console(width=report.WIDTH).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
