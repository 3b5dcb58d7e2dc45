"""Stages of ``bench.gpu``: the attention kernels, right or wrong and fast or slow.

It owns random inputs over poisoned pools, the comparison with the float32 references, timing by chains of dependent
calls in one program, and the bytes and flops that times are held against. Numerics come as ``rel`` = |out - ref| /
|ref| over all rows, and as ``stable``: twenty runs on the same inputs agree bit for bit (a moving error is a race).
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_record import Record
from jserve.model.kv_apart import BEHIND, read_by_kernels
from jserve.model.kv_bytes import encode
from pallas_kernels.launch import interpreter
from pallas_kernels.paged_attention import Tree, paged_attention, ref as paged_ref
from pallas_kernels.ragged_prefill import ragged_prefill, ref as prefill_ref
from pallas_kernels.spec import AttentionSpec, Chunks, Pages, Rows

READ_BANDWIDTH = 4.3e12
PEAK_BF16 = 780e12
L2_BYTES = 60 * 2**20
Span = tuple[int, int]
"""(start, count) of a row."""


class Shape(NamedTuple):
    """Heads of one layer on one device, and how their KV is stored."""

    K: int
    G: int
    H: int
    Z: int = 64
    dtype: Any = jnp.bfloat16

    @property
    def vector_bytes(self) -> int:
        """Of a key or a value, with the scale of int8."""
        scale = BEHIND if self.dtype == I8 else 0
        return self.H * jnp.dtype(self.dtype).itemsize + scale


F8, I8 = jnp.float8_e4m3fn, jnp.int8
SHAPES = {
    "1b": Shape(8, 4, 64),
    "8b": Shape(8, 4, 128),
    "8b tp8": Shape(1, 4, 128),
    "1b, 8 bits": Shape(8, 4, 64, dtype=F8),
    "8b, 8 bits": Shape(8, 4, 128, dtype=F8),
    "1b, int8": Shape(8, 4, 64, dtype=I8),
    "8b, int8": Shape(8, 4, 128, dtype=I8),
}
TREE = Tree.of((-1, *((j - 1) // 2 for j in range(1, 16))))
LEVEL = Tree(((True, False, True, False), (True, True, False, True)), (0, 1, 1, 2))
"""Two tokens of a drafter's pass, and what it ran on before them."""


class Pools(NamedTuple):
    layer: Pages
    """Without a table."""
    table: jax.Array
    start: jax.Array
    length: jax.Array
    count: jax.Array
    first: jax.Array
    stride: jax.Array
    """Pages from one copy of the rows to the next."""

    @property
    def pages(self) -> Pages:
        return self.layer._replace(table_RM=self.table)


def pools(
    spans: Sequence[Span], shape: Shape, seed: int, *, poison: bool = False, copies: int = 1
) -> Pools:
    """Rows on random pages; with ``poison`` all that no row may see is NaN (of int8, its scale). ``copies`` of the
    rows lie in the pool, other values each."""
    rng = np.random.default_rng(seed)
    start = np.array([s if c else 0 for s, c in spans], np.int32)
    count = np.array([c for _, c in spans], np.int32)
    length = np.where(count > 0, start + count, 0).astype(np.int32)
    n_pages = -(-length // shape.Z)
    P, M = int(n_pages.sum()) + 1, max(int(n_pages.max()), 1)
    ids = rng.permutation(P - 1).astype(np.int32) + 1
    table = np.zeros((len(spans), M), np.int32)
    used = np.zeros((P, shape.Z), bool)
    for r, (n, end) in enumerate(zip(n_pages, np.cumsum(n_pages), strict=True)):
        table[r, :n] = ids[end - n : end]
        used[table[r, :n]] = np.arange(n * shape.Z).reshape(n, shape.Z) < length[r]
    seen = jnp.asarray(used)[:, None, :, None] if poison else True

    @jax.jit
    def draw(key: jax.Array) -> Pages:
        lead = (copies * P, shape.K, shape.Z)
        k, v = jax.random.normal(key, (2, *lead, shape.H), jnp.bfloat16)
        k, v = (jnp.where(seen, x, jnp.nan) for x in (k, v))
        if shape.dtype != I8:
            return Pages(k.astype(shape.dtype), v.astype(shape.dtype), None)
        vectors = (encode(x, shape.vector_bytes) for x in (k, v))
        parts = [part for x in vectors for part in jnp.split(x, [shape.H], axis=-1)]
        return read_by_kernels(tuple(parts), shape.H)

    first = np.cumsum(np.concatenate([[0], count[:-1]])).astype(np.int32)
    arrays = (table, start, length, count, first, np.int32(P))
    return Pools(draw(jax.random.key(seed)), *map(jnp.asarray, arrays))


def queries(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed + 77), shape, jnp.bfloat16)


