"""The parts that both attention kernels are made of: one block of keys against 64 queries.

It owns the arithmetic of the running softmax in wgmma's register layout, and the copies of pages into shared
memory. Scores are kept in units of log2: p = 2 ** (x - m). Nothing finite is ever taken for granted of a key that a
query may not see.

Idea of the running softmax: FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

M = 64
"""Rows of a wgmma tile."""
MASKED = -1e30
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)
COLUMNS = WGMMA.reduce(0)
WIDENED = plgpu.Layout.WGMMA_UPCAST_2X
"""WGMMA's rows with four neighbours of a row in each thread, so that 8-bit values fill a register."""


class Sums(NamedTuple):
    """A softmax under way: weighted sum of values, highest score, sum of weights."""

    o: Any
    top: Any
    total: Any


def no_sums(columns: int) -> Sums:
    """Before the first key: nothing summed over ``columns`` of values, no score seen."""

    def full(shape: tuple[int, ...], value: float, layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    return Sums(full((M, columns), 0.0, WGMMA), full((M,), MASKED, ROWS), full((M,), 0.0, ROWS))


def along_rows(vector: Any, like: Any) -> Any:
    """A number a row, repeated along the columns of ``like``."""
    return lax.broadcast_in_dim(vector, like.shape, [0])


def swizzled(*shape: int, dtype: Any) -> Any:
    """Shared memory in the tiling that wgmma and TMA want."""
    size = jnp.dtype(dtype).itemsize
    width = min(128 // size, 64)
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * size))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def along_columns(vector: Any, like: Any) -> Any:
    """A number a column, repeated along the rows of ``like``."""
    return lax.broadcast_in_dim(vector, like.shape, [1])


def scores(
    q: Any,
    k: Any,
    scale: float,
    soft_cap: float,
    issued: Callable[[], None] | None,
    of_keys: Callable[[Any], Any] | None = None,
) -> Any:
    """float32[64, block] in units of log2. ``issued`` is called while the product runs. ``of_keys``: gives
    float32[block], what each key is multiplied by; None: 1."""
    return scores_while(q, k, scale, soft_cap, issued or (lambda: None), of_keys)[0]


def scores_while(
    q: Any,
    k: Any,
    scale: float,
    soft_cap: float,
    during: Callable[[], Any],
    of_keys: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """``scores``, and the result of ``during``, which is computed while the product runs and which ``of_keys`` is
    given."""

    def product(acc: Any) -> Any:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        found = during()
        return acc[...], found

    x, found = pl.run_scoped(product, plgpu.ACC((M, k.shape[0]), jnp.float32))
    if of_keys is not None:
        x = x * along_columns(of_keys(found), x)
    if soft_cap:
        return jnp.tanh(x * (scale / soft_cap)) * (soft_cap * LOG2E), found
    return x * (scale * LOG2E), found


def mask(x: Any, at: Any, last: Callable[[Any], Any], length: Any, low: Any, tree: Any) -> Any:
    """Hide keys after the query, beyond the row, before the window or on another branch.

    Key 0 of ``x`` is at ``at``. Of the query in a row of the tile ``last`` gives the place, ``low``
    the first key of its window (None: no window). ``tree`` is (base, word): of the keys from ``base``
    on, a query sees number i if bit i of its word is set, window or not, and of its word ``low`` gives
    the first key of its window (None: all before it).
    """
    ids = functools.partial(plgpu.broadcasted_iota, jnp.int32, x.shape, layout=WGMMA)
    key, row = ids(1) + at, ids(0)
    seen = (key <= last(row)) & (key < length)
    if tree is None:
        seen = seen if low is None else seen & (key >= low(row))
    else:
        base, word = tree[0], tree[1](row)
        i = jnp.clip(key - base, 0, 31)
        mine = lax.bitwise_and(lax.shift_right_logical(word, i), jnp.int32(1)) > 0
        old = key < base if low is None else (key < base) & (key >= low(word))
        seen = seen & (old | ((key >= base) & mine))
    return jnp.where(seen, x, MASKED)


def by_token(token: Any, values: tuple[int, ...]) -> Any:
    """``values[token]`` of few values known when the kernel is built, by selection."""
    found = jnp.full(token.shape, values[0], jnp.int32)
    found = plgpu.layout_cast(found, WGMMA)
    for j, value in enumerate(values[1:], 1):
        found = jnp.where(token == j, jnp.int32(value), found)
    return found


def by_column(vector: Any) -> Any:
    """A number a column of the scores, from shared memory."""
    return plgpu.load(vector, layout=COLUMNS, optimized=False)


def seen_scales(of_values: Any, at: Any, low: Any, high: Any) -> Any:
    """``by_column`` of values from position ``at`` on, zero where that is not in low .. high - 1: a scale there may be
    anything, also NaN. Numbers of int8 are never NaN, so nothing else has to be wiped."""
    found = by_column(of_values)
    key = plgpu.broadcasted_iota(jnp.int32, found.shape, 0, layout=COLUMNS) + at
    return jnp.where((key >= low) & (key < high), found, jnp.zeros_like(found))


def blank(v: Any, at: Any, low: Any, high: Any) -> None:
    """Zero the values in shared memory whose position is not in low .. high - 1: they may be
    anything, also NaN, which a weight of zero would not stop."""
    for c in range(0, v.shape[0], M):
        part = v.at[pl.ds(c, M)]
        values = plgpu.load(part, layout=WGMMA)
        key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=WGMMA) + (at + c)
        part[...] = jnp.where((key >= low) & (key < high), values, jnp.zeros_like(values))
    plgpu.commit_smem()


