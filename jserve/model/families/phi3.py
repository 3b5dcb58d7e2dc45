"""Phi-3, Phi-3.5 and Phi-4-mini: one tensor for queries, keys and values and one for gate and up; heads may turn
in part, by longrope."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, integer, only

NAMES = TensorNames(qkv="qkv_proj", gate_up="gate_up_proj")


def arch(config: Config) -> Arch:
    """config.json -> Arch. Under longrope the context is the original one, where the short factors hold, unless a
    longer one is asked for (``rope.for_requests``)."""
    L = integer(config, "num_hidden_layers")
    only(config, "full_attn_mod", 1)
    only(config, "interpolate_factor", 1)
    H = integer(
        config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads")
    )
    return decoder_arch(
        config,
        "phi3",
        default_eps=1e-5,
        windows=(integer(config, "sliding_window", 0, low=0),) * L,
        ropes=(rope(config, H=H, yarn_is_longrope=True),) * L,
    )


FAMILY = plain("phi3", "Phi3ForCausalLM", arch, NAMES)
