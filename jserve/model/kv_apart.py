"""KV of int8 for the kernels of Hopper: in a page of a kv head the scales lie behind all numbers (``int8_pages``).

It owns writes and moves of such pools; their shape, and what a vector becomes, are those of ``kv_pool`` and
``kv_bytes``::

    kv_pool    | q[0] s[0] q[1] s[1] ...             Z vectors of H + 4 bytes
    here       | q[0] q[1] ... q[Z-1] s[0] s[1] ...  the same bytes a page, H a number's row, 4 a scale's

Layers that are skipped have no scales and are ``kv_pool``'s.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model import kv_pool
from jserve.model.attention import LayerKV, Places
from jserve.model.kv_bytes import BYTES, E4M3, encode, form_of
from jserve.model.kv_pool import NOBODY
from jserve.model.view import StepView
from pallas_kernels.int8_pages import BEHIND
from pallas_kernels.served import HEAD_DIMS

INT8 = "int8_per_token_head"
SERVED = (INT8, "fp8_e4m3", "bfloat16")
"""Forms of bytes that the kernels read."""


def has_scales(pool_PKZW: jax.Array) -> bool:
    """Whether a layer's pool is of int8 with scales; no other form that is served is as wide."""
    return pool_PKZW.dtype == BYTES and pool_PKZW.shape[-1] - BEHIND in HEAD_DIMS


def as_kernels_read(pool_PKZW: jax.Array, H: int) -> jax.Array:
    """The pool of a layer with heads of ``H`` in the type that a kernel takes; the same bytes."""
    if pool_PKZW.dtype != BYTES or has_scales(pool_PKZW):
        return pool_PKZW
    if form_of(pool_PKZW.shape[-1], H) == "fp8_e4m3":
        return lax.bitcast_convert_type(pool_PKZW, E4M3)
    return lax.bitcast_convert_type(pool_PKZW.reshape(*pool_PKZW.shape[:-1], H, 2), jnp.bfloat16)


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """As ``kv_pool.write_kv``."""
    if not has_scales(kv[0]):
        return kv_pool.write_kv(kv, k_TKH, v_TKH, view)
    page_T = jnp.where(view.pos_T >= 0, view.write_page_T, NOBODY)
    places = (page_T, view.write_off_T)
    return tuple(
        _put(pool, places, encode(x_TKH, pool.shape[-1]))
        for pool, x_TKH in zip(kv, (k_TKH, v_TKH), strict=True)
    )


def move(kv: LayerKV, old: Places, new: Places) -> LayerKV:
    """As ``kv_pool.move``."""
    if not has_scales(kv[0]):
        return kv_pool.move(kv, old, new)
    to = (jnp.where(new[0] > 0, new[0], NOBODY), new[1])
    return tuple(_put(pool, to, _at(pool, old)) for pool in kv)


def laid_out(pool_PKZW: jax.Array) -> jax.Array:
    """A pool as ``kv_pool`` has it, the way it lies here."""
    P, K, Z, W = pool_PKZW.shape
    if not has_scales(pool_PKZW):
        return pool_PKZW
    q, s = (pool_PKZW[..., part].reshape(P, K, -1) for part in _parts(W))
    return jnp.concatenate([q, s], axis=-1).reshape(P, K, Z, W)


def _parts(W: int) -> tuple[slice, slice]:
    """Of a vector: its number, its scale."""
    return slice(0, W - BEHIND), slice(W - BEHIND, W)


def _rows(pool_PKZW: jax.Array, places: Places, part: slice) -> jax.Array:
    """int32[A, K]: where the numbers or the scales of entries lie, in the pool seen as rows of as many bytes; past its
    end for page ``NOBODY``."""
    P, K, Z, W = pool_PKZW.shape
    size = part.stop - part.start
    page_A1, off_A1 = (x[:, None] for x in places)
    first_AK = (page_A1 * K + jnp.arange(K, dtype=jnp.int32)) * (Z * W // size)
    first_AK += Z * part.start // size
    return jnp.where(page_A1 == NOBODY, P * K * Z * W // size, first_AK + off_A1)


def _put(pool: jax.Array, places: Places, x_AKW: jax.Array) -> jax.Array:
    shape = pool.shape
    for part in _parts(shape[-1]):
        rows = pool.reshape(-1, part.stop - part.start).at[_rows(pool, places, part)]
        new = rows.set(x_AKW[..., part], mode="drop", unique_indices=True)
        pool = new.reshape(shape)
    return pool


def _at(pool: jax.Array, places: Places) -> jax.Array:
    """int8[A, K, W] of entries."""
    parts = _parts(pool.shape[-1])
    found = [pool.reshape(-1, p.stop - p.start)[_rows(pool, places, p)] for p in parts]
    return jnp.concatenate(found, axis=-1)
