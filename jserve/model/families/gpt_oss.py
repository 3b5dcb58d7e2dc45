"""GPT-OSS: a window on every other layer, a sink logit for every query head, experts with clamped activations."""

from __future__ import annotations

from jserve.model.arch import Arch, Clamped, Rope, RopeScaling, Router
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import (
    attention_bias,
    decoder_arch,
    layer_types,
    sliding_window,
    windows,
)
from jserve.model.hf_moe import experts
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, integer, number, without_effect
from jserve.model.moe_specs import MoeNames

NAMES = TensorNames(
    moe=MoeNames(
        each="",
        columns="alternating",
        mxfp4=True,
        router=("mlp.router.weight",),
        width_key="intermediate_size",
    )
)


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias``, true unless it is there, puts a bias on all four projections."""
    without_effect(config, "experts_per_token", "initial_context_length")
    L = integer(config, "num_hidden_layers")
    types = layer_types(config, lambda i: (i + 1) % 2 > 0)
    clamped = Clamped(
        alpha=number(config, "swiglu_alpha", 1.702), limit=number(config, "swiglu_limit", 7.0)
    )
    moe = experts(
        config,
        Router(choose="logits", logit_bias=True),
        activation=clamped,
        expert_bias=True,
    )
    return decoder_arch(
        config,
        "gpt_oss",
        default_eps=1e-5,
        default_head_dim=64,
        sink_logits=True,
        windows=windows(types, sliding_window(config, 128)),
        ropes=(_rope(config),) * L,
        moes=(moe,) * L,
        decoded=("mxfp4",),
        **attention_bias(config, True),
    )


def _rope(config: Config) -> Rope:
    """As config.json says, or the one of the published checkpoints where it is silent."""
    if config.get("rope_scaling") or config.get("rope_parameters"):
        return rope(config, default_theta=150000.0)
    theta = number(config, "rope_theta", 150000.0)
    yarn = RopeScaling(kind="yarn", factor=32.0, original_max_position=4096, truncate=False)
    return Rope(theta=theta, scaling=yarn)


FAMILY = plain("gpt_oss", "GptOssForCausalLM", arch, NAMES)
