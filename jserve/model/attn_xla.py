"""Paged attention in plain XLA: what serves on CPU, and the fallback wherever no kernel exists.

Owns a KV layout and two loops whose length is data, so a step costs what its rows hold and not what its bucket
could. Must not know families or the runner. A layer's keys are [P, K, Z, H], so that a kv head's share of a
page is one contiguous run; a block is ``S`` positions (S / Z pages) at fixed absolute borders.

Decode rows: a work list of (row, block) pairs, ``W`` pairs an iteration; each gives a partial softmax, and
the partials of a row, which lie side by side, are merged in order of position::

    row       0   0   0   1   2   2   2   2 | 2  -  -        n_R = blocks of each row
    block     0   1   2   0   0   1   2   3 | 4  -  -        end_R = cumsum(n_R)
              '------ one iteration ------'

Prefill rows: tiles of ``Q`` tokens of one row, each against the blocks it can see, with a running softmax::

    tile      |--- Q ---|--- Q ---|-   '     a tile may reach past its row's end: later rows overwrite that
    tokens    f0 f0 f0 f0 f0 f0 f0 f1 f1

No result depends on another row, on the page ids or on the bucket: blocks start at fixed positions, and a block
that a token cannot see leaves its sums as they are, bit for bit. Facts behind the form (XLA:CPU): a gather is
twice as fast when something is fused to it (here the mask that keeps NaN of unused pages out); batched products
of few rows are good in [K, S, H]; bfloat16 pools are kept as uint16, since scattering bfloat16 converts the pool.
Idea of partials and merge: flash decoding; of the running softmax: arXiv 2205.14135.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jserve.model.attention import AttentionBackend, LayerKV
from jserve.model.view import Bucket, StepDims, StepView

S_DECODE, W_DECODE = 64, 16
S_PREFILL, Q_PREFILL = 256, 128
MASKED = float(np.finfo(np.float32).min)


def kv_shape(K: int, H: int, n_pages: int, page_size: int) -> tuple[int, ...]:
    return (n_pages, K, page_size, H)


def plan_shapes(bucket: Bucket, dims: StepDims) -> Mapping[str, tuple[int, ...]]:
    return {}


def plan(views: Mapping[str, np.ndarray], bucket: Bucket, dims: StepDims) -> None:
    """Nothing to plan: the work lists come from the true lengths, on the device."""


def kv_dtype(dtype: Any) -> Any:
    """How values of ``dtype`` are stored: bfloat16 as its bits."""
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else jnp.dtype(dtype)


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """Scatter each token's key and value to its page and offset."""
    keys, values = (
        pool.at[view.write_page_T, :, view.write_off_T].set(_to_bits(x_TKH, pool.dtype))
        for pool, x_TKH in zip(kv, (k_TKH, v_TKH), strict=True)
    )
    return keys, values


