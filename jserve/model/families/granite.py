"""Granite: Llama with multipliers on the embedding, the scores, the residual stream and the logits."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import attention_bias, decoder_arch, full_attention
from jserve.model.hf_values import Config, boolean, number


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_multiplier`` is the scale of the scores, 1 where it is missing."""
    full_attention(config)
    return decoder_arch(
        config,
        "granite",
        embed_scale=number(config, "embedding_multiplier", 1.0),
        scale=number(config, "attention_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
        **attention_bias(config),
        mlp_bias=boolean(config, "mlp_bias", False),
    )


FAMILY = plain("granite", "GraniteForCausalLM", arch)
