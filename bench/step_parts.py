"""Where the time of a step goes on a CPU: its parts, from a profile of the compiled program.

    python -m bench.step_parts [MODEL ...] [--kernels LEVEL] [--json FILE]

MODEL is a shape of ``bench.models`` or a directory with a config.json (default: the shipped model); weights are
random. The steps are those of the workloads of ``bench.serving``: one user, a chat mix with and without a prompt, a
shared prefix, a long prompt amid decoders. ``step_ms`` is the median of steps without the profiler; parts are
milliseconds of a profiled step, all layers together, on the thread that runs the program: what a kernel's helpers do
meanwhile is not added. ``limit_ms`` is the time in which both cores read the weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from bench import report
from bench.native import PAGE, config_of, drawn, read_gb_s
from bench.probe import record
from jserve.build import shipped
from jserve.model import native
from jserve.model.hand import Row, pack, step_model
from jserve.model.step import make_step
from jserve.model.view import Bucket
from jserve.runner.programs import compile_options
from jserve.runner.state import new_state

STEPS, PROFILED = 15, 5
NAMED = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata=\{[^}]*?op_name="([^"]*)"', re.MULTILINE
)
CALLED = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*custom_call_target="([^"]*)"', re.MULTILINE)
PARTS: tuple[str, ...] = ("products", "attention", "head", "sampling", "kv", "rest")
SHOWN = "{model:12} {step:32} {step_ms:8.2f} {limit_ms:8.2f}   "


@dataclass(frozen=True, slots=True)
class Case:
    """A step: so many sequences decode behind ``context`` tokens each, beside ``chunk`` prompt tokens that end at
    position ``prompt``."""

    name: str
    rows: int
    context: int
    chunk: int = 0
    prompt: int = 0


CASES = (
    Case("S1: 1 row, context 200", 1, 200),
    Case("S2: 16 rows, context 320", 16, 320),
    Case("S2: and a prompt of 200", 16, 320, 200, 200),
    Case("S3: 8 rows, context 1600", 8, 1600),
    Case("S3: and 60 behind a prefix", 8, 1600, 60, 1560),
    Case("S4: 8 rows and 504 of 4096", 8, 400, 504, 4096),
)


def part_of(op: str, target: str) -> str:
    """The part of ``PARTS`` that an instruction belongs to, by its ``op_name`` and what it calls."""
    if target.startswith("jserve.write"):
        return "kv"
    if "attention" in target:
        return "attention"
    if "/logits/" in op:
        return "head"
    if "/sample/" in op or "/advance/" in op:
        return "sampling"
    return "products" if target.startswith("jserve.") or "dot_general" in op else "rest"


def parts(text: str, trace: Path, n_steps: int) -> dict[str, float]:
    """Milliseconds of one step, by part."""
    ops, targets = dict(NAMED.findall(text)), dict(CALLED.findall(text))
    spent = dict.fromkeys(PARTS, 0.0)
    for name, nanoseconds in _events(trace):
        if name in ops or name in targets:
            spent[part_of(ops.get(name, ""), targets.get(name, ""))] += nanoseconds
    return {part: round(spent[part] / n_steps / 1e6, 3) for part in PARTS}


def _events(trace: Path) -> Iterator[tuple[str, float]]:
    """(instruction, nanoseconds) of whatever ran, those inside another one not counted again."""
    for file in trace.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                end = 0.0
                for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
                    if event.start_ns >= end and "hlo_op" in dict(event.stats):
                        end = event.start_ns + event.duration_ns
                        yield event.name, event.duration_ns


def measure(name: str, level: str) -> list[dict[str, Any]]:
    """A line for each of ``CASES`` that the model's positions allow."""
    lines = []
    for case in CASES:
        length = max(case.context, case.prompt)
        config = config_of(name)
        if config["max_position_embeddings"] < length:
            continue
        n = case.rows + bool(case.chunk)
        M = -(-length // PAGE)
        made = step_model(
            config,
            slots=max(2, n),
            row_pages=M,
            page_size=PAGE,
            dtype=jnp.bfloat16,
            attention="native" if native.has_attention(level) else "xla",
        )
        model = dataclasses.replace(made, kernels=level)
        params = drawn(model.abstract_params())
        pages = [list(range(1 + r * M, 1 + (r + 1) * M)) for r in range(n)]
        decode = [Row(pages[r], case.context - 1, [5 + r]) for r in range(case.rows)]
        ids = [5 + i % 1000 for i in range(case.chunk)]
        prefill = [Row(pages[-1], case.prompt - case.chunk, ids)] if case.chunk else []
        bucket = Bucket(D=max(2, case.rows), P=_up(case.chunk), F=len(prefill))
        buf = pack(bucket, model.dims, model.backend, decode, prefill)
        held = [new_state(model)]
        lowered = jax.jit(make_step(model, bucket), donate_argnums=1).lower(params, held[0], buf)
        step = lowered.compile(compile_options("cpu"))

        def run(step: Any = step, params: Any = params, held: Any = held, buf: Any = buf) -> float:
            begin = time.perf_counter()
            held[0], out = step(params, held[0], buf)
            jax.block_until_ready(out.packed_RX)
            return time.perf_counter() - begin

        run()
        seconds = statistics.median(run() for _ in range(STEPS))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(PROFILED):
                    run()
            found = parts(step.as_text() or "", Path(folder), PROFILED)
        n_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
        about = {"model": Path(name).name, "step": case.name, "step_ms": round(seconds * 1e3, 3)}
        line = {**about, "limit_ms": round(n_bytes / read_gb_s() / 1e6, 3), "parts_ms": found}
        lines.append(line)
        print(SHOWN.format(**line), found, flush=True)
    return lines


def _up(tokens: int) -> int:
    return -(-tokens // 32) * 32


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="bench.step_parts", description=(__doc__ or "").split("\n\n")[0]
    )
    p.add_argument("models", nargs="*", default=[str(shipped())])
    p.add_argument("--kernels", default="", help="level; default the best there is")
    p.add_argument("--json", type=Path, help="result file to write")
    args = p.parse_args(argv)
    level, why = native.available("cpu", jnp.bfloat16, level=args.kernels)
    if not level:
        p.error(why)
    lines = [line for name in args.models for line in measure(name, level)]
    if args.json:
        report.write(record("step-parts", {"kernels": level}, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
