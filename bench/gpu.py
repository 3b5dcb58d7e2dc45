"""One call that checks and times everything on an H200: stages in order of worth, each in a process of its own.

    python -m bench.gpu                          nine minutes at most, results under $OUT
    python -m bench.gpu --resume FILE            skips the stages that FILE has whole
    python -m bench.gpu --only facts,decode_numerics --budget 120
    python -m bench.gpu --tiny                   every stage on a CPU with tiny shapes: proves the script

Owns the order, the time budget and the record. Must not know what a stage measures: those are
functions of the other ``bench.gpu_*`` modules. Each figure is
printed and written to ``gpu.jsonl`` the moment it is known, so a call that is cut loses nothing; a
kernel that hangs costs its own stage only.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import gpu_wheels
from bench.gpu_record import Record, read


@dataclass(frozen=True, slots=True)
class Stage:
    """``function`` of ``module`` may run for ``seconds``; ``goal`` says what its figures decide."""

    module: str
    function: str
    seconds: int
    goal: str


STAGES: dict[str, Stage] = {
    "facts": Stage("bench.gpu_facts", "facts", 60, "the ceilings that all shares refer to"),
    "decode_numerics": Stage("bench.gpu_kernels", "decode_numerics", 75, "rel < 1e-2, stable"),
    "prefill_numerics": Stage("bench.gpu_kernels", "prefill_numerics", 75, "rel < 1e-2, stable"),
    "step_numerics": Stage("bench.gpu_steps", "step_numerics", 75, "same tokens as ref"),
    "graphs": Stage("bench.gpu_steps", "graphs", 75, "a step is one CUDA graph that runs"),
    "decode_times": Stage("bench.gpu_kernels", "decode_times", 60, "92 % of read bandwidth"),
    "steps_1b": Stage("bench.gpu_steps", "steps_1b", 100, "batch 1: 1300 tok/s"),
    "steps_8b": Stage("bench.gpu_steps", "steps_8b", 150, "batch 1: 245 tok/s, batch 32 up: 85 %"),
    "verify": Stage("bench.gpu_steps", "verify", 120, "batch 1: 550 tok/s where 3 of 8 stand"),
    "steps_8b_kv8": Stage("bench.gpu_steps", "steps_8b_kv8", 90, "8-bit KV: same share of less"),
    "prefill_times": Stage("bench.gpu_kernels", "prefill_times", 60, "FlashAttention-3 beside it"),
    "attention_peers": Stage("bench.gpu_attention_peers", "attention_peers", 90, "what to beat"),
    "serving": Stage("bench.gpu_serving", "serving", 240, "tokens a second over HTTP"),
    "candidate_numerics": Stage("bench.gpu_candidates", "candidate_numerics", 60, "rel < 1e-2"),
    "candidate_times": Stage("bench.gpu_candidates", "candidate_times", 90, "1.05 x XLA or goes"),
    "peers": Stage("bench.gpu_peers", "peers", 120, "torch loops and transformers, same shapes"),
    "decode_tune": Stage("bench.gpu_kernels", "decode_tune", 60, "new figures for tune.json"),
    "prefill_tune": Stage("bench.gpu_kernels", "prefill_tune", 60, "new figures for tune.json"),
    "candidate_tune": Stage("bench.gpu_candidates", "candidate_tune", 60, "new tune.json figures"),
    "profile": Stage("bench.gpu_steps", "profile", 60, "what the step's time goes to"),
}


def whole(lines: list[dict[str, Any]]) -> set[str]:
    """Stages that a record has from beginning to end."""
    return {x["stage"] for x in lines if x["name"] == "end" and x.get("rc") == 0}


def run_stage(name: str, folder: Path, *, tiny: bool, seconds: float) -> None:
    """The child's side."""
    stage = STAGES[name]
    record = Record(folder, name, tiny=tiny, seconds=seconds)
    getattr(importlib.import_module(stage.module), stage.function)(record)


def run_all(args: argparse.Namespace) -> int:
    """The parent's side: every wanted stage in turn, as long as there is time."""
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    done = whole(read(Path(args.resume))) if args.resume else set()
    names = [n for n in args.only or STAGES if n not in done]
    for name in names:
        left = end - time.monotonic()
        record = Record(folder, name, tiny=args.tiny, seconds=0)
        if left < 15:
            record.add("end", rc=-1, skipped="out of time")
            continue
        limit = min(STAGES[name].seconds * (10 if args.tiny else 1), left - 3)
        start = time.monotonic()
        rc = _child(name, folder, tiny=args.tiny, seconds=limit)
        record.add("end", rc=rc, seconds=round(time.monotonic() - start, 1), goal=STAGES[name].goal)
    print(summary(read(folder / "gpu.jsonl")))
    return 0


def _child(name: str, folder: Path, *, tiny: bool, seconds: float) -> int:
    command = [sys.executable, "-m", "bench.gpu", "--stage", name, "--out", str(folder)]
    command += ["--budget", str(seconds), *(["--tiny"] if tiny else [])]
    with (folder / "errors.log").open("a") as errors:
        child = subprocess.Popen(command, stderr=errors, env=_environment(tiny=tiny))
        try:
            return child.wait(seconds + 2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return 124


def _environment(*, tiny: bool) -> dict[str, str]:
    """What is carried can be imported. On a CPU Mosaic's interpreter needs threads to call back on,
    and XLA has as many as devices or cores, whichever are more."""
    environment = gpu_wheels.environment()
    if tiny:
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
        environment["XLA_FLAGS"] = flags.strip()
    return environment


def summary(lines: list[dict[str, Any]]) -> str:
    """One line a stage: figures, errors, seconds."""
    rows = []
    for name in STAGES:
        mine = [x for x in lines if x["stage"] == name]
        if not mine:
            continue
        end = next((x for x in reversed(mine) if x["name"] == "end"), {})
        wrong = [x for x in mine if "error" in x or x.get("ok") is False]
        figures = len([x for x in mine if x["name"] != "end"])
        rows.append(
            f"{name:16s} rc {end.get('rc', '?'):>4}  {end.get('seconds', 0):6.1f} s  "
            f"{figures:3d} figures  {len(wrong):2d} wrong  {end.get('goal', '')}"
        )
    return "\n".join(["", "stage            result", *rows])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "bench/results/gpu"))
    parser.add_argument("--budget", type=float, default=530.0, help="seconds for everything")
    parser.add_argument("--only", type=_stages, help="stages, comma-separated, in this order")
    parser.add_argument("--resume", help="a gpu.jsonl whose whole stages are not run again")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.stage:
        run_stage(args.stage, Path(args.out), tiny=args.tiny, seconds=args.budget)
        return 0
    return run_all(args)


def _stages(text: str) -> list[str]:
    names = text.split(",")
    unknown = [n for n in names if n not in STAGES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}"
        )
    return names


if __name__ == "__main__":
    sys.exit(main())
