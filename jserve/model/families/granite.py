"""Granite: Llama with multipliers on the embedding, the scores, the residual stream and the logits."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import attention_bias, decoder_arch, full_attention, multipliers
from jserve.model.hf_values import Config, boolean


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    full_attention(config)
    return decoder_arch(
        config,
        "granite",
        **multipliers(config),
        **attention_bias(config),
        mlp_bias=boolean(config, "mlp_bias", False),
    )


FAMILY = plain("granite", "GraniteForCausalLM", arch)
