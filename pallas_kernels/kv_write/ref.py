"""``kv_write``, in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.hopper import Angles, Places

Array = jax.Array
E4M3_MAX = 448.0


def kv_write(
    y_STKCH: Array,
    angles: Angles,
    places: Places,
    pools: tuple[Array, Array],
    *,
    bias_KCH: Array | None = None,
    norms: tuple[Array, Array] | None = None,
    eps: float = 0.0,
    scales_2K: Array | None = None,
) -> tuple[Array, Array, Array]:
    """(float32[T, K, G, H], keys, values); arguments as of ``api.kv_write``."""
    (cos_TX, sin_TX), (page_T, off_T) = angles, places
    y_TKCH = y_STKCH.sum(0)
    y_TKCH = y_TKCH if bias_KCH is None else y_TKCH + bias_KCH
    q_TKGH, k_TKH, v_TKH = y_TKCH[:, :, :-2], y_TKCH[:, :, -2], y_TKCH[:, :, -1]
    if norms is not None:
        q_TKGH = _norm(q_TKGH, norms[0], eps)
        k_TKH = _norm(k_TKH, norms[1], eps)
    q_TKGH = _turn(q_TKGH, cos_TX[:, None, None], sin_TX[:, None, None])
    k_TKH = _turn(k_TKH, cos_TX[:, None], sin_TX[:, None])
    written = []
    for i, (pool, x_TKH) in enumerate(zip(pools, (k_TKH, v_TKH), strict=True)):
        if pool.dtype.itemsize == 1:
            scale_K1 = 1.0 if scales_2K is None else scales_2K[i][:, None]
            x_TKH = jnp.clip(x_TKH / scale_K1, -E4M3_MAX, E4M3_MAX)
        page = jnp.where(page_T >= 0, page_T, pool.shape[0])
        written.append(pool.at[page, :, off_T].set(x_TKH.astype(pool.dtype), mode="drop"))
    return q_TKGH, written[0], written[1]


def _norm(x: Array, weight_H: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight_H


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
