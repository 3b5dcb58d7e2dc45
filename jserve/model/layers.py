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

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.arch import Arch
from jserve.model.attention import AttendArgs, LayerKV
from jserve.model.collectives import gather, reduce, shard_index
from jserve.model.ctx import Ctx
from jserve.model.dot import dot, gate_up
from jserve.model.kv_quant import fold, scales_of, unfold
from jserve.model.rope import rotate
from jserve.model.shard import Axes
from jserve.model.sinks import sinks_of

Params = Mapping[str, jax.Array]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last dimension, in float32."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)


def attention_block(ctx: Ctx, p: Params, x_TD: jax.Array, kv: LayerKV) -> tuple[jax.Array, LayerKV]:
    """(what the layer's attention adds to the residual stream, this layer's new KV)."""
    return attend_normed(ctx, p, rms_norm(x_TD, p["attn_norm"], ctx.arch.norm_eps), kv)


def attend_normed(ctx: Ctx, p: Params, x_TD: jax.Array, kv: LayerKV) -> tuple[jax.Array, LayerKV]:
    """``attention_block`` of what is normed already."""
    assert ctx.tables is not None, "a layer needs Ctx.with_tables"
    scale_K2 = scales_of(p, kv[0])
    q_TNH, k_TKH, v_TKH = fold(scale_K2, *_qkv(ctx.arch, p, x_TD))
    kv = ctx.attn.write_kv(kv, rotate(k_TKH, *ctx.tables), v_TKH, ctx.view)
    sinks = sinks_of(ctx, q_TNH)
    args = AttendArgs(
        q_TNH=rotate(q_TNH, *ctx.tables),
        window=ctx.window,
        scale=ctx.arch.H**-0.5,
        sinks=sinks,
        o_dtype=p["o"].dtype if scale_K2 is None else jnp.float32,
    )
    o_TNH = unfold(scale_K2, ctx.attn.attend(args, kv, ctx.view))
    y_TD = reduce(dot(o_TNH.reshape(o_TNH.shape[0], -1), p["o"]), ctx.axes.heads)
    return y_TD + p["o_bias"] if "o_bias" in p else y_TD, kv


def _qkv(arch: Arch, p: Params, x_TD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of the tokens, not yet turned to their positions."""
    K, group, H, _ = p["qkv"].shape
    y_TKGH = dot(x_TD, p["qkv"]).reshape(-1, K, group, H)
    if "qkv_bias" in p:
        y_TKGH = y_TKGH + p["qkv_bias"]
    q_TNH = y_TKGH[:, :, :-2].reshape(-1, K * (group - 2), H)
    k_TKH, v_TKH = y_TKGH[:, :, -2], y_TKGH[:, :, -1]
    if arch.qk_norm:
        q_TNH = rms_norm(q_TNH, p["q_norm"], arch.norm_eps)
        k_TKH = rms_norm(k_TKH, p["k_norm"], arch.norm_eps)
    return q_TNH, k_TKH, v_TKH


def mlp_block(ctx: Ctx, p: Params, x_TD: jax.Array) -> jax.Array:
    """What the layer's SiLU-gated MLP adds to the residual stream."""
    x_TD = rms_norm(x_TD, p["mlp_norm"], ctx.arch.norm_eps)
    h_TF = gate_up(x_TD, p["gate_up"], p.get("gate_up_bias"))
    y_TD = reduce(dot(h_TF, p["down"]), ctx.axes.ffn)
    return y_TD + p["down_bias"] if "down_bias" in p else y_TD


def embed(table_VD: jax.Array, tok_T: jax.Array, axes: Axes) -> jax.Array:
    """float32[T, D] of int32[T]; where the vocabulary is split, each shard holds a contiguous range
    of it."""
    if axes.vocab is None:
        return _rows(table_VD, tok_T)
    V = table_VD.shape[0]
    local_T = tok_T - shard_index(axes.vocab) * V
    mine_T = (local_T >= 0) & (local_T < V)
    x_TD = _rows(table_VD, jnp.where(mine_T, local_T, 0))
    return reduce(jnp.where(mine_T[:, None], x_TD, 0.0), axes.vocab)


def _rows(table_VD: jax.Array, at_T: jax.Array) -> jax.Array:
    """float32[T, D]. Bound to the tokens, or XLA:CPU widens the whole table before a loop of drafts, in every
    step, since it only picks what is float32."""
    table_VD, at_T = lax.optimization_barrier((table_VD, at_T))
    return table_VD[at_T].astype(jnp.float32)


def unembed(table_VD: jax.Array, x_ED: jax.Array, axes: Axes, V: int) -> jax.Array:
    """float32[E, V], the whole vocabulary on every shard.

    Columns from V on, of rows that only make the shards equal (``shard.padded``), end here: what reads
    logits knows V tokens.
    """
    y_EV = dot(x_ED, table_VD)
    return y_EV if axes.vocab is None else gather(y_EV, axes.vocab, 1)[:, :V]
