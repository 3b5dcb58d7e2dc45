"""The parts that decoders are made of: norms, attention and MLP blocks, embedding and unembedding.

It owns the arithmetic between the attention backend and the residual stream. Activations are float32; every matrix
product goes through ``dot``, which computes in the type of the weight. ``axes`` says over which mesh axis each
dimension is split; each collective reads the axis of its own dimension and is left out where that is None::

    qkv [K, G+2, H, D]   heads of kv group k: its G queries, its key, its value     sharded over K
    o   [D, N*H]         row-parallel: partial sums, psum over ``axes.heads``       sharded over N*H
    gate_up [2, F, D]    down [D, F], row-parallel, psum over ``axes.ffn``          sharded over F
    embed [V, D]         rows of other shards give zero, psum over ``axes.vocab``   sharded over V
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model import mla
from jserve.model.arch import Moe
from jserve.model.attention import AttendArgs, LayerKV
from jserve.model.collectives import gather, n_shards, own_columns, reduce, shard_index
from jserve.model.ctx import Ctx
from jserve.model.dot import activated, dot, gate_up, stacked_dot
from jserve.model.kv_bytes import rotated
from jserve.model.kv_quant import fold, scales_of, unfold
from jserve.model.moe import mixture
from jserve.model.norms import l2_norm, normed
from jserve.model.points import HOOK_K, HOOK_Q, HOOK_V, HOOK_Z, ROT_K, ROT_Q
from jserve.model.shard import Axes
from jserve.model.sinks import sinks_of

Params = Mapping[str, jax.Array]
Found = dict[str, jax.Array]
"""Point of the layer -> its values."""


def attention_block(
    ctx: Ctx, p: Params, x_TD: jax.Array, kv: LayerKV, found: Found | None = None
) -> tuple[jax.Array, LayerKV]:
    """(what the layer's attention adds to the residual stream, this layer's new KV); ``found`` as of
    ``attend_normed``."""
    x_TD = entering(ctx, x_TD, p.get("attn_norm"), p.get("qkv"))
    y_TD, kv = attend_normed(ctx, p, x_TD, kv, found)
    return _added(ctx, y_TD, p.get("attn_out_norm")), kv


def entering(ctx: Ctx, x_TD: jax.Array, norm: jax.Array | None, weights: Any) -> jax.Array:
    """float32[T, D]: the residual stream as a sublayer reads it, normed, all of its tokens.

    Args:
        weights: the only ones that it is multiplied by, if that is in their type; else None, or ``QTensor``s.
    """
    alone = isinstance(weights, jax.Array) and not isinstance(ctx.spec.ffn, Moe)
    x_TD = normed(ctx.arch.norm, x_TD, norm, ctx.axes.embed)
    return ctx.all_tokens(x_TD, weights.dtype if alone else jnp.float32)


def _added(ctx: Ctx, y_TD: jax.Array, out_norm: jax.Array | None) -> jax.Array:
    """Computes what a sublayer's output adds to the residual stream."""
    y_TD = normed(ctx.arch.norm, y_TD, out_norm, ctx.axes.embed)
    scale = ctx.spec.residual_scale
    return y_TD if scale == 1.0 else y_TD * scale


