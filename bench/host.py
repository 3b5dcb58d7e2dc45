"""Microseconds that the host spends per step: plan and commit at 1, 64, 256 and 1024 decode rows.

It owns the timing of the host loop. No device is involved: results are made up, so the figures are the pure cost of
``Scheduler.plan`` and ``Scheduler.commit`` in steady decoding with overlap depth 1.

    python -m bench.host [--rows 1,64,256,1024] [--waiting 0] [--steps 200] [--logprobs N] [--json FILE]

``--waiting`` puts that many more requests, of all lanes and 20 tenants, into the queue behind those
who run: what steady decoding pays for a queue.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import report
from bench.probe import record
from jserve.config import EngineConfig
from jserve.ports import RunnerLimits
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.types import Lane, Request, StepPlan, StepResult

PAGE_SIZE, CONTEXT, PROMPT, VOCAB = 16, 2048, 128, 32000

Times = dict[str, list[float]]
"""Part of the loop -> microseconds of each step."""


def limits_for(rows: int) -> RunnerLimits:
    """Room for ``rows`` sequences that never run out of pages."""
    return RunnerLimits(
        n_slots=rows,
        max_rows=rows,
        max_decode_rows=rows,
        max_prefill_tokens=8192,
        max_prefill_rows=64,
        max_drafts=0,
        n_pages=1 + rows * CONTEXT // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_model_len=CONTEXT,
        vocab_size=VOCAB,
    )


def scheduler_for(rows: int, *, logprobs: int | None = None, waiting: int = 0) -> Scheduler:
    """A scheduler with ``rows`` requests submitted, and ``waiting`` more behind them."""
    config = EngineConfig.of(
        max_num_seqs=rows,
        max_num_batched_tokens=8192 + rows,
        max_waiting=4 * (rows + waiting),
        max_waiting_tokens=0,
    )
    scheduler = Scheduler(limits_for(rows), config)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=None, ignore_eos=True, logprobs=logprobs)
    for i in range(rows):
        # Unequal lengths spread the page borders over the steps, as real traffic does.
        prompt = tuple(rng.integers(0, VOCAB, PROMPT + int(rng.integers(PAGE_SIZE))).tolist())
        scheduler.submit(Request(id=str(i), prompt_ids=prompt, params=params), 0.0)
    if waiting:
        while scheduler.stats().running < rows:  # those who run are in before the others come
            plan = scheduler.plan(0.0)
            assert plan is not None
            scheduler.commit(plan, next(results())(plan), 0.0)
    lanes = list(Lane)
    for i in range(waiting):
        scheduler.submit(
            Request(
                id=f"w{i}",
                prompt_ids=(1,) * PROMPT,
                params=params,
                lane=lanes[i % len(lanes)],
                tenant=f"t{i % 20}",
            ),
            0.0,
        )
    return scheduler


def results() -> Iterator[Callable[[StepPlan], StepResult]]:
    """Made-up results, fresh token ids every step."""
    rng = np.random.default_rng(1)
    while True:

        def result(plan: StepPlan) -> StepResult:
            R = len(plan.rows)
            return StepResult(
                tokens_RJ=rng.integers(0, VOCAB, (R, 1), dtype=np.int32),
                n_ok_R=np.fromiter((row.emits for row in plan.rows), np.int32, R),
                finite_R=np.ones(R, bool),
                logprob_RJ=np.zeros((R, 1), np.float32),
                top_ids_RJL=np.zeros((R, 1, 20), np.int32),
                top_logprobs_RJL=np.zeros((R, 1, 20), np.float32),
            )

        yield result


def measure(rows: int, steps: int, *, logprobs: int | None = None, waiting: int = 0) -> Times:
    """Steady decoding of ``rows`` rows: microseconds of each part, one entry per step."""
    scheduler, make = scheduler_for(rows, logprobs=logprobs, waiting=waiting), results()
    times: Times = {"plan": [], "commit": []}
    flight: list[StepPlan] = []
    gc.collect()
    gc.freeze()
    while len(times["commit"]) < steps:
        started = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None, "the sequences ended before the measurement did"
        flight.append(plan)
        if len(flight) < 2:
            continue
        done = flight.pop(0)
        result = next(make)(done)
        before = time.perf_counter()
        outputs = scheduler.commit(done, result, 0.0)
        after = time.perf_counter()
        if len(outputs) == rows and len(plan.rows) == rows:
            times["plan"].append((planned - started) * 1e6)
            times["commit"].append((after - before) * 1e6)
    gc.unfreeze()
    return times


def summary(rows: int, times: Times) -> dict[str, Any]:
    """Median and 99th percentile of each part and of their sum."""
    total = [sum(step) for step in zip(*times.values(), strict=True)]
    columns = {**times, "total": total}
    return {"rows": rows} | {
        f"{name}_{kind}_us": round(value, 1)
        for name, series in columns.items()
        for kind, value in (("p50", statistics.median(series)), ("p99", _p99(series)))
    }


def _p99(series: list[float]) -> float:
    return sorted(series)[min(len(series) - 1, int(0.99 * len(series)))]


def show(lines: list[dict[str, Any]]) -> None:
    table = Table(title="host microseconds per step (steady decoding, overlap 1)")
    for name in lines[0]:
        table.add_column(name.removesuffix("_us").replace("_", " "), justify="right")
    for line in lines:
        table.add_row(*(str(value) for value in line.values()))
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,64,256,1024", help="row counts, comma-separated")
    parser.add_argument("--waiting", type=int, default=0, help="requests in the queue behind them")
    parser.add_argument("--steps", type=int, default=200, help="steps measured per row count")
    parser.add_argument("--logprobs", type=int, default=None, help="logprobs each request asks for")
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    args = parser.parse_args(argv)
    lines = [
        summary(rows, measure(rows, args.steps, logprobs=args.logprobs, waiting=args.waiting))
        for rows in map(int, args.rows.split(","))
    ]
    show(lines)
    if args.json is not None:
        options = {"waiting": args.waiting, "steps": args.steps, "logprobs": args.logprobs}
        report.write(record("host", options, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
