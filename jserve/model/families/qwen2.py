"""Qwen2 and Qwen2.5: the plain decoder with a bias on q, k and v, and a window on the upper
layers if asked.
"""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import decoder_arch, upper_windows
from jserve.model.hf_values import Config


def arch(config: Config) -> Arch:
    """config.json -> Arch."""
    return decoder_arch(
        config, "qwen2", qkv_bias=True, windows=upper_windows(config), default_kv_heads=32
    )


FAMILY = plain("qwen2", "Qwen2ForCausalLM", arch)
