"""Attention that has a gradient: each token sees the tokens of its own segment, which lie beside it, and no pages.

It owns the backend of ``jserve.functional``. The KV of a layer are the keys and values of the tokens themselves, and
loops have static lengths, so that reverse mode can follow them. Scores exist for a block of queries at a time, and
are computed again in the backward pass::

    tokens   | a a a a b b b c c c c c c pad |      keys of a block: its own tokens, and as many before it as a
    queries              [ block ]                  segment, or the layer's window, reaches back
    keys       [ reach  |  block ]
"""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.arch import Moe
from jserve.model.attention import (
    AttendArgs,
    AttentionBackend,
    ExpertKernel,
    LatentArgs,
    LayerKV,
    Places,
    capped,
)
from jserve.model.dot import activated, dot
from jserve.model.kv_quant import stored
from jserve.model.moe import Outputs, Params
from jserve.model.view import StepView

BLOCK = 64
"""Queries whose scores exist at once; tokens come in a multiple of it."""


@lru_cache(maxsize=64)
def train(longest: int) -> AttentionBackend:
    """The backend for segments of at most ``longest`` tokens; what lies further back is not seen."""
    return AttentionBackend(
        name="train",
        kv_axis=2,
        kv_shape=lambda K, H, n_pages, page_size: (n_pages, page_size, K, H),
        write_kv=write_kv,
        attend=partial(attend, longest),
        attend_latent=partial(attend_latent, longest),
        move=_no_move,
        has_sinks=False,
        experts=ExpertKernel(serves=lambda *_: True, form=every_expert),
    )


def _no_move(kv: LayerKV, old: Places, new: Places) -> LayerKV:
    raise AssertionError("there are no pages")


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """Keys and values of the tokens [T, 1, K, H], rounded as the pool that is ``kv`` would."""
    keys, values = kv
    return stored(k_TKH, keys.dtype)[:, None], stored(v_TKH, values.dtype)[:, None]


