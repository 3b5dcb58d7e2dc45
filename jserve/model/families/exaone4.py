"""EXAONE 4: norms on what attention and MLP add, norms on query and key heads, and a rope on the layers with a
window alone, where there are such."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.families.olmo2 import POST_NORMS
from jserve.model.hf_config import SLIDING, decoder_arch, layer_types, sliding_window, windows
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, integer, refuse


def arch(config: Config) -> Arch:
    """config.json -> Arch. A null ``sliding_window`` means full attention and a rope on all layers."""
    window = sliding_window(config)
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and config.get("layer_types") is None and window:
        refuse("layer_types", f"is missing, and sliding_window_pattern is {pattern!r}")
    every = 4 if isinstance(pattern, str) else integer(config, "sliding_window_pattern", 4, low=0)
    types = layer_types(config, lambda i: window > 0 and every > 0 and (i + 1) % every > 0)
    turns = rope(config)
    return decoder_arch(
        config,
        "exaone4",
        default_eps=1e-5,
        default_kv_heads=32,
        qk_norm="head",
        windows=windows(types, window),
        ropes=[turns if kind == SLIDING or not window else None for kind in types],
    )


FAMILY = plain("exaone4", "Exaone4ForCausalLM", arch, POST_NORMS)
