"""DeepSeek-V2: multi-head latent attention, and from some layer on experts beside shared ones."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_latent import latent_fields
from jserve.model.hf_moe import deepseek_experts
from jserve.model.hf_values import Config, boolean, integer, number, only, refuse, without_effect
from jserve.model.moe_specs import MoeNames

NAMES = TensorNames(
    moe=MoeNames(shared="mlp.shared_experts", shared_width_key="moe_intermediate_size")
)


def arch(config: Config) -> Arch:
    """config.json -> Arch."""
    only(config, "scoring_func", "softmax")
    if config.get("norm_topk_prob"):
        refuse(
            "norm_topk_prob", "true is not supported: transformers ignores it, other code does not"
        )
    moes = deepseek_experts(config, lambda: _router(config), n_shared=2)
    mlp_bias = boolean(config, "mlp_bias", False)
    if mlp_bias and any(moes):
        refuse(
            "mlp_bias", "true is not supported beside experts, whose shared one would have a bias"
        )
    return decoder_arch(
        config,
        "deepseek_v2",
        mlp_bias=mlp_bias,
        moes=moes,
        **latent_fields(config),
    )


def _router(config: Config) -> Router:
    only(config, "topk_method", "greedy", "group_limited_greedy")
    without_effect(config, "n_group", "topk_group")
    scale = number(config, "routed_scaling_factor", 1.0)
    if config.get("topk_method") != "group_limited_greedy":
        return Router(scale=scale)
    groups = integer(config, "n_group")
    return Router(scale=scale, groups=groups, top_groups=integer(config, "topk_group"))


FAMILY = plain("deepseek_v2", "DeepseekV2ForCausalLM", arch, NAMES)
