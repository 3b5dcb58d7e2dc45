"""DeepSeek-V3: latent attention as in DeepSeek-V2."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.families.deepseek_v2 import no_experts
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_latent import latent_fields
from jserve.model.hf_values import Config, boolean


def arch(config: Config) -> Arch:
    """config.json -> Arch. The shared key turns in pairs unless ``rope_interleave`` is false."""
    no_experts(config)
    pairs = boolean(config, "rope_interleave", True)
    return decoder_arch(config, "deepseek_v3", **latent_fields(config, pairs=pairs))


FAMILY = plain("deepseek_v3", "DeepseekV3ForCausalLM", arch)
