"""The decoder that all families share: its weights, forward pass and logits, from the layers of an ``Arch``.

It owns the order of the layers and the parameter tree. A family file reads config.json into an ``Arch``, names the
tensors of its checkpoints (``TensorNames``), and is made of both by ``plain``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.kv_layout import heads_over
from jserve.model import fused, mla
from jserve.model.arch import Arch, Attention, Mlp, Moe, Norm
from jserve.model.attention import LayerKV, capped
from jserve.model.ctx import Ctx
from jserve.model.dot import skip_unread
from jserve.model.family import Family, Pass
from jserve.model.hf_config import PER_HEAD
from jserve.model.hf_keys import every_key
from jserve.model.hf_values import Config
from jserve.model.layers import (
    attend_normed,
    attention_block,
    embed,
    entering,
    ffn_block,
    ffn_normed,
    unembed,
)
from jserve.model.moe_places import Placement
from jserve.model.moe_specs import MoeNames, routed_specs
from jserve.model.norms import normed
from jserve.model.param_spec import ParamSpec, Part
from jserve.model.points import (
    ATTN_OUT,
    EMBED,
    MID,
    MLP_OUT,
    NORMALIZED,
    POST,
    PRE,
    in_layer,
    inside,
    is_by_head,
)
from jserve.model.shard import Axes

KV_SCALES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Tensors of scales of keys and of values in an attention: of compressed-tensors, of modelopt, of AutoFP8, and of
older files of it, which have one for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The tensors of a checkpoint; those of a layer follow ``layers`` and its number. Empty: a family has none
    such."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    unembed: str = "lm_head"
    attn_norm: str = "input_layernorm"
    """Before attention."""
    attn_out_norm: str = ""
    """Of what attention adds to the residual stream."""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    attn: str = "self_attn"
    mlp: str = "mlp"
    qkv: str = ""
    """One tensor in ``attn`` for all queries, all keys, all values; empty: q_proj, k_proj and v_proj."""
    gate_up: str = ""
    """One tensor in ``mlp`` for gate and up; empty: gate_proj and up_proj."""
    sink_logits: str = "sinks"
    """In ``attn``, where ``Attention.sink_logits``."""
    moe: MoeNames = field(default_factory=MoeNames)
    """Of layers with experts."""


def plain(
    name: str,
    architecture: str | tuple[str, ...],
    arch: Callable[[Config], Arch],
    names: TensorNames = TensorNames(),
) -> Family:
    """A family that is this decoder: ``arch`` reads config.json, ``names`` are its tensors."""
    return Family(
        name=name,
        architectures=(architecture,) if isinstance(architecture, str) else architecture,
        arch=every_key(arch),
        specs=partial(specs, names=names),
        forward=forward,
        logits=logits,
        tapped=tapped,
        counted=counted,
        embed=embedded,
    )


def forward(ctx: Ctx, params: Any, kv: list[LayerKV]) -> tuple[jax.Array, list[LayerKV]]:
    """(float32[T, D] after the final norm, the new KV: of every layer, or of every array that groups share)."""
    return tapped(ctx, params, kv, ())[:2]


def tapped(
    ctx: Ctx, params: Any, kv: list[LayerKV], points: Sequence[str]
) -> tuple[jax.Array, list[LayerKV], list[jax.Array]]:
    """``forward``, and the values at each of ``points`` (``jserve.model.points``)."""
    done = counted(ctx, params, kv, points)
    return done.x_TD, done.kv, done.read


def counted(ctx: Ctx, params: Any, kv: list[LayerKV], points: Sequence[str]) -> Pass:
    """``tapped``, and how many tokens each expert of a layer got, where ``ctx`` has a placement of experts."""
    arch = ctx.arch
    x_TD = embedded(arch, params, ctx.view.tok_T, ctx.axes)
    x_TD = ctx.own(skip_unread(x_TD, ctx.view.pos_T >= 0))
    ctx = ctx.with_tables()
    if fused.serves(ctx, params, kv, points):
        return Pass(*fused.tapped(ctx, params, kv, x_TD, points), None)
    layer, places = _traced_layer(), _placements(ctx)
    found, first, new_kv, counts = {EMBED: x_TD}, {}, list(kv), []
    for i, p in enumerate(params["layers"]):
        found[in_layer(i, PRE)] = x_TD = ctx.edited(in_layer(i, PRE), x_TD)
        wanted = inside(points, i)
        like, at = first.setdefault((arch.layers[i], wanted), i), ctx.view.array(i)
        of_layer = ctx.of_layer(i, like, places[i], wanted)
        with jax.named_scope(f"layer{i}"):
            x_TD, new_kv[at], count_E, seen = layer(p, x_TD, of_layer, new_kv[at])
            counts.append(count_E)
        found |= {in_layer(i, name): value_TD for name, value_TD in seen.items()}
        found[in_layer(i, POST)] = x_TD = ctx.edited(in_layer(i, POST), x_TD)
    found[NORMALIZED] = normed(arch.norm, x_TD, params["final_norm"], ctx.axes.embed)
    tokens = [count_E for count_E in counts if count_E is not None]
    x_TD = ctx.whole(found[NORMALIZED])
    read = [found[name] if is_by_head(name) else ctx.whole(found[name]) for name in points]
    return Pass(x_TD, new_kv, read, jnp.stack(tokens) if tokens else None)


def _placements(ctx: Ctx) -> list[Placement | None]:
    """Of the experts of each layer; None: it has none, or each expert has the slot of its number."""
    routed = iter(range(ctx.arch.L))
    return [
        ctx.places.of_layer(next(routed)) if ctx.places and isinstance(layer.ffn, Moe) else None
        for layer in ctx.arch.layers
    ]


def embedded(arch: Arch, params: Any, tok_T: jax.Array, axes: Axes) -> jax.Array:
    """float32[T, D]: the rows of the embedding."""
    x_TD = embed(params["embed"], tok_T, axes)
    if arch.embed_scale == 1.0:
        return x_TD
    return x_TD * jnp.asarray(arch.embed_scale, params["embed"].dtype).astype(jnp.float32)


def _traced_layer() -> Any:
    """Layers that are alike are one traced function, called again: tracing and lowering of a step take a
    third of the time, and XLA inlines the calls, so the program is the same."""
    return jax.jit(decoder_layer)


def decoder_layer(
    p: Any, x_TD: jax.Array, ctx: Ctx, kv: LayerKV
) -> tuple[jax.Array, LayerKV, jax.Array | None, dict[str, jax.Array]]:
    """One layer: its output, its KV, the tokens of each expert where they are counted, and what it has at
    ``ctx.points``. A norm is where its scales are: before attention and MLP (``attn_norm``, ``mlp_norm``), on what
    they add (``attn_out_norm``, ``mlp_out_norm``), or both."""
    found: dict[str, jax.Array] = {}
    if ctx.spec.parallel:
        normed_TD = entering(ctx, x_TD, p["attn_norm"], p["qkv"])
        found[ATTN_OUT], kv = attend_normed(ctx, p, normed_TD, kv, found)
        x_TD = x_TD + found[ATTN_OUT]
        found[MLP_OUT], count_E = ffn_normed(ctx, p, normed_TD)
    else:
        found[ATTN_OUT], kv = attention_block(ctx, p, x_TD, kv, found)
        found[MID] = x_TD = x_TD + found[ATTN_OUT]
        found[MLP_OUT], count_E = ffn_block(ctx, p, x_TD)
    return x_TD + found[MLP_OUT], kv, count_E, {name: found[name] for name in ctx.points}


def logits(arch: Arch, params: Any, x_ED: jax.Array, axes: Axes) -> jax.Array:
    """float32[E, V] of the rows that emit."""
    raw_EV = unembed(params["embed" if arch.tied else "unembed"], x_ED, axes, arch.V)
    raw_EV = raw_EV if arch.logit_scale == 1.0 else raw_EV * arch.logit_scale
    return capped(raw_EV, arch.logit_soft_cap)


def specs(arch: Arch, tp: int, names: TensorNames = TensorNames()) -> dict[str, Any]:
    """The parameter tree as ParamSpecs, global shapes; kv heads are split over ``tp`` shards.

    Raises:
        ConfigError: the shape cannot be split over ``tp`` shards; ``field`` is the config.json key.
    """
    check_tp(arch, tp, names)
    V, D = arch.V, arch.D
    tree: dict[str, Any] = {
        "embed": matrix(names.embed, (V, D), ("vocab", "embed")),
        "layers": [_layer_specs(arch, i, heads_over(arch.K, tp), names) for i in range(arch.L)],
        "final_norm": norm(names.final_norm, D, arch.norm, "embed"),
    }
    if not arch.tied:
        tree["unembed"] = matrix(names.unembed, (V, D), ("vocab", "embed"))
    return tree


def check_tp(arch: Arch, tp: int, names: TensorNames = TensorNames()) -> None:
    """Refuse a tensor-parallel size that does not divide the model; kv heads are repeated if it
    exceeds them."""
    widths = {pair for layer in arch.layers for pair in _widths(layer.ffn, names.moe)}
    for key, size in (("num_attention_heads", arch.N), *sorted(widths)):
        if size % tp:
            raise ConfigError(
                f"{key} {size} is not divisible by the {tp} devices that share it", field=key
            )
    if arch.K % tp and tp % arch.K:
        raise ConfigError(
            f"num_key_value_heads {arch.K} neither divides the number of devices, {tp}, nor is divisible by it",
            field="num_key_value_heads",
        )


def _widths(ffn: Mlp | Moe, names: MoeNames) -> list[tuple[str, int]]:
    """(key of config.json, size) of each width that all devices split; that of routed experts is ``padded``'s."""
    if isinstance(ffn, Mlp):
        return [("intermediate_size", ffn.F)]
    return [(names.shared_width_key, ffn.shared.F)] if ffn.shared else []


