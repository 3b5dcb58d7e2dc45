"""``kv_write``: what it takes and what it refuses.

It owns shapes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bench.candidates.kv_write import hopper
from bench.candidates.kv_write.hopper import ROWS, Tile
from pallas_kernels.served import check_heads, multiplied

Array = jax.Array


def kv_write(
    y_TKCH: Array,
    cos_TX: Array,
    sin_TX: Array,
    page_T: Array,
    off_T: Array,
    keys_PKZH: Array,
    values_PKZH: Array,
    *,
    bias_KCH: Array | None = None,
    norms_2H: Array | None = None,
    eps: float = 0.0,
    scales_2K: Array | None = None,
    q_rows: int = 0,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Turn queries and keys to their positions and write keys and values to their pages.

    Args:
        y_TKCH: float32 projections; of kv head k its G queries, its key, its value (C = G + 2).
        cos_TX, sin_TX: float32 of each token's angles, X = H / 2; dimension i turns with i + X.
        page_T, off_T: int32 place of each token; nothing is written where the page is negative.
            No two tokens have the same place.
        keys_PKZH, values_PKZH: the pool, bfloat16, float16 or float8_e4m3fn. Updated in place
            where the caller's program owns them (donated).
        bias_KCH: float32, added first.
        norms_2H: float32 weights of the root mean square norms of queries and of keys; None: none.
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
    tile = _tile(y_TKCH, cos_TX, keys_PKZH, q_rows, eps, norms_2H is not None)
    wide = tile.kv_dtype.itemsize > 1
    if wide and scales_2K is not None:
        raise ValueError(f"scales of keys in {tile.kv_dtype.name}: only 8 bits have scales")
    optional = {"bias": bias_KCH, "norms": norms_2H}
    if not wide:
        given = jnp.ones((2, tile.K)) if scales_2K is None else scales_2K
        optional["factors"] = 1.0 / given
    present = {name: x.astype(jnp.float32) for name, x in optional.items() if x is not None}
    tables = (cos_TX, sin_TX, page_T, off_T)
    return hopper.write(y_TKCH, *tables, keys_PKZH, values_PKZH, present, tile, interpret)


def _tile(y_TKCH: Any, cos_TX: Any, keys_PKZH: Any, q_rows: int, eps: float, normed: bool) -> Tile:
    T, K, C, H = y_TKCH.shape
    if y_TKCH.dtype != jnp.float32:
        raise ValueError(f"projections are {y_TKCH.dtype}, not float32")
    if keys_PKZH.shape[1] != K:
        raise ValueError(f"projections of {K} kv heads, keys of {keys_PKZH.shape[1]}")
    check_heads((C - 2) * K, H, keys_PKZH)
    if K * C < ROWS:
        raise ValueError(f"{K * C} heads in all: the kernel takes {ROWS} at once")
    if cos_TX.shape != (T, H // 2):
        raise ValueError(f"angles of shape {cos_TX.shape}, not {(T, H // 2)}")
    if q_rows and q_rows < C - 2:
        raise ValueError(f"{q_rows} rows for {C - 2} queries")
    kv_dtype = jnp.dtype(keys_PKZH.dtype)
    return Tile(
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
