"""Rates at which one core multiplies by the native kernels: GB/s of stored weights, by kind of weights and rows.

    python -m bench.kernel_rates [--rows 1,4,16] [--calls 60] [--level LEVEL] [--json FILE]

Calls go to the library itself, in one thread, with weights that no cache holds, kinds in turns. A rate is that of the
fastest twelfth of calls of about a millisecond, so other work on the machine disturbs it little. ``gb_s`` counts the
numbers, ``all_gb_s`` scales and shifts too.
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
from jserve.native.library import KINDS as NUMBERS, LEVELS, installed

SHAPES = ((3072, 512), (4096, 2048), (2048, 8192))
"""(N, K) of a matrix."""
POOL_BYTES = 160 << 20
SCALES = 16 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """Weights by the library's name of them, and the bytes of one."""

    name: str
    n_bytes: float
    group: int = 0
    """Weights of a scale; 0: a row."""
    shifts: bool = False

    def scales(self, N: int, K: int) -> int:
        """Of a matrix [N, K]."""
        return 0 if self.name == "bf16" else N * (K // self.group if self.group else 1)


KINDS = {
    "bf16": Kind("bf16", 2),
    "int8": Kind("rounded", 1),
    "int8-weight-only": Kind("int8", 1),
    "int8 shifts g32": Kind("int8", 1, 32, True),
    "fp8": Kind("e4m3", 1),
    "int4": Kind("int4", 0.5, 128),
    "int4 g32": Kind("int4", 0.5, 32),
    "uint4 shifts g32": Kind("uint4", 0.5, 32, True),
    "e2m1 g32": Kind("e2m1", 0.5, 32),
    "e2m1 g16": Kind("e2m1", 0.5, 16),
}


def caller(
    kind: Kind, scales: np.ndarray, level: int, M: int, N: int, K: int
) -> Callable[[int, int], None]:
    """Multiplies M rows by the weights at an address, with the scales and shifts from one of ``scales`` on."""
    handle = installed().handle
    x = np.random.default_rng(0).standard_normal((M, K), np.float32)
    y = np.zeros((M, N), np.float32)
    x_at, y_at = (ctypes.c_void_p(a.ctypes.data) for a in (x, y))
    groups = ctypes.c_int64(K // kind.group if kind.group else 1)
    sizes = [ctypes.c_int64(n) for n in (M, N, K)]

    def call(at: int, first: int, kept: Any = (x, y, scales)) -> None:
        w, scale = ctypes.c_void_p(at), scales.ctypes.data + 4 * first
        if kind.name == "bf16":
            handle.jserve_run_product(level, x_at, w, y_at, *sizes, 0)
        else:
            shift = ctypes.c_void_p(scale + 4 * kind.scales(N, K)) if kind.shifts else None
            args = (x_at, w, ctypes.c_void_p(scale), None, shift, groups, y_at)
            handle.jserve_run_quantised(level, NUMBERS.index(kind.name), *args, *sizes, 0)

    return call


def measure(level: int, M: int, N: int, K: int, calls: int) -> list[dict[str, Any]]:
    """Lines of the record of one shape."""
    pool = np.random.default_rng(0).integers(0, 120, POOL_BYTES, np.uint8)
    scales = np.ones(SCALES, np.float32)
    run = {name: caller(kind, scales, level, M, N, K) for name, kind in KINDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for i in range(calls):
        for name, kind in KINDS.items():
            size, more = int(N * K * kind.n_bytes), kind.scales(N, K) * (1 + kind.shifts)
            at = pool.ctypes.data + i * size % (POOL_BYTES - size) // 4096 * 4096
            first = i * more % (SCALES - more) // 1024 * 1024
            begin = time.perf_counter()
            run[name](at, first)
            seconds[name].append(time.perf_counter() - begin)
    lines = []
    for name, kind in KINDS.items():
        best = float(np.percentile(seconds[name], 100 / 12))
        rate = round(N * K * kind.n_bytes / best / 1e9, 1)
        more = 4 * kind.scales(N, K) * (1 + kind.shifts)
        line = {"kind": name, "rows": M, "N": N, "K": K, "gb_s": rate}
        line["all_gb_s"] = round((N * K * kind.n_bytes + more) / best / 1e9, 1)
        lines.append(line | {"weights_g_s": round(N * K / best / 1e9, 1)})
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
