"""Granite-MoE and Granite-MoE-Shared: Granite with experts in every layer, and a shared one where config.json gives its
width."""

from __future__ import annotations

from jserve.model.arch import Arch, Router
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import attention_bias, decoder_arch, full_attention, multipliers
from jserve.model.hf_moe import experts
from jserve.model.hf_values import Config, integer
from jserve.model.moe_specs import MoeNames

MOE = "block_sparse_moe"
NAMES = TensorNames(
    moe=MoeNames(
        each="",
        all=(
            (f"{MOE}.input_linear.weight", f"{MOE}.output_linear.weight"),
            (f"{MOE}.experts.gate_up_proj", f"{MOE}.experts.down_proj"),
        ),
        router=(f"{MOE}.router.layer.weight", f"{MOE}.router.weight"),
        shared="shared_mlp",
        shared_gate_up="input_linear",
        shared_down="output_linear",
        width_key="intermediate_size",
        shared_width_key="shared_intermediate_size",
    )
)


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    full_attention(config)
    router = Router(choose="logits")
    moe = experts(config, router, shared=integer(config, "shared_intermediate_size", 0, low=0))
    return decoder_arch(
        config,
        "granite_moe",
        moes=(moe,) * integer(config, "num_hidden_layers"),
        **multipliers(config),
        **attention_bias(config),
    )


FAMILY = plain("granite_moe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), arch, NAMES)
