"""Qwen3: the plain decoder with a norm on each query and key head, and a head size of its own."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import attention_bias, decoder_arch, upper_windows
from jserve.model.hf_values import Config


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    return decoder_arch(
        config,
        "qwen3",
        qk_norm="head",
        **attention_bias(config),
        windows=upper_windows(config),
        default_kv_heads=32,
        default_head_dim=128,
    )


FAMILY = plain("qwen3", "Qwen3ForCausalLM", arch)
