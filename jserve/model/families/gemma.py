"""Gemma 1: the plain decoder with a scaled embedding, norms that store their scales less 1, and a tanh GELU."""

from __future__ import annotations

from typing import Any

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import attention_bias, decoder_arch, full_attention
from jserve.model.hf_values import Config, integer, without_effect

GELU = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}
"""Old files say ``gelu`` and mean its approximation by tanh."""


def gemma_arch(config: Config, family: str, **fields: Any) -> Arch:
    """The ``Arch`` that all Gemmas share. ``attention_bias`` puts a bias on all four attention projections."""
    return decoder_arch(
        config,
        family,
        activations=GELU,
        default_head_dim=256,
        default_tied=True,
        plus_one=True,
        embed_scale=integer(config, "hidden_size") ** 0.5,
        **attention_bias(config),
        **fields,
    )


def arch(config: Config) -> Arch:
    """config.json -> Arch. Old files call ``hidden_act`` ``hidden_activation``."""
    full_attention(config)
    without_effect(config, "hidden_act")
    key = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    return gemma_arch(config, "gemma", activation_key=key, default_kv_heads=16)


FAMILY = plain("gemma", "GemmaForCausalLM", arch)
