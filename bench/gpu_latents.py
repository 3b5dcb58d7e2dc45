"""Stages of ``bench.gpu``: the kernels of latent attention, right or wrong, and beside the limits.

It owns random latents over poisoned pools and the bytes and flops that times are held against: of each row's latents
once, whatever heads share them, and 2 (C + A) flops a head, query and latent.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_kernels import (
    EVEN_LOADS,
    L2_BYTES,
    PEAK_BF16,
    READ_BANDWIDTH,
    Pools,
    Shape,
    Span,
    chained,
    compare,
    pools,
    queries,
    seconds,
)
from bench.gpu_record import Record
from pallas_kernels.launch import interpreter
from pallas_kernels.mla_attention import LatentPages, LatentSpec, mla_attention, mla_chunks, ref
from pallas_kernels.spec import Chunks, Rows


class Latents(NamedTuple):
    """Heads of one device over latents of A + Y numbers."""

    N: int
    A: int = 512
    Y: int = 64
    Z: int = 64

    @property
    def C(self) -> int:
        return self.A + self.Y

    @property
    def pool(self) -> Shape:
        """One array of this shape is keys and values."""
        return Shape(1, self.N, self.C, self.Z)


LAYERS = {"16 heads": Latents(16), "128 heads": Latents(128)}
"""DeepSeek-V2-Lite, or V3 on eight devices; V3 on one."""
TINY = Latents(2, 128, 64, 16)
COMPUTED = 64
"""Above so many heads products are the limit, not bytes."""
PROVED = {"register_p": False, "stages": 1}
"""The form that the interpreter runs; its weights leave room for one block."""
SMALL = {"register_p": False, "sms": 4}


def _spec(layer: Latents, tune: dict[str, Any], tiny: bool) -> LatentSpec:
    interpret = interpreter() if tiny else None
    return LatentSpec(rank=layer.A, scale=layer.C**-0.5, tune=tune, interpret=interpret)


def _pages(p: Pools) -> LatentPages:
    return LatentPages(p.layer.keys_PKZH[:, 0], p.table)


def _rows_call(layer: Latents, tune: dict[str, Any], tiny: bool) -> Any:
    """(q_DJNC, pools) -> float32[D, J, N, A]"""
    spec = _spec(layer, tune, tiny)
    return lambda q, p: mla_attention(q, _pages(p), Rows(p.start, p.length), spec)


def _chunks_call(layer: Latents, tune: dict[str, Any], tiny: bool) -> Any:
    """(q_PNC, pools) -> [P, N, A]"""
    spec = _spec(layer, tune, tiny)
    return lambda q, p: mla_chunks(q, _pages(p), Chunks(p.first, p.start, p.count), spec)


def mla_numerics(record: Record) -> None:
    """Rows ragged and skewed, and chunks of all kinds, in the form that the interpreter proves and in the fast one."""
    tiny = record.tiny
    long, many = (70, 1) if tiny else (4000, 40)
    lengths = np.random.default_rng(time.time_ns()).integers(1, long, many)
    spans = [(0, 1), (63, 1), (64, 1), (0, 0), (long, 1), *((int(n), 1) for n in lengths)]
    chunks = [(63, 2), (0, 0), (1, 12)]
    if not tiny:
        chunks += [(0, 600), (1500, 333), (64, 128), (999, 1)]
    cases: list[tuple[str, Latents, int, dict[str, Any]]] = [
        ("16 heads, shared memory form", LAYERS["16 heads"], 1, PROVED),
        ("16 heads, register form", LAYERS["16 heads"], 1, {}),
        ("128 heads", LAYERS["128 heads"], 1, {}),
        ("16 heads, verify of 4", LAYERS["16 heads"], 4, {}),
        ("20 heads, small pages", Latents(20, Z=16), 1, {}),
        ("32 heads, pages of 128", Latents(32, Z=128), 2, {}),
        ("16 heads of 384", Latents(16, 384), 1, {}),
    ]
    for name, layer, J, tune in cases[:1] if tiny else cases:
        layer, tune = (TINY, SMALL) if tiny else (layer, tune)
        rows = [(s, min(J, 1 + s % J) if c else 0) for s, c in spans]
        record.attempt(f"rows, {name}", functools.partial(_check_rows, rows, layer, J, tune, tiny))
        check = functools.partial(_check_chunks, chunks, layer, tune, tiny)
        if J == 1:
            record.attempt(f"chunks, {name}", check)


def _check_rows(
    spans: Sequence[Span], layer: Latents, J: int, tune: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    seed = time.time_ns() % 2**31
    p = pools(spans, layer.pool, seed, poison=True)
    q = queries(seed, len(spans), J, layer.N, layer.C)
    call = jax.jit(_rows_call(layer, tune, tiny))
    with jax.default_matmul_precision("highest"):
        want = [
            ref.mla_attention(
                q[r : r + 1],
                _pages(p)._replace(table_RM=p.table[r : r + 1]),
                Rows(p.start[r : r + 1], p.length[r : r + 1]),
                _spec(layer, tune, tiny),
            )
            for r in range(len(spans))
        ]
    keep = np.arange(J) < np.asarray(p.count)[:, None]
    return compare(lambda: call(q, p), np.concatenate(want), keep, tiny=tiny)


def _check_chunks(
    spans: Sequence[Span], layer: Latents, tune: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    seed = time.time_ns() % 2**31
    p = pools(spans, layer.pool, seed, poison=True)
    P = sum(c for _, c in spans) + 5
    q = queries(seed, P, layer.N, layer.C).at[P - 5 :].set(jnp.nan)
    call = jax.jit(_chunks_call(layer, tune, tiny))
    want = np.zeros((P, layer.N, layer.A), np.float32)
    with jax.default_matmul_precision("highest"):
        for r, (first, n) in enumerate(zip(p.first, p.count, strict=True)):
            for t in range(int(first), int(first + n), REFERENCE_TOKENS):
                some = min(REFERENCE_TOKENS, int(first + n) - t)
                chunk = (
                    jnp.zeros(1, jnp.int32),
                    p.start[r : r + 1] + (t - first),
                    jnp.full(1, some),
                )
                pages = _pages(p)._replace(table_RM=p.table[r : r + 1])
                want[t : t + some] = ref.mla_chunks(
                    q[t : t + some], pages, Chunks(*chunk), _spec(layer, tune, tiny)
                )
    return compare(lambda: call(q, p), want, slice(0, P - 5), tiny=tiny)


REFERENCE_TOKENS = 16
"""Of a chunk at a time: the reference gathers all latents for each."""


def mla_times(record: Record) -> None:
    """Share of the read bandwidth at few heads, TFLOP/s at many, and chunks."""
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    layers = {"tiny": TINY} if record.tiny else LAYERS
    for (name, layer), (load, spans) in itertools.product(layers.items(), _loads(record).items()):
        measure = functools.partial(_time_rows, spans, layer, {}, record.tiny, limit)
        record.attempt(f"rows, {name}, {load}", measure)
    for (name, layer), (load, spans) in itertools.product(layers.items(), _prompts(record).items()):
        measure = functools.partial(_time_chunks, spans, layer, {}, record.tiny)
        record.attempt(f"chunks, {name}, {load}", measure)


def mla_tune(record: Record) -> None:
    """The fewest blocks of a split, for tune.json."""
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    layers = {"tiny": TINY} if record.tiny else LAYERS
    loads = list(_loads(record).items())[: 1 if record.tiny else 3]
    for (name, layer), (load, spans), floor in itertools.product(
        layers.items(), loads, (2,) if record.tiny else (1, 2, 4)
    ):
        tune = {"split_blocks": floor}
        measure = functools.partial(_time_rows, spans, layer, tune, record.tiny, limit)
        record.attempt(f"{name}, {load}, splits of {floor} blocks or more", measure)


def _loads(record: Record) -> dict[str, list[Span]]:
    return {"2 x 70": [(69, 1)] * 2} if record.tiny else EVEN_LOADS


def _prompts(record: Record) -> dict[str, list[Span]]:
    if record.tiny:
        return {"1 x 40": [(0, 40)]}
    return {
        "1 x 2k": [(0, 2048)],
        "512 after 8k": [(8192, 512)],
        "8 x 64 after 2k": [(2048, 64)] * 8,
    }


def _time_rows(
    spans: Sequence[Span], layer: Latents, tune: dict[str, Any], tiny: bool, limit: float
) -> dict[str, Any]:
    n_latents = sum(s + c for s, c in spans)
    n_bytes, flops = n_latents * layer.C * 2, 2.0 * n_latents * layer.N * (layer.C + layer.A)
    copies = 1 if tiny else max(1, min(8, 4 * L2_BYTES // n_bytes))
    p = pools(spans, layer.pool, 3, copies=copies)
    q = queries(3, len(spans), 1, layer.N, layer.C)
    call, calls = _rows_call(layer, {**tune, **(SMALL if tiny else {})}, tiny), 1 if tiny else 8
    chain = chained(_as_queries(call, layer), calls, copies)
    spent = seconds(chain, (q, p), calls, 1 if tiny else 7)
    if layer.N > COMPUTED:
        return {
            "us": spent * 1e6,
            "tflops": flops / spent / 1e12,
            "share": flops / spent / PEAK_BF16,
        }
    return {"us": spent * 1e6, "bytes_per_s": n_bytes / spent, "share": n_bytes / spent / limit}


def _time_chunks(
    spans: Sequence[Span], layer: Latents, tune: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    pairs = sum(c * s + c * (c + 1) / 2 for s, c in spans)
    p = pools(spans, layer.pool, 5)
    q = queries(5, sum(c for _, c in spans), layer.N, layer.C)
    call, calls = _chunks_call(layer, {**tune, **(SMALL if tiny else {})}, tiny), 1 if tiny else 4
    chain = chained(_as_queries(call, layer), calls, 1)
    spent = seconds(chain, (q, p), calls, 1 if tiny else 7)
    rate = 2.0 * pairs * layer.N * (layer.C + layer.A) / spent
    return {"us": spent * 1e6, "tflops": rate / 1e12, "share": rate / PEAK_BF16}


def _as_queries(call: Any, layer: Latents) -> Any:
    """``call`` with results as wide as queries, so that the next ones can depend on them."""

    def wide(q: jax.Array, p: Pools) -> jax.Array:
        out = call(q, p)
        return jnp.pad(out, ((0, 0),) * (out.ndim - 1) + ((0, layer.Y),))

    return wide
