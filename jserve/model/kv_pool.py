"""Lays out, writes and moves a layer's KV for the backends on GPUs.

The layout is [P, K, Z, H], in which a kv head's share of a page is one contiguous run.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jserve.model.attention import LayerKV, Places
from jserve.model.kv_quant import stored
from jserve.model.view import StepView

NOBODY = -1
"""Page of what is written nowhere."""


def kv_shape(K: int, H: int, n_pages: int, page_size: int) -> tuple[int, ...]:
    return (n_pages, K, page_size, H)


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """Scatter each token's key and value to its page and offset; padding writes nothing.

    The pool is seen as rows of H, so that XLA scatters along its first dimension and has nothing to
    transpose. No two tokens share a place, and XLA is told so: it would otherwise write 16-bit
    values by compare-and-swap.
    """
    vectors = zip(kv, (k_TKH, v_TKH), strict=True)
    return put(kv, [stored(x, pool.dtype, pool.shape[-1]) for pool, x in vectors], view)


def put(kv: LayerKV, vectors: Sequence[jax.Array], view: StepView) -> LayerKV:
    """``write_kv`` of vectors [T, K, ...] that are as each array of a layer stores them."""
    page_T = jnp.where(view.pos_T >= 0, view.write_page_T, NOBODY)
    row_TK = _rows(kv[0], (page_T, view.write_off_T))
    return tuple(_put(pool, row_TK, x) for pool, x in zip(kv, vectors, strict=True))


def move(kv: LayerKV, old: Places, new: Places) -> LayerKV:
    """Copy entries to other places; those of page 0 belong to no token, and stay."""
    to_A = jnp.where(new[0] > 0, new[0], NOBODY)
    old_AK, new_AK = _rows(kv[0], old), _rows(kv[0], (to_A, new[1]))

    def one(pool: jax.Array) -> jax.Array:
        return _put(pool, new_AK, pool.reshape(-1, pool.shape[-1])[old_AK])

    return tuple(map(one, kv))


def _rows(pool_PKZH: jax.Array, places: Places) -> jax.Array:
    """int32[A, K]: where the heads of entries lie in the pool seen as rows of H; past its end for
    page ``NOBODY``."""
    P, K, Z, _ = pool_PKZH.shape
    page_A1, off_A1 = (x[:, None] for x in places)
    row_AK = (page_A1 * K + jnp.arange(K, dtype=jnp.int32)) * Z + off_A1
    return jnp.where(page_A1 == NOBODY, P * K * Z, row_AK)


def _put(pool: jax.Array, row_AK: jax.Array, stored_AKH: jax.Array) -> jax.Array:
    rows = pool.reshape(-1, pool.shape[-1]).at[row_AK]
    return rows.set(stored_AKH, mode="drop", unique_indices=True).reshape(pool.shape)