def attend(longest: int, args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    """float32[T, N, H]; zero for padding tokens."""
    T, N, H = args.q_TNH.shape
    k_TKH, v_TKH = (x[:, 0].astype(jnp.float32) for x in kv)
    K = k_TKH.shape[1]
    q_TKGH = args.q_TNH.astype(jnp.float32).reshape(T, K, N // K, H) * args.scale
    sink_KG = args.sink_logits(K)

    def block(q_BKGH: jax.Array, seen_BS: jax.Array, k_SKH: jax.Array, v_SKH: jax.Array):
        score_BKGS = capped(jnp.einsum("bkgh,skh->bkgs", q_BKGH, k_SKH), args.soft_cap)
        p_BKGS = _softmax(score_BKGS, seen_BS[:, None, None], sink_KG)
        return jnp.einsum("bkgs,skh->bkgh", p_BKGS, v_SKH)

    reach = min(longest, args.span.most or longest)
    o_TKGH = _by_block(block, view, args, reach, (q_TKGH,), (k_TKH, v_TKH))
    return o_TKGH.reshape(T, N, -1)


def attend_latent(longest: int, args: LatentArgs, pool_T1C: jax.Array, view: StepView) -> jax.Array:
    """float32[T, N, V]: the keys and values of every head, made from what is kept, and plain attention over them."""
    A, kept_TC = args.k_up_NHA.shape[2], pool_T1C[:, 0].astype(jnp.float32)
    k_up_NHA, v_up_NVA = (x.astype(jnp.float32) for x in (args.k_up_NHA, args.v_up_NVA))

    def block(q_BNH: jax.Array, q_BNY: jax.Array, seen_BS: jax.Array, kept_SC: jax.Array):
        c_SA = kept_SC[:, :A]
        score_BNS = jnp.einsum("bnh,snh->bns", q_BNH, jnp.einsum("sa,nha->snh", c_SA, k_up_NHA))
        score_BNS = score_BNS + jnp.einsum("bny,sy->bns", q_BNY, kept_SC[:, A:])
        p_BNS = _softmax(score_BNS * args.scale, seen_BS[:, None], None)
        return jnp.einsum("bns,snv->bnv", p_BNS, jnp.einsum("sa,nva->snv", c_SA, v_up_NVA))

    return _by_block(block, view, None, longest, (args.q_TNH, args.q_TNY), (kept_TC,))


def _by_block(block, view: StepView, args: AttendArgs | None, reach: int, queries, keys):
    """``block(*queries of B tokens, bool[B, S], *keys of S tokens)`` for all tokens, [T, ...]; S is the block and up to
    ``reach`` - 1 tokens before it."""
    T = view.pos_T.shape[0]
    before = min(reach, T) - 1

    def ahead(x: jax.Array, fill: int = 0) -> jax.Array:
        return jnp.pad(x, ((before, 0), *[(0, 0)] * (x.ndim - 1)), constant_values=fill)

    keys = [ahead(x) for x in keys]
    pos_S, row_S = ahead(view.pos_T, -1), ahead(view.row_T, -1)

    @jax.checkpoint
    def one(i: jax.Array) -> jax.Array:
        of_queries = partial(lax.dynamic_slice_in_dim, start_index=i * BLOCK, slice_size=BLOCK)
        of_keys = partial(of_queries, slice_size=before + BLOCK)
        pos_B1, row_B1 = of_queries(view.pos_T)[:, None], of_queries(view.row_T)[:, None]
        at_S = of_keys(pos_S)
        seen_BS = (of_keys(row_S) == row_B1) & (at_S <= pos_B1) & (at_S >= 0)
        if args is not None:
            seen_BS &= at_S >= args.span.lowest(pos_B1)
        return block(*map(of_queries, queries), seen_BS, *map(of_keys, keys))

    o_IB = lax.map(one, jnp.arange(T // BLOCK))
    return o_IB.reshape(T, *o_IB.shape[2:])


def _softmax(score: jax.Array, seen: jax.Array, sink_KG: jax.Array | None) -> jax.Array:
    """The weights of values along the last axis, zero where nothing is seen. Masked scores are finite, because the
    gradient of a maximum of infinities is NaN."""
    low = jnp.finfo(jnp.float32).min
    score = jnp.where(seen, score, low)
    top = score.max(-1, keepdims=True)
    sink = 0.0
    if sink_KG is not None:
        top = lax.stop_gradient(jnp.maximum(top, sink_KG[..., None]))
        sink = jnp.exp(sink_KG[..., None] - top)
    p = jnp.where(seen, jnp.exp(score - lax.stop_gradient(top)), 0.0)
    return p / jnp.maximum(p.sum(-1, keepdims=True) + sink, jnp.finfo(jnp.float32).tiny)


def every_expert(
    moe: Moe, p: Params, x_TD: jax.Array, expert_TX: jax.Array, scale_TX: jax.Array
) -> Outputs:
    """A form of ``moe.FORMS``: each expert in turn computes every token, E / X times the work of the others, and an
    assignment keeps the output of its own."""
    T, X = expert_TX.shape
    x_TXD = jnp.broadcast_to(x_TD[:, None], (T, X, x_TD.shape[1]))
    if moe.router.on_input:
        x_TXD = x_TXD * scale_TX[:, :, None]
    n = X if moe.router.on_input else 1
    x_ND = x_TXD[:, :n].reshape(T * n, -1)
    w = p["expert_gate_up"]
    leaves = [w.reshape(moe.E, -1, w.shape[-1]), p["expert_down"]]
    if moe.expert_bias:
        leaves.append(p["expert_gate_up_bias"].reshape(moe.E, -1))

    @jax.checkpoint
    def one(y_TXD: jax.Array, item: tuple[jax.Array, list[jax.Array]]):
        e, (gate_up, down, *bias) = item
        h_NF2 = dot(x_ND, gate_up) + (bias[0] if bias else 0.0)
        gate, up = jnp.split(h_NF2, 2, axis=1)
        y_TnD = dot(activated(moe.activation, gate, up), down).reshape(T, n, -1)
        return jnp.where((expert_TX == e)[:, :, None], y_TnD, y_TXD), None

    y_TXD, _ = lax.scan(one, jnp.zeros_like(x_TXD), (jnp.arange(moe.E), leaves))
    return y_TXD.reshape(T * X, -1), jnp.arange(T * X).reshape(T, X)
