"""Paged attention in plain XLA: the CPU backend, and the fallback where no kernel exists.

It owns a KV layout and two loops whose length is data, so a step costs what its rows hold and not what its bucket
could. A layer's keys are [P, K, Z, H], so that a kv head's share of a page is one contiguous run. A block is S
positions (S / Z pages) that begin at a multiple of S.

Decode rows are sorted by length and taken W at a time, block by block, up to the longest of the W::

    rows by length   |1180 1003  870  610| 420  333  300  122|  80  17   -   - |      W = 4
    blocks of 128    |        10         |         4         |        1        |

Prefill rows are cut into tiles of Q tokens of one row, each against the blocks it can see::

    tokens   f0 f0 f0 f0 f0 f0 f0 f1 f1 f1
    tiles    |--- Q ---|--- Q ---|
                                  |--- Q ---|

Both keep a running softmax. No result depends on another row, on page ids or on the bucket:
blocks lie at fixed positions, and a block that a token cannot see leaves its sums as they are,
bit for bit. Bfloat16 and e4m3 are stored as their bits (uint16, uint8), because scattering them on
XLA:CPU converts the whole pool.

Idea of the running softmax: FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jserve.model.attention import AttendArgs, AttentionBackend, LayerKV, Places, capped
from jserve.model.draft_tree import DraftMask, seen_in_tree
from jserve.model.kv_quant import E4M3, stored
from jserve.model.view import StepView

S_DECODE, W_DECODE = 128, 8
S_PREFILL, Q_PREFILL = 128, 128
MASKED = float(np.finfo(np.float32).min)


def kv_shape(K: int, H: int, n_pages: int, page_size: int) -> tuple[int, ...]:
    return (n_pages, K, page_size, H)


def kv_dtype(dtype: Any) -> Any:
    """The type that values of ``dtype`` are stored as: bfloat16 and e4m3 as their bits."""
    bits = {jnp.dtype(jnp.bfloat16): jnp.uint16, E4M3: jnp.uint8}
    return jnp.dtype(bits.get(jnp.dtype(dtype), dtype))


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """Scatter each token's key and value to its page and offset."""
    keys, values = (
        pool.at[view.write_page_T, :, view.write_off_T].set(stored(x_TKH, pool.dtype))
        for pool, x_TKH in zip(kv, (k_TKH, v_TKH), strict=True)
    )
    return keys, values


