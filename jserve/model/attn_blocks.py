"""The loops of attention in plain XLA, over blocks of KV that a layer says how to read.

It owns two loops whose length is data, so a step costs what its rows hold and not what its bucket could. A block is S
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
bit for bit.

Idea of the running softmax: FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jserve.kv_layout import Span
from jserve.model.attention import capped
from jserve.model.draft_tree import DraftMask, seen_in_tree
from jserve.model.kv_quant import E4M3
from jserve.model.view import StepView

S_DECODE, W_DECODE = 128, 8
S_PREFILL, Q_PREFILL = 128, 128
MASKED = float(np.finfo(np.float32).min)


class Queries(NamedTuple):
    """The queries of tokens, and those with which they meet the sinks behind their window."""

    near: jax.Array
    far: jax.Array | None

    def part(self, at: Any) -> Queries:
        return jax.tree.map(lambda x: x[at], self)


class KVBlocks(NamedTuple):
    """Keys and values of some blocks; values are as wide as they are."""

    k_WKSH: jax.Array
    v_WKSV: jax.Array


class Layer(NamedTuple):
    """The KV of one layer, and what its tokens see of it."""

    read: Callable[[jax.Array], KVBlocks]
    """Of pages int32[W, B]."""
    Z: int
    V: int
    """Numbers of a value."""
    span: Span = Span()
    sinks: int = 0
    """First positions that are seen beside the span."""
    soft_cap: float = 0.0
    sink_logits_KG: jax.Array | None = None


def finite(x: jax.Array, instead: float) -> jax.Array:
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


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum in float32, computed in the type of ``b``."""
    return jnp.einsum(spec, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


# --- decode rows


class Sums(NamedTuple):
    """A softmax under way: weighted sum of values, sum of weights, highest score."""

    o: jax.Array
    total: jax.Array
    top: jax.Array


def decode_rows(q: Queries, layer: Layer, view: StepView) -> jax.Array:
    """float32[D*J, K, G, V] of the decode rows."""
    D, J = view.D, view.J
    K, G, H = q.near.shape[1:]
    W = min(W_DECODE, D)
    table_DM, S = _blocked(view.page_table_RM[:D], layer.Z, S_DECODE)
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
        return out_DKJGH.at[at_W].set(_group(held, layer, S, view.tree), mode="drop")

    n_groups = -(-(rows.len > 0).sum() // W)
    out = lax.fori_loop(0, n_groups, group, jnp.zeros((D, K, J, G, layer.V), jnp.float32))
    return out.swapaxes(1, 2).reshape(D * J, K, G, layer.V)


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


def _group(rows: _Rows, layer: Layer, S: int, tree: DraftMask | None) -> jax.Array:
    """float32[W, K, J, G, V]: W rows against as many blocks as the longest of them has."""
    W, K, J, G, H = rows.q.near.shape
    B, span = S // layer.Z, layer.span
    pos_WJ = rows.start[:, None] + jnp.arange(J, dtype=jnp.int32)
    lowest_W = rows.start if tree is None else rows.start - tree.n_before
    first_W = span.lowest(lowest_W) // S
    n_W = jnp.where(rows.len > 0, -(-rows.len // S) - first_W, 0)
    table_WM = _shift(rows.table, first_W * B) if span else rows.table

    def add(q: jax.Array, pages_WB: jax.Array, seen_WJS: jax.Array, sums: Sums) -> Sums:
        blocks = layer.read(pages_WB)
        score = product("wkqh,wksh->wkqs", q.reshape(W, K, J * G, H), blocks.k_WKSH)
        score, seen = score.reshape(W, K, J, G, S), seen_WJS[:, None, :, None]
        score = capped(score, layer.soft_cap)
        return _add(sums, score, seen, "wkqs,wksh->wkqh", blocks.v_WKSV)

    def block(j: jax.Array, sums: Sums) -> Sums:
        pages_WB = lax.dynamic_slice_in_dim(table_WM, j * B, B, 1)
        pos_WS = ((first_W + j) * S)[:, None] + jnp.arange(S, dtype=jnp.int32)
        seen = _seen(pos_WJ, pos_WS, span)
        if tree is not None:
            seen = seen_in_tree(tree, rows.start, pos_WS, span)
        seen = seen & (pos_WS < rows.len[:, None])[:, None]
        return add(rows.q.near, pages_WB, seen, sums)

    sums = _no_sums((W, K, J, G), layer)
    for at, seen in _sinks(pos_WJ, layer, S):
        assert rows.q.far is not None
        sums = add(rows.q.far, rows.table[:, at : at + B], seen, sums)
    out = _finish(lax.fori_loop(0, n_W.max(), block, sums))
    return jnp.where((rows.len > 0)[:, None, None, None, None], out, 0.0)


def _sinks(pos_WQ: jax.Array, layer: Layer, S: int) -> Iterator[tuple[int, jax.Array]]:
    """(first page, bool[W, Q, S]) of each block of sinks: which lie behind the span of a query.

    Where none does the block leaves the sums as they are, as any other that nobody sees.
    """
    for first in range(0, layer.sinks, S):
        pos_S = first + jnp.arange(S, dtype=jnp.int32)
        behind_WQS = pos_S < layer.span.lowest(pos_WQ)[..., None]
        yield first // layer.Z, (pos_S < layer.sinks) & behind_WQS


def _shift(table_WM: jax.Array, by_W: jax.Array) -> jax.Array:
    """Each row of the table begun ``by_W`` pages later; page 0 comes in at its end."""
    M = table_WM.shape[1]
    at_WM = by_W[:, None] + jnp.arange(M, dtype=jnp.int32)
    moved_WM = jnp.take_along_axis(table_WM, jnp.minimum(at_WM, M - 1), axis=1)
    return jnp.where(at_WM < M, moved_WM, 0)


def _no_sums(shape: tuple[int, ...], layer: Layer) -> Sums:
    """Of [..., K, Q, G] queries. A sink logit is a score that came first, with a value of zero."""
    o, sink_KG = jnp.zeros((*shape, layer.V)), layer.sink_logits_KG
    if sink_KG is None:
        return Sums(o, jnp.zeros(shape), jnp.full(shape, MASKED))
    return Sums(o, jnp.ones(shape), jnp.broadcast_to(sink_KG[:, None], shape))


def _add(sums: Sums, score: jax.Array, seen: jax.Array, spec: str, v: jax.Array) -> Sums:
    """The softmax with one more block: scores [..., S] counted where seen, values of the block.

    A query that has seen nothing yet counts masked positions with a weight of one; the first score
    that it does see takes all of that back, since ``keep`` is then exactly zero.
    """
    score = jnp.where(seen, score, MASKED)
    top = jnp.maximum(sums.top, score.max(-1))
    p = jnp.exp(score - top[..., None])
    keep = jnp.exp(sums.top - top)
    o = product(spec, p.reshape(*v.shape[:-2], -1, v.shape[-2]), v)
    return Sums(
        sums.o * keep[..., None] + o.reshape(sums.o.shape), sums.total * keep + p.sum(-1), top
    )


def _finish(sums: Sums) -> jax.Array:
    return sums.o / jnp.maximum(sums.total, np.finfo(np.float32).tiny)[..., None]


def _seen(pos_WQ: jax.Array, pos_WS: jax.Array, span: Span) -> jax.Array:
    """bool[W, Q, S]: positions at or before each query's own, down to the lowest it sees."""
    seen = pos_WS[:, None] <= pos_WQ[:, :, None]
    return seen & (pos_WS[:, None] >= span.lowest(pos_WQ)[:, :, None]) if span else seen


# --- prefill rows


def prefill_rows(q: Queries, layer: Layer, view: StepView, tokens: int = Q_PREFILL) -> jax.Array:
    """float32[P, K, G, V] of the prefill rows, in tiles of ``tokens``."""
    D, F, P = view.D, view.F, view.P
    K, G, _ = q.near.shape[1:]
    Q = min(tokens, P)
    table_FM, S = _blocked(view.page_table_RM[D:], layer.Z, S_PREFILL)
    first_F = view.first_R[D:] - D * view.J
    start_F, count_F = view.start_R[D:], view.count_R[D:]
    n_F = -(-count_F // Q)
    end_F = jnp.cumsum(n_F)

    def tile(i: jax.Array, out_PKGV: jax.Array) -> jax.Array:
        f = jnp.minimum((end_F <= i).sum(), F - 1)
        skip = (i - (end_F - n_F)[f]) * Q
        n = jnp.minimum(count_F[f] - skip, Q)
        index_Q = jnp.arange(Q, dtype=jnp.int32)
        at_Q = jnp.where(index_Q < n, first_F[f] + skip + index_Q, P)
        own = jax.tree.map(lambda x: x.at[at_Q].get(mode="clip").swapaxes(0, 1), q)
        o_KQGV = _tile(own, layer, table_FM[f], start_F[f] + skip, n, S)
        return out_PKGV.at[at_Q].set(o_KQGV.swapaxes(0, 1), mode="drop")

    return lax.fori_loop(0, end_F[-1], tile, jnp.zeros((P, K, G, layer.V), jnp.float32))


def _tile(
    q: Queries,
    layer: Layer,
    table_M: jax.Array,
    start: jax.Array,
    n: jax.Array,
    S: int,
) -> jax.Array:
    """float32[K, Q, G, V] of ``n`` tokens from position ``start`` of the row with this page
    table."""
    K, Q, G, H = q.near.shape
    B, span = S // layer.Z, layer.span
    pos_Q = start + jnp.arange(Q, dtype=jnp.int32)
    first = span.lowest(start) // S if span else 0

    def add(q_KQGH: jax.Array, pages_B: jax.Array, seen_QS: jax.Array, sums: Sums) -> Sums:
        blocks = layer.read(pages_B[None])
        score = product("kqh,ksh->kqs", q_KQGH.reshape(K, Q * G, H), blocks.k_WKSH[0])
        score = capped(score.reshape(K, Q, G, S), layer.soft_cap)
        return _add(sums, score, seen_QS[:, None], "kqs,ksh->kqh", blocks.v_WKSV[0])

    def block(b: jax.Array, sums: Sums) -> Sums:
        pages_B = lax.dynamic_slice_in_dim(table_M, b * B, B)
        pos_S = b * S + jnp.arange(S, dtype=jnp.int32)
        seen_QS = _seen(pos_Q[None], pos_S[None], span)[0] & (pos_S < start + n)
        return add(q.near, pages_B, seen_QS, sums)

    sums = _no_sums((K, Q, G), layer)
    for at, seen_QS in _sinks(pos_Q, layer, S):
        assert q.far is not None
        sums = add(q.far, table_M[at : at + B], seen_QS, sums)
    return _finish(lax.fori_loop(first, -(-(start + n) // S), block, sums))
