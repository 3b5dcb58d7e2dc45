"""The pre-norm decoder that Llama, Qwen2, Qwen3 and Mistral share: its weights, forward pass and
logits.

It owns the order of the layers and the parameter tree. A family file is a config reader plus this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.kv_layout import heads_over
from jserve.model.arch import Arch
from jserve.model.attention import LayerKV
from jserve.model.ctx import Ctx
from jserve.model.dot import skip_unread
from jserve.model.layers import attention_block, embed, mlp_block, rms_norm, unembed
from jserve.model.shard import Axes, ParamSpec, Part


def forward(ctx: Ctx, params: Any, kv: list[LayerKV]) -> tuple[jax.Array, list[LayerKV]]:
    """(float32[T, D] after the final norm, the new KV of every layer)."""
    return tapped(ctx, params, kv, ())[:2]


def tapped(
    ctx: Ctx, params: Any, kv: list[LayerKV], layers: Sequence[int]
) -> tuple[jax.Array, list[LayerKV], list[jax.Array]]:
    """``forward``, and the residual stream float32[T, D] that enters each of ``layers``."""
    arch = ctx.arch
    x_TD = embed(params["embed"], ctx.view.tok_T, ctx.axes)
    x_TD = skip_unread(x_TD, ctx.view.pos_T >= 0)
    ctx = ctx.with_tables()
    layer = _traced_layer()
    entering, first, new_kv = {}, {}, []
    for i, p in enumerate(params["layers"]):
        entering[i] = x_TD
        like = first.setdefault(arch.window(i), i)
        with jax.named_scope(f"layer{i}"):
            x_TD, layer_kv = layer(p, x_TD, ctx.at(like), kv[i])
            new_kv.append(layer_kv)
    entering[arch.L] = x_TD
    y_TD = rms_norm(x_TD, params["final_norm"], arch.norm_eps)
    return y_TD, new_kv, [entering[i] for i in layers]


def embedded(params: Any, tok_T: jax.Array, axes: Axes) -> jax.Array:
    """float32[T, D]: the rows of the embedding."""
    return embed(params["embed"], tok_T, axes)


def _traced_layer() -> Any:
    """Layers alike in their window are one traced function, called again: tracing and lowering of a step
    take a third of the time, and XLA inlines the calls, so the program is the same."""

    def layer(p: Any, x_TD: jax.Array, ctx: Ctx, kv: LayerKV) -> tuple[jax.Array, LayerKV]:
        y_TD, kv = attention_block(ctx, p, x_TD, kv)
        x_TD = x_TD + y_TD
        return x_TD + mlp_block(ctx, p, x_TD), kv

    return jax.jit(layer)


def logits(arch: Arch, params: Any, x_ED: jax.Array, axes: Axes) -> jax.Array:
    """float32[E, V] of the rows that emit."""
    return unembed(params["embed" if arch.tied else "unembed"], x_ED, axes, arch.V)


def specs(arch: Arch, tp: int) -> dict[str, Any]:
    """The parameter tree as ParamSpecs, global shapes; kv heads are split over ``tp`` shards.

    Raises:
        ConfigError: the shape cannot be split over ``tp`` shards; ``field`` is the config.json key.
    """
    check_tp(arch, tp)
    V, D = arch.V, arch.D
    tree: dict[str, Any] = {
        "embed": matrix("model.embed_tokens", (V, D), ("vocab", "embed")),
        "layers": [_layer_specs(arch, i, heads_over(arch.K, tp)) for i in range(arch.L)],
        "final_norm": norm("model.norm", D),
    }
    if not arch.tied:
        tree["unembed"] = matrix("lm_head", (V, D), ("vocab", "embed"))
    return tree


def check_tp(arch: Arch, tp: int) -> None:
    """Refuse a tensor-parallel size that does not divide the model; kv heads are repeated if it
    exceeds them."""
    for key, size in (
        ("num_attention_heads", arch.N),
        ("intermediate_size", arch.F),
    ):
        if size % tp:
            raise ConfigError(
                f"{key} {size} is not divisible by tensor_parallel_size {tp}", field=key
            )
    if arch.K % tp and tp % arch.K:
        raise ConfigError(
            f"num_key_value_heads {arch.K} neither divides tensor_parallel_size {tp}"
            " nor is divisible by it",
            field="num_key_value_heads",
        )


def _layer_specs(arch: Arch, i: int, K: int) -> dict[str, ParamSpec]:
    """``K`` is the number of kv heads kept: the model's, or one per shard where there are more
    shards."""
    D, F, H, N = arch.D, arch.F, arch.H, arch.N
    attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
    layer = {
        "attn_norm": norm(f"model.layers.{i}.input_layernorm", D),
        "qkv": qkv(arch, attn, K, "weight"),
        "o": matrix(f"{attn}.o_proj", (D, N * H), ("embed", "kv_heads")),
        "mlp_norm": norm(f"model.layers.{i}.post_attention_layernorm", D),
        "gate_up": gate_up(arch, mlp, "weight"),
        "down": matrix(f"{mlp}.down_proj", (D, F), ("embed", "ffn")),
    }
    if arch.kv_scales:
        layer["kv_scale"] = kv_scale(attn, K)
    if arch.qkv_bias:
        layer["qkv_bias"] = qkv(arch, attn, K, "bias")
    if arch.o_bias:
        layer["o_bias"] = bias(f"{attn}.o_proj", D)
    if arch.qk_norm:
        layer["q_norm"] = norm(f"{attn}.q_norm", H)
        layer["k_norm"] = norm(f"{attn}.k_norm", H)
    if arch.mlp_bias:
        layer["gate_up_bias"] = gate_up(arch, mlp, "bias")
        layer["down_bias"] = bias(f"{mlp}.down_proj", D)
    return layer


def qkv(arch: Arch, at: str, K: int, kind: str, width: int = 0) -> ParamSpec:
    """[K, G+2, H, D] (bias: [K, G+2, H]): query heads of a kv head lie together, so N/K of them
    follow it. ``width`` of the input is the model's unless given."""
    tail = (width or arch.D,) if kind == "weight" else ()
    N, H, repeat = arch.N, arch.H, K // arch.K
    q = Part(name=f"{at}.q_proj.{kind}", shape=(N * H, *tail), view=(K, N // K, H, *tail))
    k, v = (
        Part(
            name=f"{at}.{name}.{kind}",
            shape=(arch.K * H, *tail),
            view=(arch.K, 1, H, *tail),
            repeat=repeat,
        )
        for name in ("k_proj", "v_proj")
    )
    return ParamSpec(
        shape=(K, N // K + 2, H, *tail),
        axes=("kv_heads", None, None, *("embed" for _ in tail)),
        parts=(q, k, v),
        concat=1,
    )


def kv_scale(at: str, K: int) -> ParamSpec:
    """float32 [K, 2]: what stored keys and values of a kv head are multiplied by; a checkpoint has one
    number for all heads."""
    parts = tuple(
        Part(name=f"{at}.{name}", shape=(1,), view=(1, 1), repeat=K)
        for name in ("k_scale", "v_scale")
    )
    return ParamSpec(
        shape=(K, 2),
        axes=("kv_heads", None),
        parts=parts,
        concat=1,
        init=0.0,
        init_mean=1.0,
        dtype=jnp.float32,
        positive=True,
    )


def gate_up(arch: Arch, at: str, kind: str) -> ParamSpec:
    """[2, F, D] (bias: [2, F]): gate, then up."""
    tail = (arch.D,) if kind == "weight" else ()
    parts = tuple(
        Part(name=f"{at}.{name}.{kind}", shape=(arch.F, *tail), view=(1, arch.F, *tail))
        for name in ("gate_proj", "up_proj")
    )
    axes = (None, "ffn", *("embed" for _ in tail))
    return ParamSpec(shape=(2, arch.F, *tail), axes=axes, parts=parts)


def matrix(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> ParamSpec:
    """One tensor ``name.weight``, as the checkpoint has it: [output, input]."""
    part = Part(name=f"{name}.weight", shape=shape, view=shape)
    return ParamSpec(shape=shape, axes=axes, parts=(part,))


def norm(name: str, size: int) -> ParamSpec:
    """[size]: the scales of a norm, whole on every device; dummy ones are 1."""
    part = Part(name=f"{name}.weight", shape=(size,), view=(size,))
    return ParamSpec(shape=(size,), axes=(None,), parts=(part,), init=0.0, init_mean=1.0)


def bias(name: str, size: int) -> ParamSpec:
    """[size]: ``name.bias``, whole on every device."""
    part = Part(name=f"{name}.bias", shape=(size,), view=(size,))
    return ParamSpec(shape=(size,), axes=(None,), parts=(part,))
