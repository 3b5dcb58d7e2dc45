"""Mistral: the plain decoder with one sliding window for all layers (null: full attention)."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_values import Config, integer, refuse


def arch(config: Config) -> Arch:
    """config.json -> Arch. A missing ``sliding_window`` means 4096, as in transformers."""
    if config.get("layer_types") is not None:
        refuse("layer_types", "is not supported for Mistral")
    missing = "sliding_window" not in config
    window = integer(config, "sliding_window", 4096 if missing else 0, low=0)
    L = integer(config, "num_hidden_layers")
    return decoder_arch(config, "mistral", windows=(window,) * L, default_kv_heads=8)


FAMILY = plain("mistral", "MistralForCausalLM", arch)
