"""The experts of a layer by the Pallas kernel for Hopper: the form of ``moe`` where attention is ``hopper``.

It owns the way from a layer's parameters to the kernel's arguments.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jserve.model.arch import Clamped, Moe
from jserve.model.moe import Outputs, Params
from pallas_kernels.flash import M
from pallas_kernels.grouped_matmul import (
    SERVED_DTYPES,
    Activation,
    Experts,
    ExpertSpec,
    grouped_mlp,
    serves as serves_sizes,
)

ACTIVATIONS = ("silu", "gelu_tanh")


def grouped(
    moe: Moe,
    p: Params,
    x_TD: jax.Array,
    expert_TX: jax.Array,
    scale_TX: jax.Array,
    *,
    interpret: Any = None,
) -> Outputs:
    """Two kernels over the rows of all experts that a token chose; each of these is read once, no other is."""
    w = p["expert_gate_up"]
    bias = p["expert_gate_up_bias"].reshape(moe.E, 2, -1) if moe.expert_bias else None
    experts = Experts(
        gate_up_E2FD=w.reshape(moe.E, 2, *w.shape[1:]),
        down_EDF=p["expert_down"],
        gate_up_bias_E2F=bias,
    )
    spec = ExpertSpec(activation=_activation(moe), interpret=interpret)
    scale = scale_TX if moe.router.on_input else None
    return grouped_mlp(x_TD, expert_TX, experts, spec, scale_TX=scale)


def serves(moe: Moe, p: Params) -> bool:
    """True if the kernel takes these experts, or this device's share of each."""
    _, D, F = p["expert_down"].shape
    return not unserved(moe, D, F, p["expert_down"].dtype)


def unserved(moe: Moe, D: int, F: int, dtype: Any) -> str:
    """The reason why the kernel takes no experts of this width ``F`` on a device; empty: it does."""
    if not isinstance(moe.activation, Clamped) and moe.activation not in ACTIVATIONS:
        return f"hidden_act {moe.activation} is none of {', '.join(ACTIVATIONS)}"
    if not serves_sizes(D, F):
        return f"it takes multiples of {M}, not hidden_size {D} with {F} of an expert's width on a device"
    if dtype not in SERVED_DTYPES:
        return f"it takes bfloat16 and float16, not {jnp.dtype(dtype).name}"
    return ""


def _activation(moe: Moe) -> Activation:
    if isinstance(moe.activation, Clamped):
        return Activation(name="clamped", alpha=moe.activation.alpha, limit=moe.activation.limit)
    return Activation(name=moe.activation)
