"""Stores KV in 8 bits (e4m3) and applies the scales of a checkpoint.

It owns rounding, saturation and the folding of scales. A scale per kv head, for keys and for values, is folded into
what meets the stored numbers, so that no backend or kernel knows of it::

    stored     k / s_k        v / s_v            e4m3: 3 bits of mantissa, at most 448
    attention  (q * s_k) . (k / s_k) = q . k     s_v * (p . (v / s_v)) = p . v

Without scales they are 1, as in vLLM. A token's KV depends on the token and what came before it,
never on who else was in the step, so cached pages hold what computing them again would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.kv_bytes import BYTES, E4M3, as_e4m3, encode

LARGEST = float(jnp.finfo(E4M3).max)


def stored(x: jax.Array, dtype: Any, width: int = 0) -> jax.Array:
    """``x`` as a pool of ``dtype`` takes it: uint16 holds the bits of bfloat16, uint8 those of e4m3, int8 is
    ``width`` bytes (``kv_bytes``). What exceeds e4m3 becomes its largest number; what is not finite becomes NaN,
    which stays visible."""
    if dtype == BYTES:
        return encode(x, width)
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)
    if dtype == jnp.uint8:
        return lax.bitcast_convert_type(stored(x, E4M3), dtype)
    return as_e4m3(x) if dtype == E4M3 else x.astype(dtype)


def scales_of(layer: Any, kv: Sequence[jax.Array], H: int) -> jax.Array | None:
    """float32[K, 2] (of keys, of values) of a layer with heads of ``H`` and this KV; None where all are 1."""
    is_e4m3 = len(kv) == 2 and kv[0].dtype.itemsize == 1 and kv[0].shape[-1] == H
    return layer.get("kv_scale") if is_e4m3 else None


def fold(
    scale_K2: jax.Array | None, q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values as they meet 8-bit KV."""
    if scale_K2 is None:
        return q_TNH, k_TKH, v_TKH
    k_K1, v_K1 = scale_K2[:, :1], scale_K2[:, 1:]
    return q_TNH * _per_query_head(k_K1, q_TNH), k_TKH / k_K1, v_TKH / v_K1


def unfold(scale_K2: jax.Array | None, o_TNH: jax.Array) -> jax.Array:
    """The outputs of attention over such values, in the units of the model."""
    return o_TNH if scale_K2 is None else o_TNH * _per_query_head(scale_K2[:, 1:], o_TNH)


def _per_query_head(scale_K1: jax.Array, x_TNH: jax.Array) -> jax.Array:
    return jnp.repeat(scale_K1, x_TNH.shape[1] // scale_K1.shape[0], axis=0)
