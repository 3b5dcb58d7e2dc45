"""Decoder layers whose products alone are XLA's: a backend's ``DecodeKernels`` do all that lies between them.

It owns the order of such layers, of steps that have decode rows of one token and nothing else. Ten kernels a layer on
a GPU, each waiting for the one before::

    qkv -> write, attend, combine -> o -> add_norm -> gate_up -> SwiGLU -> down -> add_norm (of the next layer)

XLA splits the depth of a product of few rows over the device and lets the next fusion add the partial sums. A kernel
of ours is no fusion, so the split is in the program, and the kernel adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.arch import Arch, DecoderLayer, Mlp
from jserve.model.attention import DecodeKernels, LayerKV, Projected
from jserve.model.collectives import reduce
from jserve.model.ctx import Ctx
from jserve.model.layers import gated
from jserve.model.mesh import MeshAxis
from jserve.model.norms import rms_norm
from jserve.model.points import EMBED, NORMALIZED, POST, PRE, in_layer, inside
from jserve.model.quant import QTensor

TILE = 64
"""Outputs that one block of a product computes, by XLA's choice for few rows."""
BLOCKS = 264
"""Fewest blocks of a product that keep 132 multiprocessors busy: two each, as XLA itself splits."""
PARTS = 8
"""Most partial sums, so that a thread of the kernel that adds them has registers for their loads."""
DEPTH = 64
"""The depth of a part is a multiple of this."""


def serves(ctx: Ctx, params: Any, kv: list[LayerKV], points: Sequence[str]) -> bool:
    """True if this step's layers are of the kind that the backend has kernels for, and nothing is read inside of
    them."""
    arch, view, kernels = ctx.arch, ctx.view, ctx.attn.decode
    alone = view.P == 0 and view.J == 1 and not arch.sinks and ctx.axes.embed is None
    alone = alone and not ctx.edits and not any(inside(points, i) for i in range(arch.L))
    if kernels is None or not (alone and plain(arch, params["layers"])):
        return False
    return kernels.serves(arch.D, arch.H, params["layers"][0]["qkv"].dtype, kv[0][0].dtype)


def plain(arch: Arch, layers: Any) -> bool:
    """True for layers as Llama's and Qwen's: norms before attention and MLP alone, one rope of whole heads."""
    places = {"attn_norm", "mlp_norm", "attn_out_norm", "mlp_out_norm"}
    return (
        len(arch.ropes) == 1
        and arch.ropes[0].rotary in (0, arch.H)
        and not (arch.ropes[0].pairs or arch.norm.centered or arch.norm.plus_one)
        and not any(isinstance(p.get("qkv"), QTensor) for p in layers)
        and all(places & set(p) == {"attn_norm", "mlp_norm"} for p in layers)
        and all(_plain_layer(layer) for layer in arch.layers)
    )


def _plain_layer(layer: DecoderLayer) -> bool:
    attn = layer.attn
    heads = attn.rope is not None and not attn.soft_cap and attn.qk_norm in ("", "head")
    heads = heads and not (attn.chunk or attn.sink_logits or attn.latent or attn.temperature)
    dense = isinstance(layer.ffn, Mlp) and not attn.clip_qkv
    return heads and dense and not layer.parallel and layer.residual_scale == 1.0


def tapped(
    ctx: Ctx, params: Any, kv: list[LayerKV], x_TD: jax.Array, points: Sequence[str]
) -> tuple[jax.Array, list[LayerKV], list[jax.Array]]:
    """As ``decoder.tapped``, from the embedding on."""
    arch, layers = ctx.arch, params["layers"]
    layer = jax.jit(_layer)
    found, first, new_kv = {EMBED: x_TD}, {}, list(kv)
    after = [*(p["attn_norm"] for p in layers[1:]), params["final_norm"]]
    normed_TD = rms_norm(x_TD, layers[0]["attn_norm"], arch.norm.eps)
    normed_TD = normed_TD.astype(layers[0]["qkv"].dtype)
    for i, (p, norm_D) in enumerate(zip(layers, after, strict=True)):
        found[in_layer(i, PRE)] = x_TD
        like, at = first.setdefault(arch.layers[i], i), ctx.view.array(i)
        of_layer = ctx.of_layer(i, like)
        with jax.named_scope(f"layer{i}"):
            x_TD, normed_TD, new_kv[at] = layer(p, norm_D, x_TD, normed_TD, of_layer, new_kv[at])
        found[in_layer(i, POST)] = x_TD
    found[NORMALIZED] = normed_TD.astype(jnp.float32)
    return found[NORMALIZED], new_kv, [found[name] for name in points]


