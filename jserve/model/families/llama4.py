"""Llama 4, its text: chunks of attention on layers with a rope, and full layers without one, whose queries grow with
their position."""

from __future__ import annotations

from dataclasses import replace

from jserve.model.arch import Arch, DecoderLayer, Mlp, Moe, Router, Temperature
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import attention_bias, decoder_arch, layers_with_rope
from jserve.model.hf_moe import experts
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, boolean, integer, number, refuse
from jserve.model.moe_specs import MoeNames

FULL, CHUNKED = "full_attention", "chunked_attention"
NAMES = TensorNames(
    mlp="feed_forward",
    moe=MoeNames(
        each="",
        all=(("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
        columns="halves",
        router=("feed_forward.router.weight",),
        shared="feed_forward.shared_expert",
        width_key="intermediate_size",
        shared_width_key="intermediate_size",
    ),
)


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    turns, turned = rope(config, default_theta=500000.0, pairs=True), layers_with_rope(config)
    chunks = _chunks(config, turned)
    found = decoder_arch(
        config,
        "llama4",
        default_eps=1e-5,
        default_head_dim=128,
        ropes=[turns if x else None for x in turned],
        moes=_experts(config),
        **attention_bias(config),
    )
    norm, width = (
        boolean(config, "use_qk_norm", True),
        integer(config, "intermediate_size_mlp", 16384),
    )
    return replace(
        found,
        layers=tuple(
            _layer(config, _wide(layer, width), chunk, norm=norm)
            for layer, chunk in zip(found.layers, chunks, strict=True)
        ),
    )


def _experts(config: Config) -> list[Moe | None]:
    """The experts of each layer: of those in ``moe_layers``, or of every ``interleave_moe_layer_step``-th one. A
    router's weight multiplies the input."""
    L, step = integer(config, "num_hidden_layers"), integer(config, "interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, L, step)
    if not isinstance(sparse, list | tuple | range) or not set(sparse) <= set(range(L)):
        refuse("moe_layers", f"must list numbers of the {L} layers, not {sparse!r}")
    router = Router(score="sigmoid", choose="logits", on_input=True)
    moe = experts(config, router, shared=integer(config, "intermediate_size"))
    return [moe if i in sparse else None for i in range(L)]


def _wide(layer: DecoderLayer, width: int) -> DecoderLayer:
    """``layer`` with the width of MLPs that stand alone, which is not that of experts."""
    return replace(layer, ffn=replace(layer.ffn, F=width)) if isinstance(layer.ffn, Mlp) else layer


def _layer(config: Config, layer: DecoderLayer, chunk: int, *, norm: bool) -> DecoderLayer:
    if layer.attn.rope is not None:
        return replace(
            layer, attn=replace(layer.attn, chunk=chunk, qk_norm="turned" if norm else "")
        )
    tuned = bool(config.get("attn_temperature_tuning", True))  # a number in older files
    grows = Temperature(
        scale=number(config, "attn_scale", 0.1), every=integer(config, "floor_scale", 8192)
    )
    return replace(
        layer, attn=replace(layer.attn, chunk=chunk, temperature=grows if tuned else None)
    )


def _chunks(config: Config, turned: list[bool]) -> list[int]:
    """Chunk of each layer: of those with a rope, or where ``layer_types`` says so."""
    size, types = integer(config, "attention_chunk_size", 8192), config.get("layer_types")
    if types is None:
        types = [CHUNKED if x else FULL for x in turned]
    if len(types) != len(turned) or any(kind not in (FULL, CHUNKED) for kind in types):
        refuse("layer_types", f"must say {FULL} or {CHUNKED} for each of {len(turned)} layers")
    return [size if kind == CHUNKED else 0 for kind in types]


FAMILY = plain("llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), arch, NAMES)
