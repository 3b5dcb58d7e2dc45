"""Qwen3-MoE: Qwen3 with experts, in all layers but those that stay dense, and one window for all layers if asked."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import plain
from jserve.model.hf_config import attention_bias, decoder_arch, sliding_window
from jserve.model.hf_moe import experts, sparse_layers
from jserve.model.hf_values import Config, boolean, integer, refuse, without_effect


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    if config.get("layer_types") is not None:
        refuse("layer_types", "is not supported for Qwen3-MoE")
    without_effect(config, "sliding_window", "max_window_layers")
    window = sliding_window(config) if boolean(config, "use_sliding_window", False) else 0
    router = Router(normalise=boolean(config, "norm_topk_prob", False))
    moe = experts(config, router, width="moe_intermediate_size")
    return decoder_arch(
        config,
        "qwen3_moe",
        qk_norm="head",
        windows=(window,) * integer(config, "num_hidden_layers"),
        default_kv_heads=4,
        moes=[moe if sparse else None for sparse in sparse_layers(config)],
        **attention_bias(config),
    )


FAMILY = plain("qwen3_moe", "Qwen3MoeForCausalLM", arch)
