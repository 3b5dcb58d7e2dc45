"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts and a gated shared one, in all layers but those that stay dense."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import plain
from jserve.model.hf_config import decoder_arch, layer_types, sliding_window, windows
from jserve.model.hf_moe import experts, sparse_layers
from jserve.model.hf_values import Config, boolean, integer, without_effect


def arch(config: Config) -> Arch:
    """config.json -> Arch. Windows are, if asked, on every other layer below ``max_window_layers``."""
    window, below = 0, integer(config, "max_window_layers", 28, low=0)
    without_effect(config, "sliding_window")
    if boolean(config, "use_sliding_window", False):
        window = sliding_window(config)
    types = layer_types(config, lambda i: window > 0 and i % 2 == 0 and i < below)
    moe = experts(
        config,
        Router(normalise=boolean(config, "norm_topk_prob", False)),
        width="moe_intermediate_size",
        shared=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return decoder_arch(
        config,
        "qwen2_moe",
        qkv_bias=boolean(config, "qkv_bias", True),
        windows=windows(types, window),
        default_kv_heads=16,
        moes=[moe if sparse else None for sparse in sparse_layers(config)],
    )


FAMILY = plain("qwen2_moe", "Qwen2MoeForCausalLM", arch)
