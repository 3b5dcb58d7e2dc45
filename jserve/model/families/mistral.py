"""Mistral: the plain decoder with one sliding window for all layers (null: full attention)."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import decoder_arch, sliding_window
from jserve.model.hf_values import Config, integer, refuse


def arch(config: Config) -> Arch:
    """config.json -> Arch. A missing ``sliding_window`` means 4096, as in transformers."""
    if config.get("layer_types") is not None:
        refuse("layer_types", "is not supported for Mistral")
    window = sliding_window(config)
    L = integer(config, "num_hidden_layers")
    return decoder_arch(config, "mistral", windows=(window,) * L, default_kv_heads=8)


FAMILY = plain("mistral", "MistralForCausalLM", arch)
