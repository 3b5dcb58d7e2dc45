"""One layer over whole texts, without a pool of KV: for what looks at layers one by one, such as calibration.

It owns an attention backend whose KV is that of the texts themselves, and the activations that enter the products of a
layer.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.arch import Arch, Mlp
from jserve.model.attention import AttendArgs, AttentionBackend, LayerKV, capped
from jserve.model.ctx import Ctx
from jserve.model.decoder import decoder_layer
from jserve.model.dot import watched
from jserve.model.shard import Axes
from jserve.model.view import StepView

PRODUCTS = ("qkv", "o", "gate_up", "down")
"""The matrices of a dense layer, in the order in which it multiplies them."""


def check_dense(arch: Arch, what: str) -> None:
    """Refuse a model with experts or latents, whose products are not these. Raises ConfigError; ``field`` is the key of
    config.json."""
    for layer in arch.layers:
        if not isinstance(layer.ffn, Mlp):
            raise ConfigError(
                f"{what} is for dense models; this one has experts ({arch.family})",
                field="num_experts",
            )
        if layer.attn.latent is not None:
            raise ConfigError(
                f"{what} is for plain attention; this model has latents ({arch.family})",
                field="kv_lora_rank",
            )


def layer_pass(
    arch: Arch, layer: int, p: Any, x_BSD: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A layer over texts that begin at position 0.

    Args:
        layer: its number.
        p: its parameters, in the layout of one device; ``QTensor``s are taken.
        x_BSD: the residual stream that enters it, float32. A text that is shorter than S is padded at its end: no
            token sees what comes after it.

    Returns:
        What leaves it, float32[B, S, D], and the activations that enter each of ``PRODUCTS``, float32[B, S, inputs].
    """
    return _pass(arch, arch.layers.index(arch.layers[layer]), p, x_BSD)


@partial(jax.jit, static_argnums=(0, 1))
def _pass(
    arch: Arch, like: int, p: Any, x_BSD: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    def one(x_SD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        ctx = Ctx.of(arch, _view(x_SD.shape[0]), WHOLE, Axes()).with_tables().at(like)
        with watched() as products:
            y_SD = decoder_layer(p, x_SD, ctx, (x_SD, x_SD))[0]
        names = {id(p[name]): name for name in PRODUCTS}
        return y_SD, {names[id(w)]: x for x, w in products if id(w) in names}

    return jax.lax.map(one, x_BSD)


def _view(S: int) -> StepView:
    given: dict[str, Any] = {f.name: None for f in dataclasses.fields(StepView)}
    return StepView(**{**given, "pos_T": jnp.arange(S, dtype=jnp.int32)})


def _write(kv: LayerKV, k_SKH: jax.Array, v_SKH: jax.Array, view: StepView) -> LayerKV:
    return k_SKH, v_SKH


def _attend(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    """float32[S, N, H]: each token sees itself and what is before it, as far as its span goes."""
    k_SKH, v_SKH = kv
    S, N, H = args.q_TNH.shape
    K = k_SKH.shape[1]
    at = jnp.arange(S)
    low_S = args.span.lowest(at)
    seen_TS = (at[None] <= at[:, None]) & (at[None] >= low_S[:, None])
    q_TKGH = args.q_TNH.reshape(S, K, N // K, H) * args.scale
    score_KGTS = capped(jnp.einsum("tkgh,skh->kgts", q_TKGH, k_SKH), args.soft_cap)
    score_KGTS = jnp.where(seen_TS, score_KGTS, -jnp.inf)
    sinks_KG = args.sink_logits(K)
    if sinks_KG is not None:
        sinks_KGT1 = jnp.broadcast_to(sinks_KG[..., None, None], (*score_KGTS.shape[:3], 1))
        score_KGTS = jnp.concatenate([score_KGTS, sinks_KGT1], axis=-1)
    weight_KGTS = jax.nn.softmax(score_KGTS, axis=-1)[..., :S]
    return jnp.einsum("kgts,skh->tkgh", weight_KGTS, v_SKH).reshape(S, N, H)


def _no_move(kv: LayerKV, old: Any, new: Any) -> LayerKV:
    raise AssertionError("there are no pages")


WHOLE = AttentionBackend(
    name="whole",
    kv_axis=0,
    kv_shape=lambda heads, width, n_pages, page_size: (page_size, heads, width),
    write_kv=_write,
    attend=_attend,
    move=_no_move,
)
