"""Rotary position embedding: plain, linear, dynamic NTK, llama3, yarn and longrope frequencies.

It owns the frequencies and the rotation, in both forms: dimension i turns together with dimension i + H/2, or 2i
with 2i + 1 (*pairs*).

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (2402.13753), Llama 3.1. Numbers follow
transformers, with one difference forced by caching: dynamic NTK is a function of the token's own
position, as if the text had been fed one token at a time, so that neither chunking nor a cached
prefix can change a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.arch import Arch, Rope, RopeScaling

KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


def for_requests(arch: Arch, n_tokens: int) -> Arch:
    """``arch`` as an engine serves texts of up to ``n_tokens`` tokens: beyond longrope's original context each row
    has the factors of its request, which are chosen once, by what it may reach (``Request.is_long``). transformers
    goes by the length that a text has reached, so that its KV has to be computed anew once it outgrows that context."""
    return _beyond(arch, n_tokens, lambda s: replace(s, by_row=True))


def for_context(arch: Arch, n_tokens: int) -> Arch:
    """``arch`` with longrope's long factors for all texts, where ``n_tokens`` are more than its original context."""
    return _beyond(
        arch, n_tokens, lambda s: replace(s, factors=s.long_factors, long_factors=(), by_row=False)
    )


def short_context(arch: Arch) -> int:
    """``RunnerLimits.short_context``: the most tokens that a text with the short factors may reach; 0: rows have the
    same factors whatever their text may reach."""
    by_row = (r.scaling for r in arch.ropes if r.scaling is not None and r.scaling.by_row)
    return min((s.original_max_position for s in by_row), default=0)


def _beyond(arch: Arch, n_tokens: int, change: Callable[[RopeScaling], RopeScaling]) -> Arch:
    """``arch`` with ropes of two kinds of factors changed, where ``n_tokens`` do not fit its context."""
    two = [r.scaling for r in arch.ropes if r.scaling is not None and r.scaling.long_factors]
    if n_tokens <= arch.max_position or not two:
        return arch

    def changed(rope: Rope | None) -> Rope | None:
        if rope is None or rope.scaling is None or not rope.scaling.long_factors:
            return rope
        return replace(rope, scaling=change(rope.scaling))

    layers = [replace(x, attn=replace(x.attn, rope=changed(x.attn.rope))) for x in arch.layers]
    return replace(arch, layers=tuple(layers), max_position=max(s.longest for s in two))


def rope_tables(
    rope: Rope, H: int, pos_T: jax.Array, long_T: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Two float32[T, 2, h/2] for absolute positions int32[T]: (cos, cos) and (-sin, sin); h is ``rope.rotary`` or,
    where that is 0, the head size H. Of pairs float32[T, h/2, 2]. ``long_T``: bool[T], tokens that have longrope's
    long factors, where it is by row.

    Concatenated on purpose: XLA:CPU would fuse a bare cosine into every use and evaluate it for
    every head of every layer.
    """
    s, h = rope.scaling, rope.rotary or H
    pos_T1 = jnp.maximum(pos_T, 0).astype(jnp.float32)[:, None]
    if s is not None and s.kind == "dynamic":
        freq, scale = _dynamic(h, rope.theta, s, pos_T1), 1.0
    else:
        freq, scale = inverse_frequencies(h, rope.theta, s)
    if s is not None and long_T is not None:
        far = replace(s, factors=s.long_factors)
        freq = jnp.where(long_T[:, None], inverse_frequencies(h, rope.theta, far)[0], freq)
    angle_TH = pos_T1 * freq
    cos_TH, sin_TH = jnp.cos(angle_TH) * scale, jnp.sin(angle_TH) * scale
    axis = 2 if rope.pairs else 1
    return jnp.stack([cos_TH, cos_TH], axis=axis), jnp.stack([-sin_TH, sin_TH], axis=axis)


def rotate(
    x_TNH: jax.Array, cos_TXY: jax.Array, sin_TXY: jax.Array, *, pairs: bool = False
) -> jax.Array:
    """Heads turned by their token's angles, in the first dimensions if the tables are of fewer; the shape
    stays. ``pairs`` as of the rope that the tables are of.

    Written without a concatenation, which XLA:CPU would evaluate element by element.
    """
    T, N, H = x_TNH.shape
    turned = cos_TXY.shape[1] * cos_TXY.shape[2]
    if turned < H:
        first, rest = x_TNH[..., :turned], x_TNH[..., turned:]
        return jnp.concatenate([rotate(first, cos_TXY, sin_TXY, pairs=pairs), rest], axis=-1)
    x_TNXY = x_TNH.reshape(T, N, *cos_TXY.shape[1:])
    other_TNXY = jnp.flip(x_TNXY, 3 if pairs else 2)
    y_TNXY = x_TNXY * cos_TXY[:, None] + other_TNXY * sin_TXY[:, None]
    return y_TNXY.reshape(T, N, H)


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
    span = s.high_freq_factor - s.low_freq_factor
    above_H = turns_H - s.low_freq_factor
    smooth_H = np.clip(above_H / span, 0.0, 1.0) if span else (above_H >= 0).astype(np.float32)
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


def _longrope(freq_H: np.ndarray, H: int, theta: float, s: RopeScaling) -> tuple[np.ndarray, float]:
    scale = s.attention_factor
    if scale is None:
        grown = math.log(s.factor) / math.log(s.original_max_position)
        scale = math.sqrt(1.0 + grown) if s.factor > 1 else 1.0
    return freq_H / np.asarray(s.factors, np.float32), scale


_SCALED: dict[str, Callable[..., tuple[np.ndarray, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