def attend_normed(
    ctx: Ctx, p: Params, x_TD: jax.Array, kv: LayerKV, found: Found | None = None
) -> tuple[jax.Array, LayerKV]:
    """Attention over what is normed already, up to its output's bias. Those of ``ctx.points`` that lie in it are put
    into ``found``."""
    found = {} if found is None else found
    if ctx.spec.attn.latent is not None:
        return mla.attend_normed(ctx, p, x_TD, kv, found)
    scale_K2, spec = scales_of(p, kv, ctx.spec.attn.H), ctx.spec.attn
    q_TNH, k_TKH, v_TKH = _qkv(ctx, p, x_TD, found)
    if ROT_Q in ctx.points:
        found[ROT_Q] = ctx.all_heads(_warmer(ctx, _turned(ctx, q_TNH)), spec.N)
    if ROT_K in ctx.points:
        found[ROT_K] = ctx.all_heads(_turned(ctx, k_TKH), spec.K)
    q_TNH, k_TKH, v_TKH = fold(scale_K2, q_TNH, k_TKH, v_TKH)
    kv = ctx.attn.write_kv(kv, _spread(ctx, _turned(ctx, k_TKH)), v_TKH, ctx.view)
    sinks = sinks_of(ctx, q_TNH)
    if sinks is not None:
        sinks = replace(sinks, q_TNH=_spread(ctx, sinks.q_TNH))
    args = AttendArgs(
        q_TNH=_spread(ctx, _warmer(ctx, _turned(ctx, q_TNH))),
        window=spec.window,
        chunk=spec.chunk,
        sink_logits_N=p["sink_logits"].reshape(-1) if spec.sink_logits else None,
        scale=spec.scale or spec.H**-0.5,
        soft_cap=spec.soft_cap,
        sinks=sinks,
        o_dtype=p["o"].dtype if scale_K2 is None else jnp.float32,
    )
    o_TNH = unfold(scale_K2, ctx.attn.attend(args, kv, ctx.view))
    if HOOK_Z in ctx.points:
        found[HOOK_Z] = ctx.all_heads(o_TNH, spec.N)
    y_TD = dot(o_TNH.reshape(o_TNH.shape[0], -1), p["o"])
    y_TD = ctx.summed(y_TD, ctx.axes.heads, p["o"])
    return y_TD + p["o_bias"] if "o_bias" in p else y_TD, kv


