"""What ``quant_matmul`` computes, in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def quant_matmul(x_MD: Array, w_ND: Array, scales_BN: Array) -> Array:
    """float32[M, N]; arguments as of ``api.quant_matmul``."""
    N, D = w_ND.shape
    B = scales_BN.shape[0]
    w_NBI = w_ND.astype(jnp.float32).reshape(N, B, D // B) * scales_BN.T[:, :, None]
    return jnp.matmul(x_MD.astype(jnp.float32), w_NBI.reshape(N, D).T, precision="highest")
