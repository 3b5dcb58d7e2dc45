"""DeepSeek-V2: multi-head latent attention, and from some layer on experts beside shared ones."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_latent import latent_fields
from jserve.model.hf_moe import deepseek_experts
from jserve.model.hf_values import Config, boolean, integer, number, refuse
from jserve.model.moe_specs import MoeNames

NAMES = TensorNames(
    moe=MoeNames(shared="mlp.shared_experts", shared_width_key="moe_intermediate_size")
)


def arch(config: Config) -> Arch:
    """config.json -> Arch."""
    if config.get("scoring_func", "softmax") != "softmax":
        refuse("scoring_func", f"{config['scoring_func']!r} is not supported, only softmax")
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
    method, scale = config.get("topk_method"), number(config, "routed_scaling_factor", 1.0)
    if method in (None, "greedy"):
        return Router(scale=scale)
    if method != "group_limited_greedy":
        refuse("topk_method", f"{method!r} is not supported, only greedy and group_limited_greedy")
    groups = integer(config, "n_group")
    return Router(scale=scale, groups=groups, top_groups=integer(config, "topk_group"))


FAMILY = plain("deepseek_v2", "DeepseekV2ForCausalLM", arch, NAMES)
