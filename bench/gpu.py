"""One call that checks and times everything on an H100 or H200: stages in order of worth.

    python -m bench.gpu                          nine minutes at most, results under $OUT
    python -m bench.gpu --resume FILE            measures only what FILE lacks or has wrong
    python -m bench.gpu --only facts,decode_numerics --budget 120
    python -m bench.gpu --tiny                   every stage on a CPU with tiny shapes: proves the script

Each figure is printed and written to ``gpu.jsonl`` the moment it is known, so a call that is cut
loses nothing. Each stage runs in a process of its own; a case that hangs, aborts or leaves the device
unusable ends that process, is recorded as an error, and another process goes on with the next case.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import gpu_wheels
from bench.gpu_record import STICKY, Record, made_by, open_case, read, wrong
from jserve.xla import claim_memory

PROGRAMS = Path(tempfile.gettempdir()) / "jserve-gpu-programs"
"""Compiled programs, kept for the next process and the next call while the machine is held."""

KILLED_S = 20
"""How long a killed process may take to be gone."""
ATTENTION = ("hopper", "hopper_fused", "dense", "xla", "none")
KERNELS = ("hopper", "xla")


@dataclass(frozen=True, slots=True)
class Stage:
    """``function`` of ``module`` may run for ``seconds``; ``goal`` says what its figures decide."""

    module: str
    function: str
    seconds: int
    goal: str

    @property
    def is_of_steps(self) -> bool:
        """Whether options ``--attn`` and ``--kernels`` decide its figures."""
        return self.module in ("bench.gpu_steps", "bench.gpu_serving", "bench.gpu_gemm")


STAGES: dict[str, Stage] = {
    "facts": Stage("bench.gpu_facts", "facts", 60, "the ceilings that all shares refer to"),
    "graphs": Stage("bench.gpu_steps", "graphs", 60, "how later stages record CUDA graphs"),
    "decode_numerics": Stage("bench.gpu_kernels", "decode_numerics", 75, "rel < 1e-2, stable"),
    "prefill_numerics": Stage("bench.gpu_kernels", "prefill_numerics", 75, "rel < 1e-2, stable"),
    "mla_numerics": Stage("bench.gpu_latents", "mla_numerics", 75, "rel < 1e-2, stable"),
    "step_numerics": Stage("bench.gpu_steps", "step_numerics", 75, "same tokens as ref"),
    "decode_times": Stage("bench.gpu_kernels", "decode_times", 60, "92 % of read bandwidth"),
    "steps_1b": Stage("bench.gpu_steps", "steps_1b", 100, "batch 1: 1300 tok/s"),
    "steps_8b": Stage("bench.gpu_steps", "steps_8b", 150, "batch 1: 245 tok/s, batch 32 up: 85 %"),
    "verify": Stage("bench.gpu_steps", "verify", 120, "batch 1: 550 tok/s where 3 of 8 stand"),
    "steps_8b_kv8": Stage("bench.gpu_steps", "steps_8b_kv8", 90, "8-bit KV: same share of less"),
    "steps_8b_kv_int8": Stage(
        "bench.gpu_steps", "steps_8b_kv_int8", 60, "KV with scales: as e4m3, 1/32 more"
    ),
    "gemm_numerics": Stage("bench.gpu_gemm", "gemm_numerics", 120, "rel < 1e-2, stable"),
    "steps_8b_fp8": Stage("bench.gpu_steps", "steps_8b_fp8", 120, "batch 1: 410 tok/s"),
    "steps_8b_int4": Stage("bench.gpu_steps", "steps_8b_int4", 120, "batch 1: 620 tok/s"),
    "gemm_times": Stage(
        "bench.gpu_gemm", "gemm_times", 300, "fp8: 85 % of bytes to 64 rows, 1150 TFLOP/s at 4096"
    ),
    "prefill_times": Stage("bench.gpu_kernels", "prefill_times", 60, "FlashAttention-3 beside it"),
    "attention_peers": Stage("bench.gpu_attention_peers", "attention_peers", 90, "what to beat"),
    "serving": Stage("bench.gpu_serving", "serving", 240, "tokens a second over HTTP"),
    "serving_speculative": Stage(
        "bench.gpu_serving", "serving_speculative", 180, "S1 550 tok/s, 128 users: 0.98 of plain"
    ),
    "mla_times": Stage("bench.gpu_latents", "mla_times", 60, "80 % of bytes, 550 TFLOP/s"),
    "experts_numerics": Stage("bench.gpu_experts", "experts_numerics", 60, "rel < 1e-2, stable"),
    "experts_times": Stage("bench.gpu_experts", "experts_times", 90, "85 % of bytes, 600 TFLOP/s"),
    "steps_30b_a3b": Stage("bench.gpu_steps", "steps_30b_a3b", 150, "batch 1: 495 tok/s, 64: 75 %"),
    "steps_v2_lite": Stage("bench.gpu_steps", "steps_v2_lite", 120, "batch 1: 610 tok/s"),
    "experts_devices": Stage("bench.gpu_experts", "experts_devices", 60, "EP against TP, EPLB"),
    "products_numerics": Stage("bench.gpu_products", "products_numerics", 150, "rel < 1e-2"),
    "products_times": Stage(
        "bench.gpu_products", "products_times", 240, "72 % of bytes in 4 bits, 1.05 x XLA"
    ),
    "candidate_numerics": Stage("bench.gpu_candidates", "candidate_numerics", 60, "rel < 1e-2"),
    "candidate_times": Stage("bench.gpu_candidates", "candidate_times", 90, "1.05 x XLA or goes"),
    "peers": Stage("bench.gpu_peers", "peers", 120, "torch loops and transformers, same shapes"),
    "decode_tune": Stage("bench.gpu_kernels", "decode_tune", 60, "new figures for tune.json"),
    "prefill_tune": Stage("bench.gpu_kernels", "prefill_tune", 60, "new figures for tune.json"),
    "experts_tune": Stage("bench.gpu_experts", "experts_tune", 60, "new figures for tune.json"),
    "mla_tune": Stage("bench.gpu_latents", "mla_tune", 45, "new figures for tune.json"),
    "candidate_tune": Stage("bench.gpu_candidates", "candidate_tune", 60, "new tune.json figures"),
    "profile": Stage("bench.gpu_steps", "profile", 60, "what the step's time goes to"),
}


def whole(lines: list[dict[str, Any]]) -> set[str]:
    """Stages that a record has from beginning to end, with no line wrong and none skipped for time."""
    ended = {x["stage"] for x in lines if x["name"] == "end" and x.get("rc") == 0}
    return ended - {x["stage"] for x in lines if not _good(x)}


def _stands(line: dict[str, Any], lines: list[dict[str, Any]]) -> bool:
    """False for what is made anew where the line's stage is not whole: its end, and what it concluded."""
    if line["name"] not in ("end", "verdict"):
        return True
    return line["stage"] in whole(made_by(lines, line.get("attn", ""), line.get("kernels", "")))


