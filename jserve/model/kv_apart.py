"""KV of int8 for the kernels of Hopper: numbers and their scales are arrays of their own, of the same pages.

It owns writes of such pools and what kernels read of bytes. A copy of a block of numbers has rows that are multiples of
16 bytes, which vectors with a scale behind each (``kv_bytes``) are not::

    kv_bytes   keys  int8[P, K, Z, H + 4]                             a layer is (keys, values)
    here       keys  int8[P, K, Z, H]    their scales  [P, K, Z, 4]   a layer is (keys, scales, values, scales)

A page is the same bytes in all, and moves as any other does. Layers that are skipped have no scales, and are
``kv_pool``'s.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model import kv_pool
from jserve.model.attention import LayerKV
from jserve.model.kv_bytes import BYTES, E4M3, encode, form_of
from jserve.model.view import StepView
from pallas_kernels.served import HEAD_DIMS
from pallas_kernels.spec import Pages

INT8 = "int8_per_token_head"
SERVED = (INT8, "fp8_e4m3", "bfloat16")
"""Forms of bytes that the kernels read."""
BEHIND = 4
"""Bytes of a scale."""


def widths(width: int) -> tuple[int, ...]:
    """Those of the arrays in which stored vectors of ``width`` lie: of no other form that is served, nor of plain
    heads, is a vector so much wider than a head."""
    return (width - BEHIND, BEHIND) if width - BEHIND in HEAD_DIMS else (width,)


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """As ``kv_pool.write_kv``."""
    if len(kv) == 2:
        return kv_pool.write_kv(kv, k_TKH, v_TKH, view)
    vectors = [encode(x_TKH, x_TKH.shape[-1] + BEHIND) for x_TKH in (k_TKH, v_TKH)]
    parts = [part for x in vectors for part in (x[..., :-BEHIND], x[..., -BEHIND:])]
    return kv_pool.put(kv, parts, view)


def read_by_kernels(kv: LayerKV, H: int) -> Pages:
    """The pool of a layer with heads of ``H`` in the types that kernels take, the same bytes; without a table."""
    if len(kv) == 4:
        k_scales, v_scales = (lax.bitcast_convert_type(kv[i], jnp.float32) for i in (1, 3))
        return Pages(kv[0], kv[2], None, k_scales, v_scales)
    keys, values = kv
    return Pages(_of_bytes(keys, H), _of_bytes(values, H), None)


def _of_bytes(pool_PKZW: jax.Array, H: int) -> jax.Array:
    if pool_PKZW.dtype != BYTES:
        return pool_PKZW
    if form_of(pool_PKZW.shape[-1], H) == "fp8_e4m3":
        return lax.bitcast_convert_type(pool_PKZW, E4M3)
    return lax.bitcast_convert_type(pool_PKZW.reshape(*pool_PKZW.shape[:-1], H, 2), jnp.bfloat16)
