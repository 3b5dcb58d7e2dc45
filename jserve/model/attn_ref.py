"""The oracle: attention over the whole page table in plain jnp, any shape, any platform, for
reading and tests.

It owns nothing but clarity; every other backend is tested against it. Keys and values are [P, Z, K, H]; each token
sees all pages of its row, masked to the positions at or before its own::

    page_table_RM[row]  ->  [M, Z, K, H]  ->  [S, K, H]      S = M * Z, entry s holds position s
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jserve.kv_layout import Span
from jserve.model.attention import (
    AttendArgs,
    AttentionBackend,
    LatentArgs,
    LayerKV,
    Places,
    Sinks,
    capped,
)
from jserve.model.draft_tree import seen_in_tree
from jserve.model.kv_bytes import widened
from jserve.model.kv_quant import stored
from jserve.model.view import StepView


def kv_shape(K: int, H: int, n_pages: int, page_size: int) -> tuple[int, ...]:
    return (n_pages, page_size, K, H)


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """Scatter each token's key and value to its page and offset."""
    at = (view.write_page_T, view.write_off_T)
    keys, values = kv
    return (
        keys.at[at].set(stored(k_TKH, keys.dtype, keys.shape[-1])),
        values.at[at].set(stored(v_TKH, values.dtype, values.shape[-1])),
    )


def attend(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    """float32[T, N, H]; zero for padding tokens."""
    span, scale, sinks = args.span, args.scale, args.sinks
    T, N, H = args.q_TNH.shape
    row_T = jnp.minimum(view.row_T, view.page_table_RM.shape[0] - 1)
    k_TSKH, v_TSKH = (_gather(x, view.page_table_RM, H)[row_T] for x in kv)
    K = k_TSKH.shape[2]
    seen_TS = _mask(view.pos_T, k_TSKH.shape[1], span)
    if view.tree is not None:
        seen_TS = _of_trees(seen_TS, view, span)
    far_TS = _far(view.pos_T, k_TSKH.shape[1], span, sinks)
    seen_TS = seen_TS | far_TS
    # Pages beyond the context may hold anything, also NaN, which 0 * v would not stop.
    k_TSKH = jnp.where(seen_TS[:, :, None, None], k_TSKH, 0.0)
    v_TSKH = jnp.where(seen_TS[:, :, None, None], v_TSKH, 0.0)
    q_TKGH = args.q_TNH.astype(jnp.float32).reshape(T, K, N // K, H) * scale
    score_TKGS = jnp.einsum("tkgh,tskh->tkgs", q_TKGH, k_TSKH)
    if sinks is not None:
        far_TKGH = sinks.q_TNH.astype(jnp.float32).reshape(q_TKGH.shape) * scale
        far_TKGS = jnp.einsum("tkgh,tskh->tkgs", far_TKGH, k_TSKH)
        score_TKGS = jnp.where(far_TS[:, None, None], far_TKGS, score_TKGS)
    score_TKGS = capped(score_TKGS, args.soft_cap)
    score_TKGS = jnp.where(seen_TS[:, None, None], score_TKGS, -jnp.inf)
    p_TKGS = _softmax(score_TKGS, args.sink_logits(K))
    return jnp.einsum("tkgs,tskh->tkgh", p_TKGS, v_TSKH).reshape(T, N, H)


def attend_latent(args: LatentArgs, pool_PZC: jax.Array, view: StepView) -> jax.Array:
    """float32[T, N, V]: the keys and values of every head, made from what is kept, and plain attention over them."""
    row_T = jnp.minimum(view.row_T, view.page_table_RM.shape[0] - 1)
    C = pool_PZC.shape[-1]
    kept_TSC = _gather(pool_PZC[:, :, None], view.page_table_RM, C)[row_T][:, :, 0]
    seen_TS = _mask(view.pos_T, kept_TSC.shape[1], Span())
    if view.tree is not None:
        seen_TS = _of_trees(seen_TS, view, Span())
    kept_TSC = jnp.where(seen_TS[:, :, None], kept_TSC, 0.0)
    A = args.k_up_NHA.shape[2]
    c_TSA, k_TSY = kept_TSC[..., :A], kept_TSC[..., A:]
    k_TSNH = jnp.einsum("tsa,nha->tsnh", c_TSA, args.k_up_NHA.astype(jnp.float32))
    v_TSNV = jnp.einsum("tsa,nva->tsnv", c_TSA, args.v_up_NVA.astype(jnp.float32))
    score_TNS = jnp.einsum("tnh,tsnh->tns", args.q_TNH, k_TSNH)
    score_TNS = (score_TNS + jnp.einsum("tny,tsy->tns", args.q_TNY, k_TSY)) * args.scale
    score_TNS = jnp.where(seen_TS[:, None], score_TNS, -jnp.inf)
    return jnp.einsum("tns,tsnv->tnv", _softmax(score_TNS, None), v_TSNV)


def _softmax(score_TKGS: jax.Array, sink_KG: jax.Array | None) -> jax.Array:
    """The weights of values, zero where a score is -inf; with sink logits they sum to less than one."""
    if sink_KG is not None:
        sink_TKG1 = jnp.broadcast_to(sink_KG[..., None], (*score_TKGS.shape[:-1], 1))
        return _softmax(jnp.concatenate([score_TKGS, sink_TKG1], axis=-1), None)[..., :-1]
    top = jnp.maximum(score_TKGS.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    p_TKGS = jnp.exp(score_TKGS - top)
    return p_TKGS / jnp.maximum(p_TKGS.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def _gather(x_PZKY: jax.Array, table_RM: jax.Array, H: int) -> jax.Array:
    R, M = table_RM.shape
    _, Z, K, _ = x_PZKY.shape
    return widened(x_PZKY[table_RM], H).reshape(R, M * Z, K, H).astype(jnp.float32)


def _mask(pos_T: jax.Array, S: int, span: Span) -> jax.Array:
    """bool[T, S]: positions at or before the token's own, down to the lowest it sees."""
    s_S = jnp.arange(S, dtype=jnp.int32)
    seen_TS = s_S <= pos_T[:, None]
    return seen_TS & (s_S >= span.lowest(pos_T)[:, None])


def _of_trees(seen_TS: jax.Array, view: StepView, span: Span) -> jax.Array:
    """``seen_TS`` with the rows of decode tokens as the tree of their drafts has them."""
    assert view.tree is not None
    n = view.D * view.J
    s_DS = jnp.tile(jnp.arange(seen_TS.shape[1], dtype=jnp.int32), (view.D, 1))
    seen_DJS = seen_in_tree(view.tree, view.start_R[: view.D], s_DS, span)
    tree_nS = seen_DJS.reshape(n, -1) & (view.pos_T[:n] >= 0)[:, None]
    return jnp.concatenate([tree_nS, seen_TS[n:]])


def move(kv: LayerKV, old: Places, new: Places) -> LayerKV:
    """Copy entries to other places."""
    keys, values = kv
    return keys.at[new].set(keys[old]), values.at[new].set(values[old])


def _far(pos_T: jax.Array, S: int, span: Span, sinks: Sinks | None) -> jax.Array:
    """bool[T, S]: sinks that lie behind what the token sees."""
    s_S = jnp.arange(S, dtype=jnp.int32)
    n = 0 if sinks is None else sinks.n
    return (s_S < n) & (s_S < span.lowest(pos_T)[:, None])


REF = AttentionBackend(
    name="ref",
    kv_axis=2,
    kv_shape=kv_shape,
    write_kv=write_kv,
    attend=attend,
    attend_latent=attend_latent,
    move=move,
)
