"""Rotary position embedding: plain, linear, dynamic NTK, llama3 and yarn frequencies.

It owns the frequencies and the rotation. The half-split form: dimension i turns together with dimension i + H/2.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1. Numbers follow
transformers, with one difference forced by caching: dynamic NTK is a function of the token's own
position, as if the text had been fed one token at a time, so that neither chunking nor a cached
prefix can change a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.arch import Arch, RopeScaling

KINDS = ("linear", "dynamic", "llama3", "yarn")


def rope_tables(arch: Arch, pos_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two float32[T, 2, H/2] for absolute positions int32[T]: (cos, cos) and (-sin, sin); of
    ``Arch.rotary`` dimensions in place of H where that is set.

    Concatenated on purpose: XLA:CPU would fuse a bare cosine into every use and evaluate it for
    every head of every layer.
    """
    s, H = arch.rope_scaling, arch.rotary or arch.H
    pos_T1 = jnp.maximum(pos_T, 0).astype(jnp.float32)[:, None]
    if s is not None and s.kind == "dynamic":
        freq, scale = _dynamic(H, arch.rope_theta, s, pos_T1), 1.0
    else:
        freq, scale = inverse_frequencies(H, arch.rope_theta, s)
    angle_TH = pos_T1 * freq
    cos_TH, sin_TH = jnp.cos(angle_TH) * scale, jnp.sin(angle_TH) * scale
    return jnp.stack([cos_TH, cos_TH], axis=1), jnp.stack([-sin_TH, sin_TH], axis=1)


def rotate(x_TNH: jax.Array, cos_T2H: jax.Array, sin_T2H: jax.Array) -> jax.Array:
    """Heads turned by their token's angles, in the first dimensions if the tables are of fewer; the shape
    stays.

    Written without a concatenation, which XLA:CPU would evaluate element by element.
    """
    T, N, H = x_TNH.shape
    turned = 2 * cos_T2H.shape[-1]
    if turned < H:
        first, rest = x_TNH[..., :turned], x_TNH[..., turned:]
        return jnp.concatenate([rotate(first, cos_T2H, sin_T2H), rest], axis=-1)
    x_TN2H = x_TNH.reshape(T, N, 2, H // 2)
    y_TN2H = x_TN2H * cos_T2H[:, None] + jnp.flip(x_TN2H, 2) * sin_T2H[:, None]
    return y_TN2H.reshape(T, N, H)


def inverse_frequencies(
    H: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """(radians per token float32[H/2], factor on cos and sin) of every kind but dynamic."""
    freq_H = 1.0 / _powers(H, theta)
    if scaling is None:
        return freq_H, 1.0
    return _SCALED[scaling.kind](freq_H, H, theta, scaling)


def _powers(H: int, theta: float) -> np.ndarray:
    exponent_H = np.arange(0, H, 2, dtype=np.float32) / np.float32(H)
    return np.power(np.float32(theta), exponent_H)


def _linear(freq_H: np.ndarray, H: int, theta: float, s: RopeScaling) -> tuple[np.ndarray, float]:
    return freq_H / np.float32(s.factor), 1.0


def _llama3(freq_H: np.ndarray, H: int, theta: float, s: RopeScaling) -> tuple[np.ndarray, float]:
    wavelength_H = 2 * math.pi / freq_H
    turns_H = s.original_max_position / wavelength_H
    smooth_H = (turns_H - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth_H = np.clip(smooth_H, 0.0, 1.0)
    return ((1 - smooth_H) * freq_H / s.factor + smooth_H * freq_H).astype(np.float32), 1.0


def _yarn(freq_H: np.ndarray, H: int, theta: float, s: RopeScaling) -> tuple[np.ndarray, float]:
    low, high = (
        _yarn_dim(b, H, theta, s.original_max_position) for b in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, H - 1)
    span = (high - low) or 0.001
    ramp_H = np.clip((np.arange(H // 2, dtype=np.float32) - low) / span, 0.0, 1.0)
    freq_H = freq_H / s.factor * ramp_H + freq_H * (1 - ramp_H)
    return freq_H.astype(np.float32), _yarn_scale(s)


def _yarn_dim(turns: float, H: int, theta: float, original: int) -> float:
    """The dimension that makes ``turns`` turns within the original context."""
    return H * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_scale(s: RopeScaling) -> float:
    def mscale(m: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * m * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)


def _dynamic(H: int, theta: float, s: RopeScaling, pos_T1: jax.Array) -> jax.Array:
    """Radians per token float32[T, H/2]: the base grows once a position leaves the original
    context."""
    n_T1 = jnp.maximum(pos_T1 + 1, s.original_max_position)
    growth_T1 = s.factor * n_T1 / s.original_max_position - (s.factor - 1)
    base_T1 = theta * growth_T1 ** (H / (H - 2))
    return 1.0 / base_T1 ** (np.arange(0, H, 2, dtype=np.float32) / H)


_SCALED: dict[str, Callable[..., tuple[np.ndarray, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