def relative(got: Any, want: Any) -> float:
    x, y = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))


def poison_free_memory(n_bytes: int) -> None:
    """Leave NaN in memory that the next outputs are likely to be given."""
    jnp.full(n_bytes // 4, jnp.nan, jnp.float32).block_until_ready()


def compare(call: Callable[[], jax.Array], want: Any, keep: Any, *, tiny: bool) -> dict:
    """Numerics of one call; ``keep`` selects what must agree."""
    poison_free_memory(2**20 if tiny else 2**31)
    first = np.asarray(call())
    rel = relative(first[keep], np.asarray(want)[keep])
    again = 1 if tiny else 20
    stable = all(np.array_equal(first, np.asarray(call()), equal_nan=True) for _ in range(again))
    return {"rel": rel, "stable": stable, "ok": bool(rel < 1e-2 and stable)}


def seconds(
    chain: Callable[..., Any],
    args: tuple,
    calls: int,
    repeats: int = 7,
    options: dict[str, Any] | None = None,
) -> float:
    """Median seconds of one call of a chain of ``calls`` dependent calls, compiled with these options of XLA."""
    compiled = jax.jit(chain).lower(*args).compile(options)
    for _ in range(3):
        jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / calls


def chained(call: Callable[..., jax.Array], calls: int, copies: int) -> Any:
    """``calls`` calls, each one's queries a little of the last one's output: one CUDA graph. Each
    reads the next copy of the rows, so that a small load is not in the L2 either."""

    def chain(q: jax.Array, p: Pools) -> jax.Array:
        for i in range(calls):
            at = p._replace(table=p.table + i % copies * p.stride)
            q = q + (call(q, at) * 1e-3).astype(q.dtype)
        return q

    return chain


def spec_of(
    q: jax.Array, variant: dict[str, Any], tune: dict[str, Any] | None = None, interpret: Any = None
) -> AttentionSpec:
    """Of a case; a tree of its ``variant`` is no part of it."""
    static = {name: x for name, x in variant.items() if name != "tree"}
    return AttentionSpec(scale=q.shape[-1] ** -0.5, tune=tune, interpret=interpret, **static)


# --- decode


def _decode_call(J: int, tune: dict[str, Any] | None, tiny: bool, **variant: Any) -> Any:
    interpret = interpreter() if tiny else None

    def call(q: jax.Array, p: Pools) -> jax.Array:
        rows, tree = Rows(p.start, p.length), variant.get("tree")
        return paged_attention(q, p.pages, rows, spec_of(q, variant, tune, interpret), tree=tree)

    return call


def decode_numerics(record: Record) -> None:
    """Every head dimension, group, page size and variant, ragged and skewed, in the form that the
    interpreter has proved (weights in shared memory) and in the fast one."""
    tiny = record.tiny
    long, many = (70, 3) if tiny else (4000, 40)
    lengths = np.random.default_rng(time.time_ns()).integers(1, long, many)
    spans = [(0, 1), (63, 1), (64, 1), (0, 0), (long, 1), *((int(n), 1) for n in lengths)]
    smem = {"register_p": False, "teams": 1}
    cases: list[tuple[str, Shape, int, dict, dict]] = [
        ("8b, shared memory form", SHAPES["8b"], 1, smem, {}),
        ("8b, register form", SHAPES["8b"], 1, {}, {}),
        ("1b", SHAPES["1b"], 1, {}, {}),
        ("8b tp8", SHAPES["8b tp8"], 1, {}, {}),
        ("verify of 4", SHAPES["8b"], 4, {}, {}),
        ("verify of 16, G 8", Shape(2, 8, 64, 16), 16, {}, {}),
        ("G 7, small pages", Shape(4, 7, 128, 16), 1, {}, {}),
        ("G 1", Shape(4, 1, 64), 1, {}, {}),
        ("H 256", Shape(2, 2, 256), 1, {}, {}),
        ("window", SHAPES["1b"], 1, {}, {"window": 50 if tiny else 1000}),
        ("cap", SHAPES["8b"], 2, {}, {"soft_cap": 20.0}),
        ("pages of 128", Shape(8, 4, 128, 128), 1, {}, {}),
        ("8b, 8 bits", SHAPES["8b, 8 bits"], 1, {}, {}),
        ("1b, 8 bits, verify of 4", SHAPES["1b, 8 bits"], 4, {}, {"window": 50}),
        ("8b, int8", SHAPES["8b, int8"], 1, {}, {}),
        ("1b, int8, verify of 4", SHAPES["1b, int8"], 4, {}, {"window": 50}),
        ("int8, pages of 32", Shape(4, 7, 128, 32, I8), 1, {}, {"soft_cap": 20.0}),
        ("8b, int8, tree of 16", SHAPES["8b, int8"], 16, {}, {"tree": TREE, "window": 50}),
        ("8b, tree of 16", SHAPES["8b"], 16, {}, {"tree": TREE}),
        ("8b, 8 bits, tree of 16", SHAPES["8b, 8 bits"], 16, {}, {"tree": TREE, "window": 50}),
        ("1b, level of a tree", SHAPES["1b"], 2, {}, {"tree": LEVEL}),
    ]
    few = ("8b, shared memory form", "1b", "8b, 8 bits", "8b, int8", "1b, level of a tree")
    for name, shape, J, tune, variant in cases:
        if tiny and name not in few:
            continue
        shape = shape._replace(K=min(shape.K, 2)) if tiny else shape
        tune = {"register_p": False, "teams": 1, "sms": 4} if tiny else tune
        before = variant["tree"].n_before if "tree" in variant else 0
        rows = [
            (s + before, min(J, 1 + s % J) if c else 0) for s, c in spans[: 5 if tiny else None]
        ]
        record.attempt(name, functools.partial(_decode_check, rows, shape, J, tune, variant, tiny))


def _decode_check(rows: Any, shape: Shape, J: int, tune: dict, variant: dict, tiny: bool) -> dict:
    seed = time.time_ns() % 2**31
    p = pools(rows, shape, seed, poison=True)
    q = queries(seed, len(rows), J, shape.K * shape.G, shape.H)
    call = jax.jit(_decode_call(J, tune, tiny, **variant))
    with jax.default_matmul_precision("highest"):
        rows, tree = Rows(p.start, p.length), variant.get("tree")
        want = paged_ref.paged_attention(q, p.pages, rows, spec_of(q, variant), tree=tree)
    keep = np.arange(J) < np.asarray(p.count)[:, None]
    return compare(lambda: call(q, p), want, keep, tiny=tiny)


def decode_bytes(spans: Iterable[Span], shape: Shape) -> int:
    """Keys and values that a call must read."""
    return sum(s + c for s, c in spans) * 2 * shape.K * shape.vector_bytes


EVEN_LOADS: dict[str, list[Span]] = {
    "1 x 2k": [(2047, 1)],
    "8 x 2k": [(2047, 1)] * 8,
    "64 x 2k": [(2047, 1)] * 64,
    "256 x 2k": [(2047, 1)] * 256,
    "64 x 8k": [(8191, 1)] * 64,
    "1 x 128k": [(131071, 1)],
}
"""Decode rows of contexts alike."""


def _loads(tiny: bool) -> dict[str, list[Span]]:
    if tiny:
        return {"4 x 100": [(99, 1)] * 4}
    skewed = [(int(n), 1) for n in np.random.default_rng(1).lognormal(7, 1.2, 128).clip(16, 60000)]
    uneven = {"128 skewed": skewed, "1 of 100k, 63 of 500": [(99999, 1), *[(499, 1)] * 63]}
    return EVEN_LOADS | uneven


def decode_times(record: Record) -> None:
    """Share of the read bandwidth at loads far larger than the L2, and at small ones."""
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    for name in ("8b", "8b, 8 bits", "8b, int8", "1b", "8b tp8", "1b, 8 bits", "1b, int8"):
        for load, spans in _loads(record.tiny).items():
            if record.tiny and not name.startswith("1b"):
                continue
            shape = SHAPES[name]
            measure = functools.partial(_decode_time, spans, shape, {}, record.tiny, limit)
            record.attempt(f"{name}, {load}", measure)


def _decode_time(spans: Any, shape: Shape, tune: dict, tiny: bool, limit: float) -> dict:
    copies = 1 if tiny else max(1, min(8, 4 * L2_BYTES // decode_bytes(spans, shape)))
    p = pools(spans, shape, 3, copies=copies)
    q = queries(3, len(spans), 1, shape.K * shape.G, shape.H)
    calls = 1 if tiny else 8
    tune = {**tune, "register_p": False, "teams": 1, "sms": 4} if tiny else tune
    spent = seconds(
        chained(_decode_call(1, tune, tiny), calls, copies), (q, p), calls, 1 if tiny else 7
    )
    rate = decode_bytes(spans, shape) / spent
    return {"us": spent * 1e6, "bytes_per_s": rate, "share": rate / limit}


def decode_tune(record: Record) -> None:
    """Blocks, stages, teams and the fewest blocks of a split for tune.json, best first to be read off."""
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    grid = {
        128: [(64, 2, 2, True), (64, 5, 1, True), (128, 2, 1, True), (64, 2, 1, False)],
        64: [(64, 4, 2, True), (128, 2, 2, True), (64, 8, 1, True), (128, 3, 1, True)],
    }
    loads = _loads(record.tiny)
    for name, load in itertools.product(
        ("8b", "1b"), list(loads)[:1] if record.tiny else ("64 x 2k", "8 x 2k")
    ):
        shape = SHAPES[name]
        for block, stages, teams, registers in grid[shape.H]:
            tune = {"block": block, "stages": stages, "teams": teams, "register_p": registers}
            measure = functools.partial(_decode_time, loads[load], shape, tune, record.tiny, limit)
            if not record.tiny or (block == 64 and teams == 1 and shape.H == 64):
                record.attempt(f"{name}, {load}, {tuple(tune.values())}", measure)
    for name, load, floor in itertools.product(("8b", "1b"), _few_blocks(loads), (1, 2, 4)):
        tune = {"split_blocks": floor}
        measure = functools.partial(
            _decode_time, loads[load], SHAPES[name], tune, record.tiny, limit
        )
        if not record.tiny or (name == "1b" and floor == 2):
            record.attempt(f"{name}, {load}, splits of {floor} blocks or more", measure)


def _few_blocks(loads: dict[str, list[Span]]) -> list[str]:
    """Loads whose blocks of keys are few enough that the floor of a split shapes the work."""
    return [load for load in ("1 x 2k", "8 x 2k") if load in loads] or list(loads)[:1]


# --- prefill


def _prefill_call(tune: dict[str, Any] | None, tiny: bool, **variant: Any) -> Any:
    interpret = interpreter() if tiny else None

    def call(q: jax.Array, p: Pools) -> jax.Array:
        chunks = Chunks(p.first, p.start, p.count)
        return ragged_prefill(q, p.pages, chunks, spec_of(q, variant, tune, interpret))

    return call


def prefill_numerics(record: Record) -> None:
    """Whole prompts, late chunks and prefixes of all kinds, in both forms."""
    tiny = record.tiny
    spans = [(63, 2), (0, 0), (17, 30), (1, 70)]
    if not tiny:
        spans += [(0, 600), (1500, 333), (64, 128), (999, 1)]
    smem = {"register_p": False, "ping_pong": False}
    cases: list[tuple[str, Shape, dict, dict]] = [
        ("8b, shared memory form", SHAPES["8b"], smem, {}),
        ("8b, register form", SHAPES["8b"], {"ping_pong": False}, {}),
        ("8b, taking turns", SHAPES["8b"], {}, {}),
        ("1b", SHAPES["1b"], {}, {}),
        ("8b tp8", SHAPES["8b tp8"], {}, {}),
        ("G 7, small pages", Shape(4, 7, 128, 16), {}, {}),
        ("G 1", Shape(4, 1, 64), {}, {}),
        ("H 256", Shape(2, 2, 256), {}, {}),
        ("window", SHAPES["1b"], {}, {"window": 100}),
        ("cap", SHAPES["8b"], {}, {"soft_cap": 20.0}),
        ("8b, 8 bits", SHAPES["8b, 8 bits"], {}, {}),
        ("1b, 8 bits", SHAPES["1b, 8 bits"], {}, {"window": 100}),
        ("8b, int8", SHAPES["8b, int8"], {}, {}),
        ("1b, int8", SHAPES["1b, int8"], {}, {"window": 100}),
        ("int8, pages of 32", Shape(4, 7, 128, 32, I8), {}, {"soft_cap": 20.0}),
    ]
    few = ("8b, shared memory form", "8b, 8 bits", "8b, int8")
    for name, shape, tune, variant in cases:
        if tiny and name not in few:
            continue
        shape = shape._replace(K=1, H=64) if tiny else shape
        tune = {**tune, "register_p": False, "block": 64} if tiny else tune
        check = functools.partial(_prefill_check, spans, shape, tune, variant, tiny)
        record.attempt(name, check)


def _prefill_check(spans: Any, shape: Shape, tune: dict, variant: dict, tiny: bool) -> dict:
    seed = time.time_ns() % 2**31
    p = pools(spans, shape, seed, poison=True)
    P = sum(c for _, c in spans) + 5
    q = queries(seed, P, shape.K * shape.G, shape.H).at[P - 5 :].set(jnp.nan)
    call = jax.jit(_prefill_call(tune, tiny, **variant))
    with jax.default_matmul_precision("highest"):
        want = prefill_reference(q, p, **variant)
    return compare(lambda: call(q, p), want, slice(None), tiny=tiny)


def prefill_reference(q: jax.Array, p: Pools, **variant: Any) -> np.ndarray:
    """``prefill_ref`` row by row, so that its dense scores fit in memory."""
    out = np.zeros(q.shape, np.float32)
    for r in range(p.count.shape[0]):
        first, n = int(p.first[r]), int(p.count[r])
        one = slice(r, r + 1)
        if n:
            part = prefill_ref.ragged_prefill(
                q[first : first + n],
                p.pages._replace(table_RM=p.table[one]),
                Chunks(jnp.zeros(1, jnp.int32), p.start[one], p.count[one]),
                spec_of(q, variant),
            )
            out[first : first + n] = np.asarray(part)
    return out


def prefill_flops(spans: Iterable[Span], shape: Shape) -> float:
    """Of both products, over the keys that causality leaves."""
    pairs = sum(c * s + c * (c + 1) / 2 for s, c in spans)
    return 4.0 * pairs * shape.K * shape.G * shape.H


def _prompts(tiny: bool) -> dict[str, list[Span]]:
    if tiny:
        return {"1 x 96": [(0, 96)]}
    return {
        "1 x 4k": [(0, 4096)],
        "1 x 16k": [(0, 16384)],
        "8 x 1k": [(0, 1024)] * 8,
        "2k after 14k": [(14336, 2048)],
        "8 x 256 after 4k": [(4096, 256)] * 8,
    }


def prefill_times(record: Record) -> None:
    """TFLOP/s of whole prompts and late chunks."""
    for name in ("1b",) if record.tiny else ("8b", "8b, 8 bits", "8b, int8", "1b"):
        for load, spans in _prompts(record.tiny).items():
            measure = functools.partial(_prefill_time, spans, SHAPES[name], {}, record.tiny)
            record.attempt(f"{name}, {load}", measure)


def _prefill_time(spans: Any, shape: Shape, tune: dict, tiny: bool) -> dict:
    p = pools(spans, shape, 5)
    q = queries(5, sum(c for _, c in spans), shape.K * shape.G, shape.H)
    calls = 1 if tiny else 4
    tune = {**tune, "register_p": False, "block": 64} if tiny else tune
    spent = seconds(chained(_prefill_call(tune, tiny), calls, 1), (q, p), calls, 1 if tiny else 7)
    rate = prefill_flops(spans, shape) / spent
    return {"us": spent * 1e6, "tflops": rate / 1e12, "share": rate / PEAK_BF16}


def prefill_tune(record: Record) -> None:
    """Blocks, stages, and taking turns or scores ahead, for tune.json."""
    spans = next(iter(_prompts(record.tiny).values()))
    ways = ({"ping_pong": True}, {"ping_pong": False}, {"ahead": True})
    grid = itertools.product(("8b", "1b"), ((128, 2), (64, 3), (64, 4)), ways, (True, False))
    for name, (block, stages), way, registers in grid:
        tune = {"block": block, "stages": stages, **way, "register_p": registers}
        measure = functools.partial(_prefill_time, spans, SHAPES[name], tune, record.tiny)
        if not record.tiny or (name, stages, registers, *way) == ("1b", 3, True, "ahead"):
            record.attempt(f"{name}, {block} x {stages}, {_way(way, registers)}", measure)


def _way(way: dict[str, bool], registers: bool) -> str:
    ((name, on),) = way.items()
    kept = "registers" if registers else "shared memory"
    return f"{'' if on else 'no '}{name.replace('_', ' ')}, weights in {kept}"