def attend(
    q_TNH: jax.Array, kv: LayerKV, view: StepView, *, window: int, scale: float
) -> jax.Array:
    """float32[T, N, H]; zero for padding tokens."""
    T, N, H = q_TNH.shape
    K = kv[0].shape[1]
    q_TKGH = (q_TNH.astype(jnp.float32) * scale).reshape(T, K, N // K, H)
    n_decode = view.D * view.J
    parts = []
    if view.D:
        parts.append(_decode(q_TKGH[:n_decode], kv, view, window))
    if view.P:
        parts.append(_prefill(q_TKGH[n_decode:], kv, view, window))
    return jnp.concatenate(parts).reshape(T, N, H)


class Blocks(NamedTuple):
    """Keys and values of some blocks, masked to zero where nothing may be read."""

    k_WKSH: jax.Array
    v_WKSH: jax.Array
    pos_WS: jax.Array


def _read(kv: LayerKV, pages_WB: jax.Array, start_W: jax.Array, len_W: jax.Array) -> Blocks:
    """The blocks of pages [W, B] that begin at position ``start_W`` of rows that hold ``len_W`` tokens."""
    P, K, Z, H = kv[0].shape
    W, B = pages_WB.shape
    pos_WS = start_W[:, None] + jnp.arange(B * Z, dtype=jnp.int32)
    held = (pos_WS < len_W[:, None]).reshape(W, 1, B, Z, 1)
    at_WKB = pages_WB[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]

    def read(pool: jax.Array) -> jax.Array:
        x = pool.reshape(P * K, Z, H).at[at_WKB].get(mode="promise_in_bounds")
        return _from_bits(jnp.where(held, x, jnp.zeros((), x.dtype))).reshape(W, K, B * Z, H)

    return Blocks(read(kv[0]), read(kv[1]), pos_WS)


def _to_bits(x: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def _from_bits(x: jax.Array) -> jax.Array:
    """bfloat16 where its bits are stored, else float32."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x, jnp.bfloat16)
    return x.astype(jnp.float32)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


# ---------------------------------------------------------------------------------------------- decode rows


class Partial(NamedTuple):
    """Softmax over part of the context: weighted sum of values, sum of weights, highest score."""

    o: jax.Array
    total: jax.Array
    top: jax.Array


def _decode(q: jax.Array, kv: LayerKV, view: StepView, window: int) -> jax.Array:
    """float32[D*J, K, G, H] of the decode rows."""
    D, J = view.D, view.J
    K, G, H = q.shape[1:]
    q_DKJGH = q.reshape(D, J, K, G, H).swapaxes(1, 2)
    table_DM, S = _blocked(view.page_table_RM[:D], kv[0].shape[2], S_DECODE)
    len_D, start_D = view.kv_len_R[:D], view.start_R[:D]
    block0_D = jnp.maximum(start_D - window + 1, 0) // S if window else jnp.zeros_like(len_D)
    n_D = jnp.where(len_D > 0, -(-len_D // S) - block0_D, 0)
    end_D = jnp.cumsum(n_D)
    B = S // kv[0].shape[2]
    W = min(W_DECODE, D * (table_DM.shape[1] // B))
    n_tiles = -(-end_D[-1] // W)

    def tile(i: jax.Array, partials: Partial) -> Partial:
        item_W = i * W + jnp.arange(W, dtype=jnp.int32)
        row_W = jnp.minimum((end_D <= item_W[:, None]).sum(1), D - 1)
        block_W = block0_D[row_W] + item_W - (end_D - n_D)[row_W]
        real_W = item_W < end_D[-1]
        block_W = jnp.where(real_W, block_W, 0)
        page_W = block_W[:, None] * B + jnp.arange(B, dtype=jnp.int32)
        pages_WB = table_DM[row_W[:, None], page_W]
        blocks = _read(kv, pages_WB, block_W * S, jnp.where(real_W, len_D[row_W], 0))
        pos_WJ = start_D[row_W][:, None] + jnp.arange(J, dtype=jnp.int32)
        new = _partial(q_DKJGH[row_W], blocks, pos_WJ, window)
        return jax.tree.map(lambda all, x: lax.dynamic_update_slice_in_dim(all, x, i * W, 0), partials, new)

    most = -(-D * (table_DM.shape[1] // B) // W) * W
    shape = (most, K, J, G)
    empty = Partial(jnp.zeros((*shape, H)), jnp.zeros(shape), jnp.zeros(shape))
    partials = lax.fori_loop(0, n_tiles, tile, empty)
    o_DKJGH = _merge(partials, end_D - n_D, n_D)
    return o_DKJGH.swapaxes(1, 2).reshape(D * J, K, G, H)


def _blocked(table_RM: jax.Array, Z: int, S: int) -> tuple[jax.Array, int]:
    """(the page table padded with page 0 to whole blocks, positions of a block)."""
    M = table_RM.shape[1]
    B = min(max(S // Z, 1), M)
    return jnp.pad(table_RM, ((0, 0), (0, -M % B))), B * Z


def _partial(q_WKJGH: jax.Array, blocks: Blocks, pos_WJ: jax.Array, window: int) -> Partial:
    W, K, J, G, H = q_WKJGH.shape
    score = _product("wkgh,wksh->wkgs", q_WKJGH.reshape(W, K, J * G, H), blocks.k_WKSH)
    seen = _seen(pos_WJ, blocks.pos_WS, window)[:, None, :, None]
    score = jnp.where(seen, score.reshape(W, K, J, G, -1), MASKED)
    top = score.max(-1)
    p = jnp.where(seen, jnp.exp(score - top[..., None]), 0.0)
    o = _product("wkgs,wksh->wkgh", p.reshape(W, K, J * G, -1), blocks.v_WKSH)
    return Partial(o.reshape(W, K, J, G, H), p.sum(-1), top)


def _seen(pos_WQ: jax.Array, pos_WS: jax.Array, window: int) -> jax.Array:
    """bool[W, Q, S]: positions at or before each query's own, and within its window."""
    seen = pos_WS[:, None] <= pos_WQ[:, :, None]
    return seen & (pos_WS[:, None] > pos_WQ[:, :, None] - window) if window else seen


def _merge(partials: Partial, first_D: jax.Array, n_D: jax.Array) -> jax.Array:
    """float32[D, K, J, G, H]: the softmax over all partials of each row, in order; zero for unused rows."""

    def add(j: jax.Array, sums: Partial) -> Partial:
        at_D = first_D + jnp.minimum(j, n_D - 1)
        more = jax.tree.map(lambda x: x[at_D], partials)
        there = (j < n_D)[:, None, None, None]
        top = jnp.where(there, jnp.maximum(sums.top, more.top), sums.top)
        old, new = jnp.exp(sums.top - top), jnp.where(there, jnp.exp(more.top - top), 0.0)
        return Partial(
            sums.o * old[..., None] + jnp.where(there[..., None], more.o, 0.0) * new[..., None],
            sums.total * old + more.total * new,
            top,
        )

    shape = (n_D.shape[0], *partials.total.shape[1:])
    H = partials.o.shape[-1]
    zero = Partial(jnp.zeros((*shape, H)), jnp.zeros(shape), jnp.full(shape, MASKED))
    sums = lax.fori_loop(0, n_D.max(), add, zero)
    return sums.o / jnp.maximum(sums.total, np.finfo(np.float32).tiny)[..., None]


# --------------------------------------------------------------------------------------------- prefill rows


def _prefill(q: jax.Array, kv: LayerKV, view: StepView, window: int) -> jax.Array:
    """float32[P, K, G, H] of the prefill rows."""
    D, F, P = view.D, view.F, view.P
    K, G, H = q.shape[1:]
    Q = min(Q_PREFILL, P)
    q_KPGH = jnp.pad(q, ((0, Q), (0, 0), (0, 0), (0, 0))).swapaxes(0, 1)
    table_FM, S = _blocked(view.page_table_RM[D:], kv[0].shape[2], S_PREFILL)
    first_F = view.first_R[D:] - D * view.J
    start_F, count_F = view.start_R[D:], view.count_R[D:]
    n_F = -(-count_F // Q)
    end_F = jnp.cumsum(n_F)

    def tile(i: jax.Array, out_KPGH: jax.Array) -> jax.Array:
        f = jnp.minimum((end_F <= i).sum(), F - 1)
        skip = (i - (end_F - n_F)[f]) * Q
        at = first_F[f] + skip
        q_KQGH = lax.dynamic_slice_in_dim(q_KPGH, at, Q, 1)
        n = jnp.minimum(count_F[f] - skip, Q)
        o_KQGH = _tile(q_KQGH, kv, table_FM[f], start_F[f] + skip, n, window, S)
        return lax.dynamic_update_slice_in_dim(out_KPGH, o_KQGH, at, 1)

    out_KPGH = lax.fori_loop(0, end_F[-1], tile, jnp.zeros((K, P + Q, G, H), jnp.float32))
    return out_KPGH[:, :P].swapaxes(0, 1)


def _tile(
    q_KQGH: jax.Array,
    kv: LayerKV,
    table_M: jax.Array,
    start: jax.Array,
    n: jax.Array,
    window: int,
    S: int,
) -> jax.Array:
    """float32[K, Q, G, H] of ``n`` tokens from position ``start`` of the row with this page table."""
    K, Q, G, H = q_KQGH.shape
    B = S // kv[0].shape[2]
    pos_Q = start + jnp.arange(Q, dtype=jnp.int32)
    first = jnp.maximum(start - window + 1, 0) // S if window else 0

    def block(b: jax.Array, sums: Partial) -> Partial:
        pages_B = lax.dynamic_slice_in_dim(table_M, b * B, B)
        blocks = _read(kv, pages_B[None], (b * S)[None], (start + n)[None])
        new = _product("kqh,ksh->kqs", q_KQGH.reshape(K, Q * G, H), blocks.k_WKSH[0])
        seen_QS = _seen(pos_Q[None], blocks.pos_WS, window)[0]
        score = jnp.where(seen_QS[:, None], new.reshape(K, Q, G, S), MASKED)
        top = jnp.maximum(sums.top, score.max(-1))
        p = jnp.where(seen_QS[:, None], jnp.exp(score - top[..., None]), 0.0)
        o = _product("kqs,ksh->kqh", p.reshape(K, Q * G, S), blocks.v_WKSH[0])
        keep = jnp.exp(sums.top - top)
        o = sums.o * keep[..., None] + o.reshape(K, Q, G, H)
        return Partial(o, sums.total * keep + p.sum(-1), top)

    shape = (K, Q, G)
    zero = Partial(jnp.zeros((*shape, H)), jnp.zeros(shape), jnp.full(shape, MASKED))
    sums = lax.fori_loop(first, -(-(start + n) // S), block, zero)
    total = jnp.maximum(sums.total, np.finfo(np.float32).tiny)
    return sums.o / total[..., None]


XLA = AttentionBackend(
    name="xla",
    kv_axis=1,
    kv_shape=kv_shape,
    plan_shapes=plan_shapes,
    plan=plan,
    write_kv=write_kv,
    attend=attend,
)
