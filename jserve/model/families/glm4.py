"""GLM-4 (0414): norms before and after attention and MLP, half of each head turning in pairs, one tensor for gate and
up."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import decoder_arch, full_attention
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, boolean, integer

NAMES = TensorNames(
    attn_out_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_out_norm="post_mlp_layernorm",
    gate_up="gate_up_proj",
)


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on q, k and v; the output has none."""
    full_attention(config)
    L, H = integer(config, "num_hidden_layers"), integer(config, "head_dim", 128)
    turns = rope(config, H=H, default_partial=0.5, pairs=True)
    return decoder_arch(
        config,
        "glm4",
        default_eps=1.5625e-7,
        default_kv_heads=2,
        default_head_dim=128,
        qkv_bias=boolean(config, "attention_bias", True),
        ropes=(turns,) * L,
    )


FAMILY = plain("glm4", "Glm4ForCausalLM", arch, NAMES)
