"""Offline benchmark: the workloads through ``jserve.LLM`` in process, against transformers.

It owns the order of turns and the result file. Turns alternate direction as in ``bench.serving``; each is a process
of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import probe, report, workloads
from bench.models import facts
from bench.offline_engines import ENGINES
from bench.serving import FORMAT, turns

NEEDS = {"jserve": ("jax",), "hf": ("torch", "transformers"), "hf-cb": ("torch", "transformers")}
OFFLINE = ("S1", "S2", "S3")
err = Console(stderr=True, highlight=False)


def missing(name: str) -> str | None:
    """One line saying why an engine is skipped, or None."""
    absent = [p for p in NEEDS[name] if importlib.util.find_spec(p) is None]
    return f"{name}: skipped, {' and '.join(absent)} not installed" if absent else None


def one_turn(spec: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run one engine in a process of its own; a failure leaves ``error`` in the result."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        argv = [sys.executable, "-m", "bench.offline_engines", json.dumps(spec), str(out)]
        try:
            with log.open("wb") as sink:
                code = subprocess.run(
                    argv, stdout=sink, stderr=sink, timeout=timeout_s, check=False
                ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {timeout_s:g} s"}
        if code or not out.exists():
            words = log.read_text(errors="replace").strip().splitlines()[-3:]
            return {"error": f"ended with {code}: {' / '.join(w[:200] for w in words)}"}
        return json.loads(out.read_text())


def compare(args: argparse.Namespace, engines: Sequence[str]) -> list[dict[str, Any]]:
    """All turns of all rounds, in the order they ran."""
    done = []
    for n, name in turns(engines, args.rounds):
        err.print(f"[bold]round {n}: {name}[/]")
        spec = {
            "engine": name,
            "model": str(args.model),
            "names": args.workload,
            "seed": args.seed,
            "scale": args.scale,
            "options": args.jserve_options,
        }
        turn = one_turn(spec, args.timeout)
        for load, result in turn.get("workloads", {}).items():
            err.print(f"    {report.one_line(load, result)}", soft_wrap=True)
        done.append({"round": n, "engine": name, **turn})
    return done


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.offline", description="Offline comparison.")
    add = p.add_argument
    add("model", type=Path, help="model directory every engine loads")
    add("--engine", action="append", choices=ENGINES, help="repeatable; default all installed")
    add("--workload", action="append", default=[], help=f"{' '.join(OFFLINE)} chat@N (repeatable)")
    add("--rounds", type=int, default=2, help="turns of each engine (2)")
    add("--scale", type=float, default=1.0, help="share of the requests (1)")
    add("--seed", type=int, default=0, help="seed of prompts and lengths (0)")
    add("--jserve-options", type=json.loads, default={}, help='JSON, e.g. {"page_size": 32}')
    add("--timeout", type=float, default=1800.0, help="seconds per turn (1800)")
    add("--json", type=Path, help="result file to write")
    return p


def check(args: argparse.Namespace) -> None:
    """Raises: ValueError: a workload that makes no sense offline, or a bad number."""
    args.workload = args.workload or ["S1", "S2"]
    for name in args.workload:
        workloads.make(name, scale=0.01)
        if name.partition("@")[0] not in (*OFFLINE, "chat"):
            raise ValueError(f"{name} has no meaning offline; one of {' '.join(OFFLINE)} chat@N")
    if args.rounds < 1 or args.scale <= 0 or args.seed < 0:
        raise ValueError("--rounds must be at least 1, --scale above 0, --seed not negative")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every request of every engine was served; 1: not; 2: bad usage."""
    p = parser()
    args = p.parse_args(argv)
    try:
        check(args)
        model = facts(args.model)
    except ValueError as e:
        p.error(str(e))
    chosen = list(dict.fromkeys(args.engine or ENGINES))
    for line in filter(None, map(missing, chosen)):
        err.print(f"[yellow]{line}[/]")
    engines = [name for name in chosen if missing(name) is None]
    if not engines:
        p.error("no engine can run")
    options = {"rounds": args.rounds, "scale": args.scale, "seed": args.seed}
    result = {
        "format": FORMAT,
        "kind": "offline",
        "machine": probe.machine(),
        "options": options | {"jserve": args.jserve_options},
        "model": model,
        "turns": compare(args, engines),
    }
    report.add_limits(result)
    if args.json:
        report.write(result, args.json)
    report.show(result)
    return report.exit_code(result)


if __name__ == "__main__":
    sys.exit(main())
