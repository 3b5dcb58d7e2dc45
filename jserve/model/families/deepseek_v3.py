"""DeepSeek-V3 and R1: as DeepSeek-V2, with a router that chooses by sigmoids and a bias of its own."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import plain
from jserve.model.families.deepseek_v2 import NAMES
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_latent import latent_fields
from jserve.model.hf_moe import deepseek_experts
from jserve.model.hf_values import Config, boolean, integer, number, only


def arch(config: Config) -> Arch:
    """config.json -> Arch. The shared key turns in pairs unless ``rope_interleave`` is false."""
    only(config, "scoring_func", "sigmoid")
    only(config, "topk_method", "noaux_tc")
    pairs = boolean(config, "rope_interleave", True)
    return decoder_arch(
        config,
        "deepseek_v3",
        moes=deepseek_experts(config, lambda: _router(config), n_shared=1),
        **latent_fields(config, pairs=pairs),
    )


def _router(config: Config) -> Router:
    return Router(
        score="sigmoid",
        choice_bias=True,
        normalise=boolean(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 2.5),
        groups=integer(config, "n_group", 8),
        top_groups=integer(config, "topk_group", 4),
        group_score="top2",
    )


FAMILY = plain("deepseek_v3", "DeepseekV3ForCausalLM", arch, NAMES)
