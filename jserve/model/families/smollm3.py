"""SmolLM3: Llama without a rope on every fourth layer."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import (
    attention_bias,
    decoder_arch,
    layer_types,
    layers_with_rope,
    windows,
)
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, boolean, integer, without_effect


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections. A window holds
    where there is no rope, if ``use_sliding_window``."""
    without_effect(config, "max_window_layers")
    turns = layers_with_rope(config)
    window = integer(config, "sliding_window", 0, low=0)
    if not boolean(config, "use_sliding_window", False):
        window = 0
    types = layer_types(config, lambda i: window > 0 and not turns[i])
    found = rope(config, default_theta=2e6)
    return decoder_arch(
        config,
        "smollm3",
        default_kv_heads=4,
        default_tied=True,
        windows=windows(types, window),
        ropes=[found if turn else None for turn in turns],
        **attention_bias(config),
        mlp_bias=boolean(config, "mlp_bias", False),
    )


FAMILY = plain("smollm3", "SmolLM3ForCausalLM", arch)
