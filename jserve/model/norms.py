"""Norms of the residual stream and of heads, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.arch import Norm
from jserve.model.collectives import n_shards, reduce
from jserve.model.mesh import MeshAxis


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, axis: MeshAxis = None) -> jax.Array:
    """Root mean square norm over the last dimension, in float32; ``axis``: over which it is split."""
    return l2_norm(x, eps, axis) * weight.astype(jnp.float32)


def l2_norm(x: jax.Array, eps: float, axis: MeshAxis = None) -> jax.Array:
    """``rms_norm`` without a weight."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(_mean(x * x, axis) + eps)


def normed(norm: Norm, x: jax.Array, weight: jax.Array | None, axis: MeshAxis = None) -> jax.Array:
    """A decoder's norm over the last dimension, in float32; without a weight ``x`` as it is. ``axis``: over which that
    dimension is split."""
    if weight is None:
        return x
    if norm.plus_one:
        weight = weight.astype(jnp.float32) + 1.0
    if norm.centered:
        x = x - _mean(x, axis)
    return rms_norm(x, weight, norm.eps, axis)


def _mean(x: jax.Array, axis: MeshAxis) -> jax.Array:
    """Over the last dimension, of which every shard has as much."""
    own = jnp.mean(x, axis=-1, keepdims=True)
    return own if axis is None else reduce(own, axis) / n_shards(axis)
