"""Native CPU kernels beside XLA: products alone and whole decode steps, in turns in one process.

    python -m bench.native [MODEL ...] [--rows 1,4,16,64] [--context 320] [--level LEVEL] [--json FILE]
    python -m bench.native --compile [--json FILE]

MODEL is a shape of ``bench.models`` or a directory with a config.json (default: the shipped model); weights are
random. A turn runs one call of either side, A B A B; ratios are medians over turns of XLA's time over the kernels'.
Lines: products alone; whole decode steps; steps whose attention alone is XLA's or the kernels'; a chunk of prefill at
the end of one sequence, likewise.
GB/s counts each weight once, beside what reading memory alone reaches.

``--compile`` measures what the kernels add to an installation instead: seconds, and those of processors, in which each
compiler of this machine makes the library, and zig where the package is installed, with nothing of earlier runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import report
from bench.models import SHAPES, config_json
from bench.probe import record, usable_cores
from jserve.build import SHIPPED, shipped
from jserve.model import native
from jserve.model.attention import backend
from jserve.model.dot import dot, gate_up
from jserve.model.hand import Row, pack, step_model
from jserve.model.step import StepModel, make_step
from jserve.model.view import Bucket
from jserve.native.compile import COMPILERS, compile_library, zig, zig_platform
from jserve.runner.state import new_state

PAGE = 32
CHUNK = 256
"""Prefill tokens of a step."""
Call = Callable[[], Any]
SHOWN = (
    "{model:12} {what:9} {rows:4d} {xla_ms:10.2f} {native_ms:10.2f} {ratio:6.2f}"
    " {native_gb_s:7.1f} {read_gb_s:7.1f}"
)


def read_gb_s(
    mib: int = 256, repeats: int = 5, of: Callable[[Sequence[float]], float] = min
) -> float:
    """GB/s at which all cores together read memory: the best of ``repeats`` runs, or ``of`` their seconds."""
    parts = [
        np.ones(mib * (1 << 20) // 4 // len(usable_cores()), np.float32) for _ in usable_cores()
    ]
    seconds = []
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - begin)
    return sum(p.nbytes for p in parts) / of(seconds[1:]) / 1e9


def drawn(tree: Any) -> Any:
    """Random bfloat16 arrays of the shapes in ``tree``, small enough that activations stay finite."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(1 << 20, np.float32)

    def draw(x: Any) -> jax.Array:
        values = (
            np.resize(pool, x.shape) * x.shape[-1] ** -0.5 if len(x.shape) > 1 else np.ones(x.shape)
        )
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(draw, tree)


def in_turns(xla: Call, ours: Call, turns: int, n_bytes: int = 0) -> dict[str, float]:
    """Median milliseconds of either call, and the median ratio of a turn.

    Args:
        n_bytes: what ``ours`` reads at least; a turn then reads memory alone too, and ``of_read`` is the median over
            turns of the call's rate over that.
    """
    times: list[tuple[float, float]] = []
    shares: list[float] = []
    for _ in range(turns + 1):
        pair = []
        for call in (xla, ours):
            begin = time.perf_counter()
            jax.block_until_ready(call())
            pair.append(time.perf_counter() - begin)
        times.append((pair[0], pair[1]))
        if n_bytes:
            shares.append(n_bytes / pair[1] / 1e9 / read_gb_s(of=statistics.median))
    kept = times[1:]
    found = {
        "xla_ms": round(statistics.median(a for a, _ in kept) * 1e3, 3),
        "native_ms": round(statistics.median(b for _, b in kept) * 1e3, 3),
        "ratio": round(statistics.median(a / b for a, b in kept), 2),
    }
    return found | ({"of_read": round(statistics.median(shares[1:]), 2)} if n_bytes else {})


def products(params: Any, rows: int, level: str) -> tuple[Call, Call]:
    """All products of a model one after the other, by XLA and by the kernels."""
    layers, head = params["layers"], params.get("unembed", params["embed"])
    x_TD = jnp.asarray(
        np.random.default_rng(rows).standard_normal((rows, head.shape[1])), jnp.float32
    )

    def run(x: jax.Array, layers: Any, head: jax.Array) -> jax.Array:
        for p in layers:
            y = dot(dot(x, p["qkv"])[:, : p["o"].shape[1]], p["o"])
            x = x + 0.1 * dot(gate_up(y, p["gate_up"]), p["down"])
        return dot(x, head)

    def call(level: str) -> Call:
        with native.kernels(level):
            compiled = jax.jit(run).lower(x_TD, layers, head).compile()
        return lambda: compiled(x_TD, layers, head)

    return call(""), call(level)


def steps(
    model: StepModel,
    params: Any,
    rows: int,
    context: int,
    level: str,
    *,
    attention: str = "",
    chunk: int = 0,
) -> Call:
    """Whole decode steps of ``rows`` sequences of ``context`` tokens, with kernels of ``level``; empty: by XLA.

    Args:
        attention: "xla" or "native"; by default native where the level has one.
        chunk: prefill so many last tokens of one such sequence instead.
    """
    attention = attention or ("native" if native.has_attention(level) else "xla")
    model = dataclasses.replace(model, kernels=level, backend=backend(attention))
    M = model.dims.M
    pages = [list(range(1 + r * M, 1 + (r + 1) * M)) for r in range(rows)]
    if chunk:
        bucket = Bucket(D=2, P=chunk, F=1)
        prefill = [Row(pages[0], context - chunk, [5 + i for i in range(chunk)])]
        buf = pack(bucket, model.dims, model.backend, [], prefill)
    else:
        bucket = Bucket(D=max(2, rows), P=0, F=0)
        tokens = [Row(pages[r], context - 1, [5 + r]) for r in range(rows)]
        buf = pack(bucket, model.dims, model.backend, tokens, [])
    held = [new_state(model)]
    step = jax.jit(make_step(model, bucket), donate_argnums=1)
    compiled = step.lower(params, held[0], buf).compile()

    def run() -> Any:
        held[0], out = compiled(params, held[0], buf)
        return out.packed_RX

    return run


