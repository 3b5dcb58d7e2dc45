"""OLMoE: experts in every layer, a norm over all query heads together and all key heads, and clipped queries, keys and
values."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import attention_bias, decoder_arch, full_attention
from jserve.model.hf_moe import experts
from jserve.model.hf_values import Config, boolean, integer, number
from jserve.model.moe_specs import MoeNames

NAMES = TensorNames(moe=MoeNames(width_key="intermediate_size"))


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    full_attention(config)
    router = Router(normalise=boolean(config, "norm_topk_prob", False))
    return decoder_arch(
        config,
        "olmoe",
        default_eps=1e-5,
        qk_norm="width",
        clip_qkv=0.0 if config.get("clip_qkv") is None else number(config, "clip_qkv"),
        moes=(experts(config, router),) * integer(config, "num_hidden_layers"),
        **attention_bias(config),
    )


FAMILY = plain("olmoe", "OlmoeForCausalLM", arch, NAMES)
