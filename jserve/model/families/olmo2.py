"""OLMo 2: norms on what attention and MLP add and none before them, and a norm over all query heads together, and
all key heads."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import attention_bias, decoder_arch, full_attention
from jserve.model.hf_values import Config

POST_NORMS = TensorNames(
    attn_norm="",
    attn_out_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_out_norm="post_feedforward_layernorm",
)


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    full_attention(config)
    return decoder_arch(
        config,
        "olmo2",
        default_eps=1e-5,
        qk_norm="width",
        **attention_bias(config),
    )


FAMILY = plain("olmo2", "Olmo2ForCausalLM", arch, POST_NORMS)
