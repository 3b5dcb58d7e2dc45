"""Stage of ``bench.gpu``: what the machine is and what it can do at most.

It owns the device's ceilings: bandwidth, matrix rate, the cost of a dispatch. All shares of other stages refer to
the bandwidth measured here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from bench.dispatch import call_us
from bench.gpu_record import Record


def facts(record: Record) -> None:
    """What the machine is and what it can do at most."""
    device = jax.devices()[0]
    versions = {n: _version(n) for n in ("jax", "jaxlib", "jax-cuda13-plugin", "torch")}
    record.add("device", kind=device.device_kind, platform=device.platform, **versions)
    n = 2**20 if record.tiny else 2**33
    record.attempt("read bandwidth", functools.partial(_read, n))
    record.attempt("copy bandwidth", functools.partial(_copy, n))
    for dtype in ("bfloat16", "float8_e4m3fn", "int8"):
        side = 128 if record.tiny else 8192
        record.attempt(f"matmul {dtype}", functools.partial(_matmul, side, jnp.dtype(dtype)))
    for rows in (1, 8, 64, 256):
        shape = (rows, 256, 512) if record.tiny else (rows, 4096, 28672)
        record.attempt(f"skinny matmul {rows}", functools.partial(_skinny, *shape))
    for n_kept, n_donated in ((2, 1), (24, 8), (98, 38), (194, 70)):
        repeats = 3 if record.tiny else 300
        measure = functools.partial(_dispatch, n_kept, n_donated, repeats)
        record.attempt(f"dispatch of {n_kept} + {n_donated} arrays", measure)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def timed(fn: Any, *args: Any, repeats: int = 10) -> float:
    """Median seconds of a call, results waited for."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _random(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.jit(
        lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16).astype(dtype)
    )()


def _read(n_bytes: int) -> dict[str, float]:
    """The better of two reductions, since XLA may stay below the memory's rate in either."""
    x = _random(n_bytes // 2 // 1024, 1024)
    ways = {"max": lambda a: jnp.max(a, axis=1), "sum": _sum_words}
    spent = {f"{way}_s": timed(jax.jit(reduce), x) for way, reduce in ways.items()}
    return {"bytes_per_s": n_bytes / min(spent.values()), **spent}


def _sum_words(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.bitcast_convert_type(x.reshape(-1, 512, 2), jnp.uint32), axis=1)


def _copy(n_bytes: int) -> dict[str, float]:
    x = _random(n_bytes // 4 // 1024, 1024)
    spent = timed(jax.jit(lambda a: a + jnp.bfloat16(1)), x)
    return {"bytes_per_s": n_bytes / spent, "seconds": spent}


def _matmul(side: int, dtype: Any) -> dict[str, float]:
    a, b = _random(side, side, dtype=dtype), _random(side, side, dtype=dtype)
    wide = jnp.int32 if dtype == jnp.int8 else jnp.bfloat16

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(a, b, dims, preferred_element_type=wide)

    spent = timed(jax.jit(product), a, b)
    return {"tflops": 2 * side**3 / spent / 1e12, "seconds": spent}


def _skinny(rows: int, K: int, N: int) -> dict[str, float]:
    """A decode step's kind of product; eight weights in turn, so that none is in the L2."""
    x, weights = _random(max(rows, 2), K), [_random(N, K) for _ in range(8)]

    def chain(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
            x = x + y[:, :K] * jnp.bfloat16(1e-3)
        return x

    spent = timed(jax.jit(chain), x, weights) / 8
    return {"us": spent * 1e6, "bytes_per_s": N * K * 2 / spent}


def _dispatch(n_kept: int, n_donated: int, repeats: int) -> dict[str, float]:
    return {"us": call_us(n_kept, n_donated, put=False, repeats=repeats)}