def _either(
    model: StepModel,
    params: Any,
    rows: int,
    context: int,
    levels: tuple[str, str],
    *,
    attention: bool = False,
    chunk: int = 0,
) -> tuple[Call, Call]:
    """Steps by XLA and by kernels; ``attention``: of steps that differ in their attention alone."""
    names = ("xla", "native") if attention else ("", "")
    both = zip(levels, names, strict=True)
    first, second = (
        steps(model, params, rows, context, level, attention=name, chunk=chunk)
        for level, name in both
    )
    return first, second


def config_of(name: str) -> dict[str, Any]:
    if name in SHAPES:
        return config_json(SHAPES[name])
    return json.loads((Path(name) / "config.json").read_text())


def measure(
    name: str, rows: Sequence[int], context: int, level: str, turns: int
) -> list[dict[str, Any]]:
    """Lines of the record of one model."""
    most, pages = max(rows), -(-context // PAGE)
    model = step_model(
        config_of(name),
        slots=max(2, most),
        row_pages=pages,
        page_size=PAGE,
        dtype=jnp.bfloat16,
    )
    params = drawn(model.abstract_params())
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    lines = []
    for n in rows:
        cases = [("products", products(params, n, level))]
        cases.append(("step", _either(model, params, n, context, ("", level))))
        if native.has_attention(level):
            one = _either(model, params, n, context, (level, level), attention=True)
            cases.append(("attention", one))
        if n == rows[0] and context > CHUNK:
            for what, levels in (("chunk", ("", level)), ("chunk attn", (level, level))):
                attention = what != "chunk"
                one = _either(model, params, n, context, levels, attention=attention, chunk=CHUNK)
                cases.append((what, one))
        for what, calls in cases:
            about = {
                "model": Path(name).name,
                "what": what,
                "rows": n,
                "read_gb_s": round(read_gb_s(), 1),
            }
            line = about | in_turns(*calls, turns, n_bytes if n == 1 and "chunk" not in what else 0)
            line["native_gb_s"] = round(n_bytes / line["native_ms"] / 1e6, 1)
            lines.append(line)
            print(SHOWN.format(**line), line.get("of_read", ""), flush=True)
    return lines


def compilers() -> dict[str, list[str]]:
    """Commands by name; of names for one file the first."""
    paths = {name: path for name in reversed(COMPILERS) if (path := shutil.which(name))}
    names = {os.path.realpath(path): name for name, path in paths.items()}
    found = {name: [paths[name]] for name in names.values()}
    here = zig_platform()
    return found | ({"zig": zig(here)} if here and importlib.util.find_spec("ziglang") else {})


def compile_times(turns: int) -> list[dict[str, Any]]:
    """Lines of the record: every compiler, one after the other, ``turns`` times."""
    lines = []
    for _ in range(turns):
        for name, command in compilers().items():
            with tempfile.TemporaryDirectory(prefix="bench-native-") as folder:
                os.environ |= {f"ZIG_{which}_CACHE_DIR": folder for which in ("LOCAL", "GLOBAL")}
                before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
                compile_library(Path(folder) / "libjserve.so", command)
                seconds = time.perf_counter() - begin
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            line = {"what": "compile", "compiler": name, "s": round(seconds, 1)}
            lines.append(line | {"cpu_s": round(used, 1)})
            print(lines[-1], flush=True)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.native", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="*", default=[str(shipped(SHIPPED))], metavar="MODEL")
    parser.add_argument("--rows", default="1,4,16,64", help="numbers of rows (1,4,16,64)")
    parser.add_argument("--context", type=int, default=320, help="tokens of each sequence (320)")
    parser.add_argument("--level", default="", help="a lower level of the kernels")
    parser.add_argument(
        "--turns", type=int, default=0, help="calls of either side (15), or of each compiler (3)"
    )
    parser.add_argument("--compile", action="store_true", help="time compilers instead")
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    turns = args.turns or (3 if args.compile else 15)
    if args.compile:
        options, lines = {"turns": turns}, compile_times(turns)
        if args.json is not None:
            report.write(record("native-compile", options, lines), args.json)
        return 0
    rows = [int(n) for n in args.rows.split(",")]
    level, reason = native.available("cpu", jnp.bfloat16, level=args.level)
    if not level:
        parser.error(f"there are no kernels: {reason}")
    print(
        "model        what      rows     XLA ms  native ms  ratio    GB/s    read   share",
        flush=True,
    )
    lines = [
        line for name in args.models for line in measure(name, rows, args.context, level, turns)
    ]
    if args.json is not None:
        options = {"level": level, "context": args.context, "turns": turns}
        report.write(record("native", options, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
