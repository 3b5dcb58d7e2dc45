"""Rates at which one core multiplies by the native kernels: GB/s of stored weights, by kind of weights and rows.

    python -m bench.kernel_rates [--rows 1,4,16] [--calls 60] [--level LEVEL] [--json FILE]

Calls go to the library itself, in one thread, with weights that no cache holds, kinds in turns. A rate is that of the
fastest twelfth of calls of about a millisecond, so other work on the machine disturbs it little.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.probe import record
from jserve.native.library import LEVELS, installed

SHAPES = ((3072, 512), (4096, 2048), (2048, 8192))
"""(N, K) of a matrix."""
POOL_BYTES = 160 << 20
GROUP = 128


@dataclass(frozen=True, slots=True)
class Kind:
    """Weights as the library numbers them, and their bytes."""

    number: int
    n_bytes: float
    grouped: bool = False


KINDS = {
    "bf16": Kind(0, 2),
    "int8": Kind(4, 1),
    "int8-weight-only": Kind(1, 1),
    "fp8": Kind(3, 1),
    "int4": Kind(2, 0.5, grouped=True),
}


def caller(kind: Kind, level: int, M: int, N: int, K: int) -> Callable[[int], None]:
    """Multiplies M rows by the weights at an address."""
    handle = installed().handle
    x = np.random.default_rng(0).standard_normal((M, K), np.float32)
    y, scale = np.zeros((M, N), np.float32), np.ones((N, K // GROUP), np.float32)
    x_at, y_at, scale_at = (ctypes.c_void_p(a.ctypes.data) for a in (x, y, scale))
    groups = ctypes.c_int64(K // GROUP if kind.grouped else 1)
    sizes = [ctypes.c_int64(n) for n in (M, N, K)]

    def call(at: int, kept: Any = (x, y, scale)) -> None:
        w = ctypes.c_void_p(at)
        if kind.number == 0:
            handle.jserve_run_product(level, x_at, w, y_at, *sizes, 0)
        else:
            args = (x_at, w, scale_at, None, groups, y_at)
            handle.jserve_run_quantised(level, kind.number, *args, *sizes, 0)

    return call


def measure(level: int, M: int, N: int, K: int, calls: int) -> list[dict[str, Any]]:
    """Lines of the record of one shape."""
    pool = np.random.default_rng(0).integers(0, 120, POOL_BYTES, np.uint8)
    run = {name: caller(kind, level, M, N, K) for name, kind in KINDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for i in range(calls):
        for name, kind in KINDS.items():
            size = int(N * K * kind.n_bytes)
            at = pool.ctypes.data + i * size % (POOL_BYTES - size) // 4096 * 4096
            begin = time.perf_counter()
            run[name](at)
            seconds[name].append(time.perf_counter() - begin)
    lines = []
    for name, kind in KINDS.items():
        best = float(np.percentile(seconds[name], 100 / 12))
        rate = round(N * K * kind.n_bytes / best / 1e9, 1)
        line = {"kind": name, "rows": M, "N": N, "K": K, "gb_s": rate}
        lines.append(line | {"weights_g_s": round(rate / kind.n_bytes, 1)})
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_rates", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", default="1,4,16", help="numbers of rows (1,4,16)")
    parser.add_argument("--calls", type=int, default=60, help="calls of each kind (60)")
    parser.add_argument("--level", default=installed().level, help="a level of the kernels")
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    level, lines = LEVELS.index(args.level), []
    for M in (int(n) for n in args.rows.split(",")):
        for N, K in SHAPES:
            found = measure(level, M, N, K, args.calls)
            rates = "  ".join(f"{line['kind']} {line['gb_s']}" for line in found)
            print(f"{M:4d} rows  [{N}, {K}]  {rates}", flush=True)
            lines += found
    if args.json is not None:
        options = {"level": args.level, "calls": args.calls}
        report.write(record("kernel_rates", options, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
