"""What ``sample_threshold`` computes, by sorting, in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def sample_threshold(
    logits_RV: Array, temperature_R: Array, top_k_R: Array, top_p_R: Array, min_p_R: Array
) -> Array:
    """float32[R]; arguments as of ``api.sample_threshold``."""
    V = logits_RV.shape[1]
    best_RV = jnp.sort(logits_RV, axis=1, descending=True)
    top_R1 = best_RV[:, :1]
    floor_R = jnp.where(min_p_R > 0, top_R1[:, 0] + temperature_R * jnp.log(min_p_R), -jnp.inf)
    k_R = jnp.where((top_k_R <= 0) | (top_k_R > V), V, top_k_R)
    kth_R = jnp.take_along_axis(best_RV, k_R[:, None] - 1, axis=1)[:, 0]
    floor_R = jnp.maximum(floor_R, kth_R)
    weight_RV = jnp.exp((best_RV - top_R1) / temperature_R[:, None])
    mass_RV = jnp.cumsum(jnp.where(best_RV >= floor_R[:, None], weight_RV, 0.0), axis=1)
    at_R = jnp.sum(mass_RV < top_p_R[:, None] * mass_RV[:, -1:], axis=1)
    edge_R = jnp.take_along_axis(best_RV, jnp.minimum(at_R, V - 1)[:, None], axis=1)[:, 0]
    return jnp.where(top_p_R < 1.0, jnp.maximum(floor_R, edge_R), floor_R)
