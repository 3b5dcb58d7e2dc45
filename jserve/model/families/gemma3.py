"""Gemma 3 (text): Gemma 2 with norms on query and key heads, and two ropes: one for layers with a window, one
for the others."""

from __future__ import annotations

from jserve.model.arch import Arch, Rope
from jserve.model.decoder import plain
from jserve.model.families.gemma import gemma_arch
from jserve.model.families.gemma2 import NAMES
from jserve.model.hf_config import FULL, SLIDING, layer_types, sliding_window, windows
from jserve.model.hf_rope import rope
from jserve.model.hf_text import is_multimodal
from jserve.model.hf_values import (
    Config,
    integer,
    number,
    optional_number,
    or_else,
    refuse,
    without_effect,
)

SIZES = {
    "num_attention_heads": 8,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
"""The values of keys that config.json of the multimodal 4B leaves out."""


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attn_logit_softcapping`` has no effect, as in transformers. Of multimodal models it
    leaves sizes out."""
    config = or_else(config, **(SIZES if is_multimodal(config) else {}))
    without_effect(config, "attn_logit_softcapping", "hidden_act", "rope_local_base_freq")
    pattern = integer(config, "sliding_window_pattern", 6)
    types = layer_types(config, lambda i: (i + 1) % pattern > 0)
    by_type = {FULL: rope(config, default_theta=1e6, layer_type=FULL), SLIDING: _local(config)}
    return gemma_arch(
        config,
        "gemma3",
        activation_key="hidden_activation",
        default_kv_heads=4,
        windows=windows(types, sliding_window(config)),
        ropes=[by_type[kind] for kind in types],
        qk_norm="head",
        scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=_logit_soft_cap(config),
    )


def _local(config: Config) -> Rope:
    """The rope of layers with a window; older files have a key for its base and never scale it."""
    nested = config.get("rope_parameters") or {}
    if SLIDING in nested:
        return rope(config, layer_type=SLIDING)
    return Rope(theta=number(config, "rope_local_base_freq", 10000.0))


def _logit_soft_cap(config: Config) -> float:
    cap = optional_number(config, "final_logit_softcapping", 0.0)
    if cap and is_multimodal(config):
        why = "is not supported in a multimodal model, where transformers ignores it"
        refuse("final_logit_softcapping", why)
    return cap


FAMILY = plain("gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), arch, NAMES)