def _layer_specs(arch: Arch, i: int, K: int, names: TensorNames) -> dict[str, ParamSpec]:
    """``K`` is the number of kv heads kept: the model's, or one per shard where there are more
    shards."""
    D, at, spec = arch.D, f"{names.layers}.{i}", arch.layers[i]
    attn = f"{at}.{names.attn}"
    layer = {
        place: norm(f"{at}.{name}", D, arch.norm, "embed")
        for place in ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
        if (name := getattr(names, place))
    }
    if spec.attn.latent is not None:
        layer |= mla.specs(spec.attn, D, attn)
    else:
        layer |= _attn_specs(arch, spec.attn, attn, K, names)
    return layer | (
        _mlp_specs(spec.ffn, D, f"{at}.{names.mlp}", names.gate_up)
        if isinstance(spec.ffn, Mlp)
        else _moe_specs(spec.ffn, D, at, names.moe)
    )


def _attn_specs(
    arch: Arch, heads: Attention, attn: str, K: int, names: TensorNames
) -> dict[str, ParamSpec]:
    """Of a layer's attention ``attn``, a name."""
    D = arch.D
    layer = {
        "qkv": qkv(arch, attn, K, "weight", fused=names.qkv),
        "o": matrix(f"{attn}.o_proj", (D, heads.N * heads.H), ("embed", "kv_heads")),
    }
    if arch.kv_scales:
        layer["kv_scale"] = kv_scale(attn, K, arch.K if arch.kv_scales == PER_HEAD else 0)
    if heads.qkv_bias:
        layer["qkv_bias"] = qkv(arch, attn, K, "bias", fused=names.qkv)
    if heads.sink_logits:
        layer["sink_logits"] = per_head(f"{attn}.{names.sink_logits}", heads.N, K)
    if heads.o_bias:
        layer["o_bias"] = bias(f"{attn}.o_proj", D)
    if heads.qk_norm == "head":
        layer["q_norm"] = norm(f"{attn}.q_norm", heads.H, arch.norm)
        layer["k_norm"] = norm(f"{attn}.k_norm", heads.H, arch.norm)
    if heads.qk_norm == "width":
        layer["q_norm"] = width_norm(f"{attn}.q_norm", heads, K, heads.N)
        layer["k_norm"] = width_norm(f"{attn}.k_norm", heads, K, heads.K)
    return layer


