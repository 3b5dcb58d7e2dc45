"""``kv_write``: what it takes and what it refuses.

It owns shapes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import hopper
from pallas_kernels.kv_write.hopper import ROWS, Angles, Places, Tile
from pallas_kernels.served import check_heads, multiplied

Array = jax.Array


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
    q_rows: int = 0,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Turn queries and keys to their positions and write keys and values to their pages.

    Args:
        y_STKCH: float32 projections as S partial sums; of kv head k its G queries, its key, its value
            (C = G + 2).
        pools: keys and values [P, K, Z, H], bfloat16, float16 or float8_e4m3fn. Updated in place where the
            caller's program owns them (donated).
        bias_KCH: of any float type, added first.
        norms: weights [H] of the root mean square norms of queries and of keys; None: none.
        eps: of those norms.
        scales_2K: float32; 8-bit keys and values are stored divided by these, held to +-448.
        q_rows: rows of queries a kv head in the result, at least G (0: G). Those from G on are not
            written.
        interpret: ``plgpu.InterpretGPUParams()`` runs on a CPU.

    Returns:
        (queries [T, K, q_rows, H] in the dtype that attention multiplies, keys, values).

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    tile = _tile(y_STKCH, angles, pools[0], q_rows, eps, norms is not None)
    wide = tile.kv_dtype.itemsize > 1
    if wide and scales_2K is not None:
        raise ValueError(f"scales of keys in {tile.kv_dtype.name}: only 8 bits have scales")
    q_norm_H, k_norm_H = norms or (None, None)
    optional = {"bias": bias_KCH, "q_norm": q_norm_H, "k_norm": k_norm_H}
    if not wide:
        given = jnp.ones((2, tile.K)) if scales_2K is None else scales_2K
        optional["factors"] = 1.0 / given
    present = {name: x for name, x in optional.items() if x is not None}
    return hopper.write(y_STKCH, angles, places, pools, present, tile, interpret)


def _tile(
    y_STKCH: Any, angles: Angles, keys_PKZH: Any, q_rows: int, eps: float, normed: bool
) -> Tile:
    S, T, K, C, H = y_STKCH.shape
    if y_STKCH.dtype != jnp.float32:
        raise ValueError(f"projections are {y_STKCH.dtype}, not float32")
    if keys_PKZH.shape[1] != K:
        raise ValueError(f"projections of {K} kv heads, keys of {keys_PKZH.shape[1]}")
    check_heads((C - 2) * K, H, keys_PKZH)
    if K * C < ROWS:
        raise ValueError(f"{K * C} heads in all: the kernel takes {ROWS} at once")
    if angles.cos_TX.shape != (T, H // 2):
        raise ValueError(f"angles of shape {angles.cos_TX.shape}, not {(T, H // 2)}")
    if q_rows and q_rows < C - 2:
        raise ValueError(f"{q_rows} rows for {C - 2} queries")
    kv_dtype = jnp.dtype(keys_PKZH.dtype)
    return Tile(
        S=S,
        T=T,
        K=K,
        G=C - 2,
        H=H,
        q_rows=q_rows or C - 2,
        q_dtype=jnp.dtype(multiplied(kv_dtype)),
        kv_dtype=kv_dtype,
        eps=eps,
        normed=normed,
    )