def widen(raw: Any, to: Any) -> None:
    """Copy 8-bit values to 16-bit ones within shared memory, and let wgmma see them."""
    for r in range(0, raw.shape[0], M):
        for c in range(0, raw.shape[1], M):
            here = (pl.ds(r, M), pl.ds(c, M))
            values = plgpu.load(raw.at[here], layout=WIDENED)
            to.at[here][...] = values.astype(to.dtype)
    plgpu.commit_smem()


def weights(x: Any, sums: Sums) -> tuple[Any, Any, Any, Any]:
    """(p, factor of the old sums, new highest score, new sum of weights)."""
    top = jnp.maximum(sums.top, x.max(axis=1))
    keep = jnp.exp2(sums.top - top)
    p = jnp.exp2(x - along_rows(top, x))
    return p, keep, top, sums.total * keep + p.sum(axis=1)


def weigh(p: Any, o: Any, keep: Any, v: Any, room: Any) -> Any:
    """``o`` times ``keep`` plus p @ v. ``room``: shared memory for p, or None to keep it in
    registers and add in the accumulator, which the interpreter cannot do."""
    p16 = p.astype(v.dtype)
    old = o * along_rows(keep, o)
    if room is None:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p16, v))(plgpu.ACC.init(old))
    room[...] = p16
    plgpu.commit_smem()

    def product(acc: Any) -> Any:
        plgpu.wgmma(acc, room, v)
        return acc[...]

    return old + pl.run_scoped(product, plgpu.ACC(o.shape, jnp.float32))


def page_rows(page_size: int, block: int) -> int:
    """Rows of one copy: a page, or as much of it as a block holds."""
    return min(page_size, block)


def page_ids(table: Any, row: Any, block_index: Any, last: Any, Z: int, block: int) -> tuple:
    """Pages of a block of the row, one per copy. Those past the row's ``last`` repeat it."""
    rows = page_rows(Z, block)
    ids = []
    for c in range(block // rows):
        page = lax.div(block_index * block + c * rows, jnp.int32(Z))
        ids.append(table[row, jnp.minimum(page, last)])
    return tuple(ids)


def copy_block(
    ids: tuple, pool: Any, head: Any, block_index: Any, to: Any, here: Any, Z: int, block: int
) -> None:
    """Copy a block's rows of one kv head into ``to``, numbers or scales; each copy arrives at ``here``."""
    rows = page_rows(Z, block)
    begin = lax.rem(block_index * block, jnp.int32(Z)) if block < Z else 0
    for c, page in enumerate(ids):
        source = pool.at[page, head, pl.ds(begin, rows)]
        plgpu.copy_gmem_to_smem(source, to.at[pl.ds(c * rows, rows)], here)
