"""Norms of the residual stream and of heads, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.arch import Norm


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last dimension, in float32."""
    return l2_norm(x, eps) * weight.astype(jnp.float32)


def l2_norm(x: jax.Array, eps: float) -> jax.Array:
    """``rms_norm`` without a weight."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + eps)


def normed(norm: Norm, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """A decoder's norm over the last dimension, in float32; without a weight ``x`` as it is."""
    if weight is None:
        return x
    if norm.plus_one:
        weight = weight.astype(jnp.float32) + 1.0
    if norm.centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return rms_norm(x, weight, norm.eps)
