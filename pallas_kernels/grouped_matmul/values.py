"""The arguments of ``grouped_mlp`` besides the tokens and their choices: the experts, and what is static."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ACTIVATIONS = ("silu", "gelu_tanh", "clamped")


class Experts(NamedTuple):
    """Weights as checkpoints store them, [out, in], bfloat16 or float16; biases of any float type or None."""

    gate_up_E2FD: Any
    """Of each expert the gate's rows, then the rows of up."""
    down_EDF: Any
    gate_up_bias_E2F: Any = None
    down_bias_ED: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """What is made of the outputs of gate and up."""

    name: str = "silu"
    """``silu`` and ``gelu_tanh``: of gate, times up. ``clamped`` (GPT-OSS): (up + 1) * gate * sigmoid(alpha * gate)
    with gate at most ``limit`` and up within +-``limit``."""
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Everything static that a caller chooses."""

    activation: Activation = Activation()
    tune: Mapping[str, Any] | None = None
    """Instead of entries of the kernel's tune.json."""
    interpret: Any = None
    """``plgpu.InterpretGPUParams()`` runs on a CPU."""
