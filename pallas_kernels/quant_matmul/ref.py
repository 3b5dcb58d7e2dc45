"""Computes ``quant_matmul`` in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul.values import Weights

Array = jax.Array
HALF = np.arange(16)
FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12])
TABLES = {"int4": HALF - 8, "uint4": HALF, "e2m1": np.concatenate([FLOATS, -FLOATS])}
"""Kind of half a byte -> the number of each code."""


def quant_matmul(x_TD: Array, w: Weights, kind: str, *, x_scale_TB: Array | None = None) -> Array:
    """float32[T, N]; arguments as of ``api.quant_matmul``."""
    q_ND = numbers(w.q, kind)
    (N, D), B = q_ND.shape, w.scale_NB.shape[1]
    w_NBG = q_ND.reshape(N, B, D // B)
    if w.zero_NB is not None:
        w_NBG = w_NBG - w.zero_NB.astype(jnp.float32)[..., None]
    w_NBG = w_NBG * w.scale_NB[..., None]
    x_TBG = x_TD.astype(jnp.float32).reshape(-1, B, D // B)
    if x_scale_TB is not None:
        x_TBG = x_TBG * x_scale_TB[..., None]
    return jnp.einsum("tbg,nbg->tn", x_TBG, w_NBG, precision="highest")


def numbers(q: Array, kind: str) -> Array:
    """float32[N, D]."""
    if kind not in TABLES:
        return q.astype(jnp.float32)
    N, n = q.shape
    bytes_ = q.reshape(N, n // 16, 16)
    codes = jnp.stack([bytes_ & 15, bytes_ >> 4], axis=2).reshape(N, 2 * n)
    return jnp.asarray(TABLES[kind], jnp.float32)[codes]