def _layer(
    p: Any, norm_D: jax.Array, x_TD: jax.Array, normed_TD: jax.Array, ctx: Ctx, kv: LayerKV
) -> tuple[jax.Array, jax.Array, LayerKV]:
    """(residual stream after the layer, the same normed by ``norm_D``, this layer's new KV)."""
    kernels, spec, T = _kernels(ctx), ctx.spec.attn, x_TD.shape[0]
    assert ctx.tables is not None, "a layer needs Ctx.with_tables"
    y_STN = split_product(normed_TD, p["qkv"])
    projected = Projected(
        y_STKCH=y_STN.reshape(*y_STN.shape[:2], *p["qkv"].shape[:3]),
        bias_KCH=p.get("qkv_bias"),
        norms=(p["q_norm"], p["k_norm"]) if spec.qk_norm else None,
        eps=ctx.arch.norm.eps,
        tables=ctx.tables[0],
        window=spec.window,
        scale=spec.scale or spec.H**-0.5,
    )
    o_TNH, kv = kernels.attend(projected, kv, ctx.view)
    axes, o = ctx.axes, p["o"]
    y_STD = split_product(o_TNH.reshape(T, -1), o)
    y_STD = _whole(y_STD, p.get("o_bias"), axes.heads, axes.exchanged(o))
    x_TD, normed_TD = _add_norm(ctx, y_STD, x_TD, p["mlp_norm"])
    h_TF = gated(ctx, p, normed_TD).astype(p["down"].dtype)
    y_STD = split_product(h_TF, p["down"])
    y_STD = _whole(y_STD, p.get("down_bias"), axes.ffn, axes.exchanged(p["down"]))
    return (*_add_norm(ctx, y_STD, x_TD, norm_D), kv)


def _kernels(ctx: Ctx) -> DecodeKernels:
    assert ctx.attn.decode is not None, "asked by serves"
    return ctx.attn.decode


def _add_norm(
    ctx: Ctx, y_STD: jax.Array, x_TD: jax.Array, weight_D: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weights of a norm are of the type that the products after it multiply."""
    return _kernels(ctx).add_norm(y_STD, x_TD, weight_D, ctx.arch.norm.eps, weight_D.dtype)


def split_product(x_TD: jax.Array, w_ND: jax.Array) -> jax.Array:
    """float32[S, T, N]: ``dot`` as partial sums over S equal parts of D, as many as keep the device busy."""
    w_ND = w_ND.reshape(-1, w_ND.shape[-1])
    N, D = w_ND.shape
    S = 1
    while N // TILE * S < BLOCKS and S < PARTS and D % (2 * S * DEPTH) == 0:
        S *= 2
    x_TSX, w_NSX = x_TD.reshape(-1, S, D // S), w_ND.reshape(N, S, D // S)
    dims = (((2,), (2,)), ((1,), (1,)))
    return lax.dot_general(x_TSX, w_NSX, dims, preferred_element_type=jnp.float32)


def _whole(y_STD: jax.Array, bias_D: jax.Array | None, axis: MeshAxis, exchanged: Any) -> jax.Array:
    """Partial sums that lack nothing: with a bias, or those of other devices, one in place of several."""
    if axis is None and bias_D is None:
        return y_STD
    y_TD = reduce(y_STD.sum(0), axis, exchanged)
    return (y_TD if bias_D is None else y_TD + bias_D)[None]