def _qkv(
    ctx: Ctx, p: Params, x_TD: jax.Array, found: Found
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of the tokens, not yet turned to their positions."""
    K, group, H, _ = p["qkv"].shape
    y_TKGH = ctx.over_width(dot(x_TD, p["qkv"]), p["qkv"]).reshape(-1, K, group, H)
    if "qkv_bias" in p:
        y_TKGH = y_TKGH + p["qkv_bias"]
    q_TNH = y_TKGH[:, :, :-2].reshape(-1, K * (group - 2), H)
    k_TKH, v_TKH = y_TKGH[:, :, -2], y_TKGH[:, :, -1]
    spec, norm = ctx.spec.attn, ctx.arch.norm
    made = ((HOOK_Q, q_TNH, spec.N), (HOOK_K, k_TKH, spec.K), (HOOK_V, v_TKH, spec.K))
    found |= {name: ctx.all_heads(x, n) for name, x, n in made if name in ctx.points}
    if spec.qk_norm == "head":
        q_TNH, k_TKH = normed(norm, q_TNH, p["q_norm"]), normed(norm, k_TKH, p["k_norm"])
    if spec.qk_norm == "width":
        q_TNH, k_TKH = (
            _width_norm(ctx, x, p[name]) for x, name in ((q_TNH, "q_norm"), (k_TKH, "k_norm"))
        )
    if clip := spec.clip_qkv:
        q_TNH, k_TKH, v_TKH = (jnp.clip(x, -clip, clip) for x in (q_TNH, k_TKH, v_TKH))
    return q_TNH, k_TKH, v_TKH


def _turned(ctx: Ctx, x_TNH: jax.Array) -> jax.Array:
    """Heads turned to their tokens' positions, normed after it where the layer says so."""
    x_TNH, eps = ctx.turned(x_TNH), ctx.arch.norm.eps
    return l2_norm(x_TNH, eps) if ctx.spec.attn.qk_norm == "turned" else x_TNH


def _spread(ctx: Ctx, x_TNH: jax.Array) -> jax.Array:
    """Queries or keys as they meet, where KV is rotated."""
    return rotated(x_TNH) if ctx.arch.kv_rotated else x_TNH


def _warmer(ctx: Ctx, q_TNH: jax.Array) -> jax.Array:
    """Queries that grow with their position, where the layer says so."""
    t = ctx.spec.attn.temperature
    if t is None:
        return q_TNH
    steps_T = jnp.maximum(ctx.view.pos_T + 1, 0) // t.every
    return q_TNH * (1.0 + t.scale * jnp.log1p(steps_T.astype(jnp.float32)))[:, None, None]


def _width_norm(ctx: Ctx, x_TNH: jax.Array, weight: jax.Array) -> jax.Array:
    """RMS norm over all heads of a token, those of other shards among them."""
    axis, (_, N, H) = ctx.axes.heads, x_TNH.shape
    total_T11 = reduce(jnp.sum(x_TNH * x_TNH, axis=(1, 2), keepdims=True), axis)
    mean_T11 = total_T11 / (n_shards(axis) * N * H)
    scale_NH = weight.astype(jnp.float32).reshape(N, H)
    return x_TNH * lax.rsqrt(mean_T11 + ctx.arch.norm.eps) * scale_NH


def ffn_block(ctx: Ctx, p: Params, x_TD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Computes what the layer's MLP, or its experts, add to the residual stream, and the tokens int32[E] of each
    expert where they are counted."""
    y_TD, count_E = ffn_normed(ctx, p, entering(ctx, x_TD, p.get("mlp_norm"), p.get("gate_up")))
    return _added(ctx, y_TD, p.get("mlp_out_norm")), count_E


def ffn_normed(ctx: Ctx, p: Params, x_TD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """``ffn_block`` of what is normed already, before the norm of its output."""
    if isinstance(ctx.spec.ffn, Moe):
        return mixture(ctx, p, x_TD)
    return _mlp(ctx, p, x_TD), None


def _mlp(ctx: Ctx, p: Params, x_TD: jax.Array) -> jax.Array:
    y_TD = ctx.summed(dot(gated(ctx, p, x_TD), p["down"]), ctx.axes.ffn, p["down"])
    return y_TD + p["down_bias"] if "down_bias" in p else y_TD


def gated(ctx: Ctx, p: Params, x_TD: jax.Array) -> jax.Array:
    """float32[T, F]: what a gated MLP makes of what is normed already, before its last product."""
    weights, bias, activation = p["gate_up"], p.get("gate_up_bias"), ctx.spec.ffn.activation
    if ctx.axes.embed is None and not ctx.axes.partitioned:
        return gate_up(x_TD, weights, bias, activation)
    y_T2F = ctx.over_width(stacked_dot(x_TD, weights), weights)
    y_T2F = y_T2F if bias is None else y_T2F + bias
    return activated(activation, y_T2F[:, 0], y_T2F[:, 1])


def embed(table_VD: jax.Array, tok_T: jax.Array, axes: Axes) -> jax.Array:
    """float32[T, D] of int32[T]; where the vocabulary is split, each shard holds a contiguous range
    of it."""
    return gather(_own_embedded(table_VD, tok_T, axes), axes.embed, 1)


def _own_embedded(table_VD: jax.Array, tok_T: jax.Array, axes: Axes) -> jax.Array:
    """The columns that the table of this device has."""
    if axes.vocab is None:
        return _rows(table_VD, tok_T)
    V = table_VD.shape[0]
    local_T = tok_T - shard_index(axes.vocab) * V
    mine_T = (local_T >= 0) & (local_T < V)
    x_TD = _rows(table_VD, jnp.where(mine_T, local_T, 0))
    return reduce(jnp.where(mine_T[:, None], x_TD, 0.0), axes.vocab, axes.exchanged(table_VD))


def _rows(table_VD: jax.Array, at_T: jax.Array) -> jax.Array:
    """float32[T, D]. The barrier ties the table to the tokens: without it XLA:CPU converts the whole table to float32
    before a loop of drafts, in every step."""
    table_VD, at_T = lax.optimization_barrier((table_VD, at_T))
    return table_VD[at_T].astype(jnp.float32)


def unembed(table_VD: jax.Array, x_ED: jax.Array, axes: Axes, V: int) -> jax.Array:
    """float32[E, V], the whole vocabulary on every shard, or with ``axes.split_logits`` the columns of its part.

    Columns from V on, of rows that only make the shards equal (``shard.padded``), end here: what reads
    logits knows V tokens.
    """
    y_EV = reduce(dot(own_columns(x_ED, axes.embed), table_VD), axes.embed)
    if axes.split_logits:
        return y_EV
    y_EV = gather(y_EV, axes.vocab, 1)
    return y_EV if y_EV.shape[1] == V else y_EV[:, :V]