def attend(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    """float32[T, N, H]; zero for padding tokens."""
    parts = [_decode_part(args, kv, view)] if view.D else []
    parts += [_prefill_part(args, kv, view)] if view.P else []
    return jnp.concatenate([x.reshape(-1, *args.q_TNH.shape[1:]) for x in parts])


def _decode_part(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    queries, reach = _scaled(args, kv[0].shape[1])
    return _decode(queries.part(slice(0, view.D * view.J)), kv, view, reach)


def _prefill_part(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    queries, reach = _scaled(args, kv[0].shape[1])
    return _prefill(queries.part(slice(view.D * view.J, None)), kv, view, reach)


def _scaled(args: AttendArgs, K: int) -> tuple[Queries, Reach]:
    (T, N, H), sinks = args.q_TNH.shape, args.sinks

    def scaled(x_TNH: jax.Array) -> jax.Array:
        return (x_TNH.astype(jnp.float32) * args.scale).reshape(T, K, N // K, H)

    far = None if sinks is None else scaled(sinks.q_TNH)
    return Queries(scaled(args.q_TNH), far), Reach(
        args.window, 0 if sinks is None else sinks.n, args.soft_cap
    )


class Queries(NamedTuple):
    """The queries of tokens, and those with which they meet the sinks behind their window."""

    near: jax.Array
    far: jax.Array | None

    def part(self, at: Any) -> Queries:
        return jax.tree.map(lambda x: x[at], self)


class Reach(NamedTuple):
    """The positions that a token sees before itself: ``window`` of them (0: all), and the first ``sinks``; and the
    cap of its scores."""

    window: int
    sinks: int
    soft_cap: float


class KVBlocks(NamedTuple):
    """Keys and values of some blocks, masked to zero where nothing may be read."""

    k_WKSH: jax.Array
    v_WKSH: jax.Array


def _read(kv: LayerKV, pages_WB: jax.Array) -> KVBlocks:
    """The blocks in pages [W, B]. What is not finite reads as NaN among keys, so that it stays
    visible in the scores of its own row, and as zero among values, so that it cannot leave it
    with a weight of zero."""
    P, K, Z, H = kv[0].shape
    W, B = pages_WB.shape
    at_A = (pages_WB[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]).reshape(-1)

    def read(pool: jax.Array, instead: float) -> jax.Array:
        x_AY = pool.reshape(P * K, Z * H).at[at_A].get(mode="promise_in_bounds")
        return _finite(x_AY, instead).reshape(W, K, B * Z, H)

    return KVBlocks(read(kv[0], np.nan), read(kv[1], 0.0))


def _finite(x: jax.Array, instead: float) -> jax.Array:
    """bfloat16 where its bits are stored, else float32; ``instead`` of what is not finite.

    The select is also what makes the gather before it fast: XLA:CPU vectorises a gather only
    inside a fusion.
    """
    if x.dtype == jnp.uint8:
        x = lax.bitcast_convert_type(x, E4M3)
    if x.dtype != jnp.uint16:
        x = x.astype(jnp.float32)
        return jnp.where(jnp.abs(x) < jnp.inf, x, instead)
    exponent = np.uint16(0x7F80)
    bits = np.asarray(instead, jnp.bfloat16).view(np.uint16)
    return lax.bitcast_convert_type(jnp.where((x & exponent) != exponent, x, bits), jnp.bfloat16)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


# --- decode rows


class Sums(NamedTuple):
    """A softmax under way: weighted sum of values, sum of weights, highest score."""

    o: jax.Array
    total: jax.Array
    top: jax.Array


def _decode(q: Queries, kv: LayerKV, view: StepView, reach: Reach) -> jax.Array:
    """float32[D*J, K, G, H] of the decode rows."""
    D, J = view.D, view.J
    K, G, H = q.near.shape[1:]
    W = min(W_DECODE, D)
    table_DM, S = _blocked(view.page_table_RM[:D], kv[0].shape[2], S_DECODE)
    order_D = jnp.argsort(view.kv_len_R[:D], descending=True).astype(jnp.int32)
    order_D = jnp.pad(order_D, (0, -D % W), constant_values=D)
    rows = _Rows(
        q=jax.tree.map(lambda x: x.reshape(D, J, K, G, H).swapaxes(1, 2), q),
        table=table_DM,
        start=view.start_R[:D],
        len=view.kv_len_R[:D],
    )

    def group(i: jax.Array, out_DKJGH: jax.Array) -> jax.Array:
        at_W = lax.dynamic_slice_in_dim(order_D, i * W, W)
        held = jax.tree.map(lambda x: x.at[at_W].get(mode="clip"), rows)
        held = held._replace(len=jnp.where(at_W < D, held.len, 0))
        return out_DKJGH.at[at_W].set(_group(held, kv, reach, S, view.tree), mode="drop")

    n_groups = -(-(rows.len > 0).sum() // W)
    out = lax.fori_loop(0, n_groups, group, jnp.zeros_like(rows.q.near))
    return out.swapaxes(1, 2).reshape(D * J, K, G, H)


class _Rows(NamedTuple):
    q: Queries
    table: jax.Array
    start: jax.Array
    len: jax.Array


def _blocked(table_RM: jax.Array, Z: int, S: int) -> tuple[jax.Array, int]:
    """(the page table padded with page 0 to whole blocks, positions of a block)."""
    M = table_RM.shape[1]
    B = min(max(S // Z, 1), M)
    return jnp.pad(table_RM, ((0, 0), (0, -M % B))), B * Z


def _group(rows: _Rows, kv: LayerKV, reach: Reach, S: int, tree: DraftMask | None) -> jax.Array:
    """float32[W, K, J, G, H]: W rows against as many blocks as the longest of them has."""
    W, K, J, G, H = rows.q.near.shape
    B, window = S // kv[0].shape[2], reach.window
    pos_WJ = rows.start[:, None] + jnp.arange(J, dtype=jnp.int32)
    lowest_W = rows.start if tree is None else rows.start - tree.n_before
    first_W = jnp.maximum(lowest_W - window + 1, 0) // S if window else jnp.zeros_like(rows.len)
    n_W = jnp.where(rows.len > 0, -(-rows.len // S) - first_W, 0)
    table_WM = _shift(rows.table, first_W * B) if window else rows.table

    def add(q: jax.Array, pages_WB: jax.Array, seen_WJS: jax.Array, sums: Sums) -> Sums:
        blocks = _read(kv, pages_WB)
        score = _product("wkqh,wksh->wkqs", q.reshape(W, K, J * G, H), blocks.k_WKSH)
        score, seen = score.reshape(W, K, J, G, S), seen_WJS[:, None, :, None]
        score = capped(score, reach.soft_cap)
        return _add(sums, score, seen, "wkqs,wksh->wkqh", blocks.v_WKSH)

    def block(j: jax.Array, sums: Sums) -> Sums:
        pages_WB = lax.dynamic_slice_in_dim(table_WM, j * B, B, 1)
        pos_WS = ((first_W + j) * S)[:, None] + jnp.arange(S, dtype=jnp.int32)
        seen = _seen(pos_WJ, pos_WS, window)
        if tree is not None:
            seen = seen_in_tree(tree, rows.start, pos_WS, window)
        seen = seen & (pos_WS < rows.len[:, None])[:, None]
        return add(rows.q.near, pages_WB, seen, sums)

    sums = _no_sums((W, K, J, G), H)
    for at, seen in _sinks(pos_WJ, reach, S, S // B):
        assert rows.q.far is not None
        sums = add(rows.q.far, rows.table[:, at : at + B], seen, sums)
    out = _finish(lax.fori_loop(0, n_W.max(), block, sums))
    return jnp.where((rows.len > 0)[:, None, None, None, None], out, 0.0)


def _sinks(pos_WQ: jax.Array, reach: Reach, S: int, Z: int) -> Iterator[tuple[int, jax.Array]]:
    """(first page, bool[W, Q, S]) of each block of sinks: which lie behind the window of a query.

    Where none does the block leaves the sums as they are, as any other that nobody sees.
    """
    for first in range(0, reach.sinks, S):
        pos_S = first + jnp.arange(S, dtype=jnp.int32)
        yield first // Z, (pos_S < reach.sinks) & (pos_S <= pos_WQ[..., None] - reach.window)


def _shift(table_WM: jax.Array, by_W: jax.Array) -> jax.Array:
    """Each row of the table begun ``by_W`` pages later; page 0 comes in at its end."""
    M = table_WM.shape[1]
    at_WM = by_W[:, None] + jnp.arange(M, dtype=jnp.int32)
    moved_WM = jnp.take_along_axis(table_WM, jnp.minimum(at_WM, M - 1), axis=1)
    return jnp.where(at_WM < M, moved_WM, 0)


def _no_sums(shape: tuple[int, ...], H: int) -> Sums:
    return Sums(jnp.zeros((*shape, H)), jnp.zeros(shape), jnp.full(shape, MASKED))


def _add(sums: Sums, score: jax.Array, seen: jax.Array, spec: str, v: jax.Array) -> Sums:
    """The softmax with one more block: scores [..., S] counted where seen, values of the block.

    A query that has seen nothing yet counts masked positions with a weight of one; the first score
    that it does see takes all of that back, since ``keep`` is then exactly zero.
    """
    score = jnp.where(seen, score, MASKED)
    top = jnp.maximum(sums.top, score.max(-1))
    p = jnp.exp(score - top[..., None])
    keep = jnp.exp(sums.top - top)
    o = _product(spec, p.reshape(*v.shape[:-2], -1, v.shape[-2]), v)
    return Sums(
        sums.o * keep[..., None] + o.reshape(sums.o.shape), sums.total * keep + p.sum(-1), top
    )


def _finish(sums: Sums) -> jax.Array:
    return sums.o / jnp.maximum(sums.total, np.finfo(np.float32).tiny)[..., None]


def _seen(pos_WQ: jax.Array, pos_WS: jax.Array, window: int) -> jax.Array:
    """bool[W, Q, S]: positions at or before each query's own, and within its window."""
    seen = pos_WS[:, None] <= pos_WQ[:, :, None]
    return seen & (pos_WS[:, None] > pos_WQ[:, :, None] - window) if window else seen


# --- prefill rows


def _prefill(q: Queries, kv: LayerKV, view: StepView, reach: Reach) -> jax.Array:
    """float32[P, K, G, H] of the prefill rows."""
    D, F, P = view.D, view.F, view.P
    K, G, H = q.near.shape[1:]
    Q = min(Q_PREFILL, P)
    table_FM, S = _blocked(view.page_table_RM[D:], kv[0].shape[2], S_PREFILL)
    first_F = view.first_R[D:] - D * view.J
    start_F, count_F = view.start_R[D:], view.count_R[D:]
    n_F = -(-count_F // Q)
    end_F = jnp.cumsum(n_F)

    def tile(i: jax.Array, out_PKGH: jax.Array) -> jax.Array:
        f = jnp.minimum((end_F <= i).sum(), F - 1)
        skip = (i - (end_F - n_F)[f]) * Q
        n = jnp.minimum(count_F[f] - skip, Q)
        index_Q = jnp.arange(Q, dtype=jnp.int32)
        at_Q = jnp.where(index_Q < n, first_F[f] + skip + index_Q, P)
        own = jax.tree.map(lambda x: x.at[at_Q].get(mode="clip").swapaxes(0, 1), q)
        o_KQGH = _tile(own, kv, table_FM[f], start_F[f] + skip, n, reach, S)
        return out_PKGH.at[at_Q].set(o_KQGH.swapaxes(0, 1), mode="drop")

    return lax.fori_loop(0, end_F[-1], tile, jnp.zeros((P, K, G, H), jnp.float32))


def _tile(
    q: Queries,
    kv: LayerKV,
    table_M: jax.Array,
    start: jax.Array,
    n: jax.Array,
    reach: Reach,
    S: int,
) -> jax.Array:
    """float32[K, Q, G, H] of ``n`` tokens from position ``start`` of the row with this page
    table."""
    K, Q, G, H = q.near.shape
    B, window = S // kv[0].shape[2], reach.window
    pos_Q = start + jnp.arange(Q, dtype=jnp.int32)
    first = jnp.maximum(start - window + 1, 0) // S if window else 0

    def add(q_KQGH: jax.Array, pages_B: jax.Array, seen_QS: jax.Array, sums: Sums) -> Sums:
        blocks = _read(kv, pages_B[None])
        score = _product("kqh,ksh->kqs", q_KQGH.reshape(K, Q * G, H), blocks.k_WKSH[0])
        score = capped(score.reshape(K, Q, G, S), reach.soft_cap)
        return _add(sums, score, seen_QS[:, None], "kqs,ksh->kqh", blocks.v_WKSH[0])

    def block(b: jax.Array, sums: Sums) -> Sums:
        pages_B = lax.dynamic_slice_in_dim(table_M, b * B, B)
        pos_S = b * S + jnp.arange(S, dtype=jnp.int32)
        seen_QS = _seen(pos_Q[None], pos_S[None], window)[0] & (pos_S < start + n)
        return add(q.near, pages_B, seen_QS, sums)

    sums = _no_sums((K, Q, G), H)
    for at, seen_QS in _sinks(pos_Q, reach, S, S // B):
        assert q.far is not None
        sums = add(q.far, table_M[at : at + B], seen_QS, sums)
    return _finish(lax.fori_loop(first, -(-(start + n) // S), block, sums))


# --- accepted drafts


def move(kv: LayerKV, old: Places, new: Places) -> LayerKV:
    """Copy entries to other places."""
    keys, values = (pool.at[new[0], :, new[1]].set(pool[old[0], :, old[1]]) for pool in kv)
    return keys, values


XLA = AttentionBackend(
    name="xla",
    kv_axis=1,
    kv_shape=kv_shape,
    kv_dtype=kv_dtype,
    write_kv=write_kv,
    attend=attend,
    move=move,
)
