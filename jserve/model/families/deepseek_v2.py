"""DeepSeek-V2: multi-head latent attention, whose shared keys turn in pairs."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_latent import latent_fields
from jserve.model.hf_values import Config, boolean, integer, refuse


def arch(config: Config) -> Arch:
    """config.json -> Arch."""
    no_experts(config)
    mlp_bias = boolean(config, "mlp_bias", False)
    return decoder_arch(config, "deepseek_v2", mlp_bias=mlp_bias, **latent_fields(config))


def no_experts(config: Config) -> None:
    """Refuse layers with experts."""
    dense, n = integer(config, "first_k_dense_replace", 0, low=0), config.get("n_routed_experts")
    if n and dense < integer(config, "num_hidden_layers"):
        refuse("n_routed_experts", f"{n!r} is not supported, only layers without experts")


FAMILY = plain("deepseek_v2", "DeepseekV2ForCausalLM", arch)