def _good(line: dict[str, Any]) -> bool:
    return not wrong(line) and line.get("skipped") != "out of time"


def run_stage(name: str, args: argparse.Namespace) -> None:
    """The child's side."""
    from jserve.runner.programs import (
        use_compile_cache,  # imports jax, which the parent does without
    )

    use_compile_cache(PROGRAMS)
    stage = STAGES[name]
    record = _record(args, name, args.budget)
    getattr(importlib.import_module(stage.module), stage.function)(record)


def _record(args: argparse.Namespace, name: str, seconds: float) -> Record:
    kernels = "" if args.kernels == "xla" else args.kernels
    how = {"tiny": args.tiny, "attn": args.attn, "kernels": kernels}
    decide = STAGES[name].is_of_steps
    return Record(Path(args.out), name, seconds=seconds, decide=decide, **how)


def run_all(args: argparse.Namespace) -> int:
    """The parent's side: every wanted stage in turn, as long as there is time.

    Returns:
        0 if every wanted stage is whole, else 1.
    """
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    how = args.attn, "" if args.kernels == "xla" else args.kernels
    done = _carry_over(Path(args.resume), folder, how) if args.resume else set()
    names = [n for n in args.only or STAGES if n not in done]
    for name in names:
        left = end - time.monotonic()
        record = _record(args, name, 0)
        if left < 15:
            record.add("end", rc=-1, skipped="out of time")
            continue
        limit = min(STAGES[name].seconds * (10 if args.tiny else 1), left - 3)
        start = time.monotonic()
        *lost, rc = _stage(record, seconds=limit)
        took = round(time.monotonic() - start, 1)
        record.add("end", rc=rc, lost=lost, seconds=took, goal=STAGES[name].goal)
    lines = made_by(read(folder / "gpu.jsonl"), *how)
    print(summary(lines))
    return 0 if whole(lines) >= set(names) else 1


