"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_moe import experts
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, integer
from jserve.model.moe_specs import MoeNames

NAMES = TensorNames(
    moe=MoeNames(
        each="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        router=("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        width_key="intermediate_size",
    )
)


def arch(config: Config) -> Arch:
    """config.json -> Arch. A missing ``sliding_window`` means none."""
    L = integer(config, "num_hidden_layers")
    return decoder_arch(
        config,
        "mixtral",
        default_eps=1e-5,
        default_kv_heads=8,
        windows=(integer(config, "sliding_window", 0, low=0),) * L,
        ropes=(rope(config, default_theta=1e6),) * L,
        moes=(experts(config, Router(normalise=True)),) * L,
    )


FAMILY = plain("mixtral", "MixtralForCausalLM", arch, NAMES)
