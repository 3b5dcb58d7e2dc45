"""``add_norm``, in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def add_norm(
    y_STD: Array, x_TD: Array, weight_D: Array, eps: float, dtype: Any
) -> tuple[Array, Array]:
    """Arguments and results as of ``api.add_norm``."""
    x_TD = x_TD + y_STD.sum(0)
    mean_T1 = jnp.mean(x_TD * x_TD, axis=1, keepdims=True)
    normed_TD = x_TD * jax.lax.rsqrt(mean_T1 + eps) * weight_D.astype(jnp.float32)
    return x_TD, normed_TD.astype(dtype)
