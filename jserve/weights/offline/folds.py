"""Changes of a layer that leave its function as it is: inputs of a matrix divided by scales, and rotations.

It owns who takes what up: a norm, the rows of ``up`` or of the values gives back what the matrix behind it takes, and
the residual stream turns with everything that reads or writes it. Parameters are float32, in the layout of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jserve.errors import ConfigError
from jserve.model.arch import Arch, DecoderLayer
from jserve.weights.quant.methods.rotation import hadamard, rotation

Layer = dict[str, np.ndarray]
NORMS = {"qkv": "attn_norm", "gate_up": "mlp_norm"}
"""The norm before each of these matrices."""


def can_divide(spec: DecoderLayer, p: Mapping[str, Any], product: str) -> bool:
    """True if the inputs of ``product`` can be divided by scales without a change of what the layer computes."""
    if product in NORMS:
        return NORMS[product] in p and not spec.parallel
    return product == "down" or not spec.attn.clip_qkv


def alike(spec: DecoderLayer, product: str, values_D: np.ndarray) -> np.ndarray:
    """``values_D``, made the same for inputs of ``product`` that need one scale: heads that share a value head."""
    if product != "o":
        return values_D
    heads = spec.attn
    values_KGH = values_D.reshape(heads.K, heads.N // heads.K, heads.H)
    return np.broadcast_to(values_KGH.max(axis=1, keepdims=True), values_KGH.shape).reshape(-1)


def divided(
    arch: Arch, spec: DecoderLayer, p: Layer, product: str, s_D: np.ndarray, dtype: Any
) -> tuple[Layer, np.ndarray]:
    """``p`` with the inputs of ``product`` divided by ``s_D``, and the scales that it took: a norm's weights are
    rounded to ``dtype``, and the matrix takes up what they really have."""
    p = dict(p)
    if product in NORMS:
        plus = 1.0 if arch.norm.plus_one else 0.0
        name, gain_D = NORMS[product], p[NORMS[product]] + plus
        p[name] = _as(gain_D / s_D - plus, dtype)
        after_D = p[name] + plus
        s_D = np.where(after_D != 0, gain_D / np.where(after_D == 0, 1.0, after_D), 1.0)
    elif product == "down":
        p["gate_up"] = _rows_divided(p["gate_up"], 1, s_D[:, None])
        if "gate_up_bias" in p:
            p["gate_up_bias"] = _rows_divided(p["gate_up_bias"], 1, s_D)
    else:
        heads = spec.attn
        s_KH = s_D.reshape(heads.K, -1, heads.H)[:, 0]
        p["qkv"] = _values_divided(p["qkv"], s_KH[..., None])
        if "qkv_bias" in p:
            p["qkv_bias"] = _values_divided(p["qkv_bias"], s_KH)
    p[product] = p[product] * s_D.astype(np.float32)
    return p, s_D.astype(np.float32)


def _as(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype).astype(np.float32)


def _rows_divided(x: np.ndarray, at: int, s: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[at] /= s
    return x


def _values_divided(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[:, -1] /= s
    return x


def check_rotates(arch: Arch, layers: list[Mapping[str, Any]]) -> None:
    """Refuse a model whose residual stream cannot turn. Raises ConfigError; ``field`` is ``rotate``."""
    why = ""
    if arch.norm.centered:
        why = "its norms take off the mean"
    elif any("attn_out_norm" in p or "mlp_out_norm" in p for p in layers):
        why = "it has norms behind its blocks"
    elif any("attn_norm" not in p for p in layers):
        why = "it has no norm before attention"
    if why:
        raise ConfigError(f"rotate: this model cannot be rotated: {why}", field="rotate")


class Turn:
    """One rotation of a model's residual stream, and one of its value heads (R1 and R2 of SpinQuant, not learned)."""

    def __init__(self, arch: Arch, seed: int = 0) -> None:
        self._plus = 1.0 if arch.norm.plus_one else 0.0
        self.stream_DD = rotation(arch.D, seed)

    def inputs(self, w: np.ndarray, norm_D: np.ndarray | None) -> np.ndarray:
        """A matrix [..., D] that reads the stream, and the norm before it, which is flat from then on."""
        gain_D = 1.0 if norm_D is None else norm_D.astype(np.float64) + self._plus
        return (w.astype(np.float64) * gain_D @ self.stream_DD).astype(np.float32)

    def outputs(self, w: np.ndarray) -> np.ndarray:
        """A matrix [D, ...] or bias [D] that writes to the stream."""
        return (self.stream_DD.T @ w.astype(np.float64)).astype(np.float32)

    def flat(self, norm_D: np.ndarray) -> np.ndarray:
        return np.full_like(norm_D, 1.0 - self._plus)

    def layer(self, spec: DecoderLayer, p: Layer) -> Layer:
        """A layer of the turned model."""
        p = dict(p)
        after = "attn_norm" if spec.parallel else "mlp_norm"
        p["qkv"] = self.inputs(p["qkv"], p["attn_norm"])
        p["gate_up"] = self.inputs(p["gate_up"], p[after])
        for name in ("o", "down", "o_bias", "down_bias"):
            if name in p:
                p[name] = self.outputs(p[name])
        for name in {"attn_norm", after}:
            p[name] = self.flat(p[name])
        return self._values(spec, p)

    def _values(self, spec: DecoderLayer, p: Layer) -> Layer:
        heads = spec.attn
        if heads.clip_qkv or heads.H & (heads.H - 1):
            return p
        turn_HH, D = hadamard(heads.H), p["qkv"].shape[-1]
        qkv = p["qkv"].copy()
        qkv[:, -1] = np.einsum("khd,hj->kjd", qkv[:, -1], turn_HH)
        o = p["o"].reshape(D, heads.N, heads.H) @ turn_HH
        p = {**p, "qkv": qkv, "o": o.reshape(p["o"].shape).astype(np.float32)}
        if "qkv_bias" in p:
            bias = p["qkv_bias"].copy()
            bias[:, -1] = bias[:, -1] @ turn_HH
            p["qkv_bias"] = bias
        return p
