"""Gemma 2: norms before and after attention and MLP, soft caps on scores and logits, a window on every other
layer."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import TensorNames, plain
from jserve.model.families.gemma import gemma_arch
from jserve.model.hf_config import layer_types, sliding_window, windows
from jserve.model.hf_values import Config, number, optional_number, without_effect

NAMES = TensorNames(
    attn_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def arch(config: Config) -> Arch:
    """config.json -> Arch. A cap that is null is none; one that is missing is Gemma 2's."""
    without_effect(config, "hidden_act", "sliding_window_size")
    types = layer_types(config, lambda i: (i + 1) % 2 > 0)
    return gemma_arch(
        config,
        "gemma2",
        activation_key="hidden_activation",
        default_kv_heads=4,
        windows=windows(types, sliding_window(config)),
        scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=optional_number(config, "attn_logit_softcapping", 50.0),
        logit_soft_cap=optional_number(config, "final_logit_softcapping", 30.0),
    )


FAMILY = plain("gemma2", "Gemma2ForCausalLM", arch, NAMES)