def _carry_over(before: Path, folder: Path, how: tuple[str, str]) -> set[str]:
    """Copy the good lines of an earlier record; returns the stages that are whole in it, with the attention and the
    kernels of ``how``.

    Raises:
        SystemExit: there is no such record.
    """
    if not before.exists():
        raise SystemExit(f"--resume {before}: there is no such file")
    lines = read(before)
    kept = [x for x in lines if _good(x) and _stands(x, lines)]
    done = whole(made_by(lines, *how))
    if before.resolve() != (folder / "gpu.jsonl").resolve():
        text = "".join(json.dumps(x) + "\n" for x in kept)
        (folder / "gpu.jsonl").write_text(text)
    return done


def _stage(record: Record, *, seconds: float) -> list[int]:
    """Run a stage until it ends by itself; a case that ends its process is an error, and a new
    process goes on after it. Returns the exit codes of all its processes."""
    end, codes = time.monotonic() + seconds, []
    while True:
        left = end - time.monotonic()
        codes.append(_child(record, left))
        case = open_case(record.folder, codes[-1])
        if case is not None:
            record.add(case[0], error=case[1])
        if (case is None and codes[-1] != STICKY) or end - time.monotonic() < 5:
            return codes


def _child(record: Record, seconds: float) -> int:
    command = [sys.executable, "-m", "bench.gpu", "--stage", record.stage]
    command += ["--out", str(record.folder), "--budget", str(seconds), "--attn", record.attn]
    command += ["--kernels", record.kernels or "xla"]
    command += ["--tiny"] if record.tiny else []
    environment = _environment(record.stage, tiny=record.tiny)
    with (record.folder / "errors.log").open("a") as errors:
        child = subprocess.Popen(command, stderr=errors, env=environment)
    try:
        return child.wait(seconds + 2)
    except subprocess.TimeoutExpired:
        child.kill()
    try:
        child.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        return 125  # it hangs in the driver; the next stage may still find the device
    return 124


def _environment(name: str, *, tiny: bool) -> dict[str, str]:
    """What is carried can be imported; XLA's flags for the stage. On a CPU Mosaic's interpreter needs
    threads to call back on, and XLA has as many as devices or cores, whichever are more."""
    environment = gpu_wheels.environment()
    claim_memory(environment)
    flags = [environment.get("XLA_FLAGS", "")]
    if tiny:
        flags.append("--xla_force_host_platform_device_count=8")
    elif name.endswith("_numerics"):
        flags.append("--xla_gpu_autotune_level=0")  # right or wrong needs no fastest product
    return environment | {"XLA_FLAGS": " ".join(flags).strip()}


def summary(lines: list[dict[str, Any]]) -> str:
    """One line a stage: figures, errors, seconds."""
    rows = []
    for name in STAGES:
        mine = [x for x in lines if x["stage"] == name]
        if not mine:
            continue
        end = next((x for x in reversed(mine) if x["name"] == "end"), {})
        bad = [x for x in mine if wrong(x)]
        figures = len([x for x in mine if x["name"] != "end"])
        rows.append(
            f"{name:16s} rc {end.get('rc', '?'):>4}  {end.get('seconds', 0):6.1f} s  "
            f"{figures:3d} figures  {len(bad):2d} wrong  {_lost(end)}{end.get('goal', '')}"
        )
    return "\n".join(["", "stage            result", *rows])


def _lost(end: dict[str, Any]) -> str:
    """The exit codes of processes that a case ended."""
    codes = ", ".join(map(str, end.get("lost", ())))
    return f"after processes that ended with {codes}  " if codes else ""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "bench/results/gpu"))
    parser.add_argument("--budget", type=float, default=530.0, help="seconds for everything")
    parser.add_argument("--only", type=_stages, help="stages, comma-separated, in this order")
    parser.add_argument("--resume", help="a gpu.jsonl whose whole stages are not run again")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument(
        "--attn",
        choices=ATTENTION,
        default="hopper",
        help="attention of whole steps and of serving",
    )
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default="hopper",
        help="of products with quantised weights in whole steps and stages gemm_*",
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = options().parse_args(argv)
    if args.stage:
        run_stage(args.stage, args)
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
