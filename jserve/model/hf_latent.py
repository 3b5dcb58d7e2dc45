"""Reads what config.json says of multi-head latent attention, in DeepSeek's keys."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypedDict

from jserve.model.arch import Latent, Rope, RopeScaling
from jserve.model.hf_config import attention_bias
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, integer, only, refuse


class LatentFields(TypedDict):
    """Fields of ``Attention``, and the rope of each layer."""

    latent: Latent
    scale: float
    qkv_bias: bool
    o_bias: bool
    ropes: tuple[Rope, ...]


def latent_fields(config: Config, *, pairs: bool = True) -> LatentFields:
    """Fields of ``decoder_arch`` for layers of latent attention; ``q_lora_rank`` is null where queries have no rank.
    ``head_dim`` and ``num_key_value_heads`` say nothing.

    Raises:
        ConfigError: a key is missing or wrong; ``field`` names it.
    """
    latent = Latent(
        rank=integer(config, "kv_lora_rank"),
        turned=integer(config, "qk_rope_head_dim"),
        own=integer(config, "qk_nope_head_dim"),
        value=integer(config, "v_head_dim"),
        q_rank=integer(config, "q_lora_rank", 0, low=0),
    )
    if latent.turned % 2:
        refuse("qk_rope_head_dim", f"{latent.turned} is odd; rotary embedding needs pairs")
    only(config, "qk_head_dim", latent.own + latent.turned)
    turns = replace(rope(config, pairs=pairs), rotary=latent.turned)
    return {
        "latent": latent,
        "scale": (latent.own + latent.turned) ** -0.5 * _sharper(turns.scaling) ** 2,
        "ropes": (turns,) * integer(config, "num_hidden_layers"),
        **attention_bias(config),
    }


def _sharper(scaling: RopeScaling | None) -> float:
    """The factor of queries and of keys, each, where the rope is stretched."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
