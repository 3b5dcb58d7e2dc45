"""Multi-head latent attention as a part of a layer: its products, and its parameters.

A token keeps one vector c and one turned key that all heads share; a head's own key and value are products of c::

    x --kv_a--> [ c | key ]    c normed, key turned        kept: [ c | key ]      A + Y numbers, no heads
    x --q-----> [ own | turned ]  of each head             x --q_a--> norm --q--> where queries have a rank
    head n: key [ k_up[n] c | key ]   value v_up[n] c      o [D, N*V], row-parallel

Where q and the matrices ``k_up`` and ``v_up`` are split over heads, vectors and what makes them are whole on every
device. How keys are compared with queries, the attention backend decides (``AttentionBackend.attend_latent``).

Idea: DeepSeek-V2 (arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from jserve.model import latent_pool
from jserve.model.arch import Attention, Latent
from jserve.model.attention import LatentArgs, LayerKV
from jserve.model.ctx import Ctx
from jserve.model.dot import dot
from jserve.model.norms import rms_norm
from jserve.model.param_spec import ParamSpec, Part
from jserve.model.points import HOOK_Z

EPS = 1e-6
"""Of the norms of both vectors, whatever config.json says of others."""
Params = Mapping[str, jax.Array]


def attend_normed(
    ctx: Ctx, p: Params, x_TD: jax.Array, kv: LayerKV, found: dict[str, jax.Array]
) -> tuple[jax.Array, LayerKV]:
    """Attention over what is normed already, up to its output's bias: (what it gives, the layer's new KV). What it has
    at ``ctx.points`` is put into ``found``."""
    spec = ctx.spec.attn
    assert spec.latent is not None
    assert ctx.attn.attend_latent is not None, "checked at start"
    kv = (latent_pool.write(kv[0], _kept(ctx, p, x_TD, spec.latent), ctx.view),)
    q_TNX = _queries(p, x_TD, spec.latent)
    args = LatentArgs(
        q_TNH=q_TNX[..., : spec.latent.own],
        q_TNY=ctx.turned(q_TNX[..., spec.latent.own :]),
        k_up_NHA=p["k_up"],
        v_up_NVA=p["v_up"],
        scale=spec.scale,
    )
    o_TNV = ctx.attn.attend_latent(args, kv[0], ctx.view)
    if HOOK_Z in ctx.points:
        found[HOOK_Z] = ctx.all_heads(o_TNV, spec.N)
    y_TD = ctx.summed(dot(o_TNV.reshape(o_TNV.shape[0], -1), p["o"]), ctx.axes.heads, p["o"])
    return y_TD + p["o_bias"] if "o_bias" in p else y_TD, kv


def _kept(ctx: Ctx, p: Params, x_TD: jax.Array, latent: Latent) -> jax.Array:
    """float32[T, A + Y]: a token's vector, and the key that all heads share."""
    y_TC = dot(x_TD, p["kv_a"])
    y_TC = y_TC + p["kv_a_bias"] if "kv_a_bias" in p else y_TC
    c_TA = rms_norm(y_TC[:, : latent.rank], p["kv_a_norm"], EPS)
    key_T1Y = ctx.turned(y_TC[:, None, latent.rank :])
    return jnp.concatenate([c_TA, key_T1Y[:, 0]], axis=1)


def _queries(p: Params, x_TD: jax.Array, latent: Latent) -> jax.Array:
    """float32[T, N, H + Y], not yet turned."""
    if latent.q_rank:
        x_TD = dot(x_TD, p["q_a"])
        x_TD = x_TD + p["q_a_bias"] if "q_a_bias" in p else x_TD
        x_TD = rms_norm(x_TD, p["q_a_norm"], EPS)
    return dot(x_TD, p["q"]).reshape(x_TD.shape[0], -1, latent.own + latent.turned)


def specs(attn: Attention, D: int, at: str) -> dict[str, ParamSpec]:
    """The parameters of layer ``at``'s attention, a name."""
    latent, N = attn.latent, attn.N
    assert latent is not None
    C, Q, query = latent.width, latent.q_rank, latent.own + latent.turned
    layer = {
        "kv_a": _matrix(f"{at}.kv_a_proj_with_mqa", (C, D), (None, "embed")),
        "kv_a_norm": _vector(f"{at}.kv_a_layernorm.weight", latent.rank, mean=1.0),
        "k_up": _up(f"{at}.kv_b_proj.weight", N, latent, keys=True),
        "v_up": _up(f"{at}.kv_b_proj.weight", N, latent, keys=False),
        "q": _heads(f"{at}.{'q_b_proj' if Q else 'q_proj'}", N, query, Q or D),
        "o": _matrix(f"{at}.o_proj", (D, N * latent.value), ("embed", "kv_heads")),
    }
    if Q:
        layer["q_a"] = _matrix(f"{at}.q_a_proj", (Q, D), (None, "embed"))
        layer["q_a_norm"] = _vector(f"{at}.q_a_layernorm.weight", Q, mean=1.0)
    if attn.qkv_bias:
        layer["kv_a_bias"] = _vector(f"{at}.kv_a_proj_with_mqa.bias", C)
    if attn.qkv_bias and Q:
        layer["q_a_bias"] = _vector(f"{at}.q_a_proj.bias", Q)
    if attn.o_bias:
        layer["o_bias"] = _vector(f"{at}.o_proj.bias", D)
    return layer


def _up(name: str, N: int, latent: Latent, *, keys: bool) -> ParamSpec:
    """[N, H, A] or [N, V, A]: of each head's rows the first ones make its key, the others its value."""
    each = latent.own + latent.value
    first, end = (0, latent.own) if keys else (latent.own, each)
    shape = (N, end - first, latent.rank)
    part = Part(
        name=name,
        shape=(N * each, latent.rank),
        view=shape,
        cut=(N, each, latent.rank),
        within=(first, end),
    )
    return ParamSpec(shape=shape, axes=("kv_heads", None, "embed"), parts=(part,))


def _heads(name: str, N: int, width: int, D: int) -> ParamSpec:
    """[N, width, D]: rows of each head."""
    part = Part(name=f"{name}.weight", shape=(N * width, D), view=(N, width, D))
    return ParamSpec(shape=part.view, axes=("kv_heads", None, "embed"), parts=(part,))


def _matrix(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> ParamSpec:
    part = Part(name=f"{name}.weight", shape=shape, view=shape)
    return ParamSpec(shape=shape, axes=axes, parts=(part,))


def _vector(name: str, size: int, mean: float | None = None) -> ParamSpec:
    """[size], whole on every device; dummy scales of a norm, which have a ``mean``, are that."""
    part = Part(name=name, shape=(size,), view=(size,))
    spec = ParamSpec(shape=(size,), axes=(None,), parts=(part,))
    return spec if mean is None else replace(spec, init=0.0, init_mean=mean)