def _mlp_specs(mlp: Mlp, D: int, at: str, fused: str) -> dict[str, ParamSpec]:
    layer = {
        "gate_up": gate_up(D, mlp.F, at, "weight", fused),
        "down": matrix(f"{at}.down_proj", (D, mlp.F), ("embed", "ffn")),
    }
    if mlp.mlp_bias:
        layer["gate_up_bias"] = gate_up(D, mlp.F, at, "bias", fused)
        layer["down_bias"] = bias(f"{at}.down_proj", D)
    return layer


def _moe_specs(moe: Moe, D: int, at: str, names: MoeNames) -> dict[str, ParamSpec]:
    layer = routed_specs(moe, D, at, names)
    if moe.shared is not None:
        F, of = moe.shared.F, f"{at}.{names.shared}"
        layer["shared_gate_up"] = gate_up(D, F, of, "weight", names.shared_gate_up)
        layer["shared_down"] = matrix(f"{of}.{names.shared_down}", (D, F), ("embed", "ffn"))
    return layer


def qkv(arch: Arch, at: str, K: int, kind: str, width: int = 0, fused: str = "") -> ParamSpec:
    """[K, G+2, H, D] (bias: [K, G+2, H]): query heads of a kv head lie together, so N/K of them
    follow it. ``width`` of the input is the model's unless given; ``fused`` is the tensor that holds all
    queries, then all keys, then all values, where there is one."""
    tail = (width or arch.D,) if kind == "weight" else ()
    N, H, kept = arch.N, arch.H, arch.K
    heads = {"q_proj": N, "k_proj": kept, "v_proj": kept}
    views = ((K, N // K), (kept, 1), (kept, 1))
    rows, parts = 0, []
    for (name, n), (per, each) in zip(heads.items(), views, strict=True):
        parts.append(
            Part(
                name=f"{at}.{fused or name}.{kind}",
                shape=((N + 2 * kept) * H if fused else n * H, *tail),
                first=rows if fused else 0,
                view=(per, each, H, *tail),
                repeat=K // kept if n == kept and name != "q_proj" else 1,
            )
        )
        rows += n * H
    return ParamSpec(
        shape=(K, N // K + 2, H, *tail),
        axes=("kv_heads", None, None, *("embed" for _ in tail)),
        parts=tuple(parts),
        concat=1,
    )


def kv_scale(at: str, K: int, own: int) -> ParamSpec:
    """float32 [K, 2]: what stored keys and values of a kv head are multiplied by.

    Args:
        K: kv heads that are kept.
        own: those that have a number each in the checkpoint, of which K is a multiple; 0: one is for all heads, and its
            tensors have any of the names in ``KV_SCALES``.
    """
    shape, n = ((own, 1, 1), own) if own else ((1,), 1)
    parts, *others = (
        tuple(Part(name=f"{at}.{x}", shape=shape, view=(n, 1), repeat=K // n) for x in names)
        for names in KV_SCALES
    )
    return ParamSpec(
        shape=(K, 2),
        axes=("kv_heads", None),
        parts=parts,
        spellings=() if own else tuple(others),
        concat=1,
        init=0.0,
        init_mean=1.0,
        dtype=jnp.float32,
        positive=True,
    )


def gate_up(D: int, F: int, at: str, kind: str, fused: str = "") -> ParamSpec:
    """[2, F, D] (bias: [2, F]): gate, then up; of one tensor where ``fused`` names it."""
    tail = (D,) if kind == "weight" else ()
    if fused:
        whole = Part(name=f"{at}.{fused}.{kind}", shape=(2 * F, *tail), view=(2, F, *tail))
        parts: tuple[Part, ...] = (whole,)
    else:
        parts = tuple(
            Part(name=f"{at}.{name}.{kind}", shape=(F, *tail), view=(1, F, *tail))
            for name in ("gate_proj", "up_proj")
        )
    axes = (None, "ffn", *("embed" for _ in tail))
    return ParamSpec(shape=(2, F, *tail), axes=axes, parts=parts)


def matrix(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> ParamSpec:
    """One tensor ``name.weight``, as the checkpoint has it: [output, input]."""
    part = Part(name=f"{name}.weight", shape=shape, view=shape)
    return ParamSpec(shape=shape, axes=axes, parts=(part,))


def norm(name: str, size: int, kind: Norm = Norm(), axis: str | None = None) -> ParamSpec:  # noqa: B008
    """[size]: the scales of a norm over logical axis ``axis``; dummy ones make it 1."""
    part = Part(name=f"{name}.weight", shape=(size,), view=(size,))
    mean = 0.0 if kind.plus_one else 1.0
    return ParamSpec(shape=(size,), axes=(axis,), parts=(part,), init=0.0, init_mean=mean)


def width_norm(name: str, heads: Attention, K: int, n: int) -> ParamSpec:
    """[K, n/K, H]: the scales of a norm over ``n`` heads, which lie where their heads do; fewer than K are
    repeated."""
    repeat = max(1, K // n)
    part = Part(
        name=f"{name}.weight",
        shape=(n * heads.H,),
        view=(K // repeat, max(1, n // K), heads.H),
        repeat=repeat,
    )
    return ParamSpec(
        shape=(K, max(1, n // K), heads.H),
        axes=("kv_heads", None, None),
        parts=(part,),
        init=0.0,
        init_mean=1.0,
    )


def per_head(name: str, N: int, K: int) -> ParamSpec:
    """[K, N/K]: a number for each query head, which lies where its head does."""
    part = Part(name=name, shape=(N,), view=(K, N // K))
    return ParamSpec(shape=(K, N // K), axes=("kv_heads", None), parts=(part,))


def bias(name: str, size: int) -> ParamSpec:
    """[size]: ``name.bias`` of the residual stream."""
    part = Part(name=f"{name}.bias", shape=(size,), view=(size,))
    return ParamSpec(shape=(size,), axes=("embed",), parts=(part,))
