"""Stores KV as bytes: numbers of 8 or 4 bits, behind them the scale of their vector.

A vector of H numbers, a token's key or value in one kv head, is one run of bytes in the pool, so pages, tiers, disk and
swap move scales with what they scale::

    int8_per_token_head   q q q ... q  s s s s       H + 4 bytes     x = s * q             s float32
    int4_per_token_head   q/q q/q ...  l l s s       H / 2 + 4       x = l + s * q         l, s bfloat16
    fp8_e4m3              x x x ... x                H               where other layers have other forms
    bfloat16, float32     bits                       2 H, 4 H        layers that are skipped

A byte of int4 holds number j in its low half and j + H / 2 in its high half. How wide a pool is says which form it has
(``arch.with_kv_forms`` refuses heads of which two forms are as wide). A vector with
something not finite reads as NaN, which stays visible in its own row. A token's bytes depend on nothing but its
own key and value, so cached pages hold what computing them again would give.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve.kv_layout import KV_FORMS, stored_width

BYTES = jnp.dtype(jnp.int8)
"""The type of such a pool."""
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
_SKIPPED = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def form_of(width: int, H: int) -> str:
    """The form in which ``width`` bytes are a vector of ``H`` numbers."""
    forms = (*KV_FORMS, "fp8_e4m3", *_SKIPPED)
    return next(form for form in forms if stored_width(form, H) == width)


def encode(x: jax.Array, width: int) -> jax.Array:
    """int8[..., width] of numbers [..., H]."""
    form, x = form_of(width, x.shape[-1]), x.astype(jnp.float32)
    if form == "int8_per_token_head":
        return _encode_int8(x)
    if form == "int4_per_token_head":
        return _encode_int4(x)
    if form == "fp8_e4m3":
        return lax.bitcast_convert_type(as_e4m3(x), BYTES)
    return _bytes(x.astype(_SKIPPED[form]))


def as_e4m3(x: jax.Array) -> jax.Array:
    """What exceeds e4m3 becomes its largest number; what is not finite becomes NaN."""
    most = float(jnp.finfo(E4M3).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), jnp.nan).astype(E4M3)


def widened(x: jax.Array, H: int) -> jax.Array:
    """Vectors of a pool as numbers [..., H]: bytes in float32, all else as it is."""
    return decode(x, H) if x.dtype == BYTES else x


def decode(x: jax.Array, H: int) -> jax.Array:
    """float32[..., H] of int8[..., width]."""
    form = form_of(x.shape[-1], H)
    if form == "int8_per_token_head":
        return x[..., :H].astype(jnp.float32) * _numbers_of(x[..., H:], jnp.float32)
    if form == "int4_per_token_head":
        return _decode_int4(x, H)
    if form == "fp8_e4m3":
        return lax.bitcast_convert_type(x, E4M3).astype(jnp.float32)
    return _numbers_of(x, _SKIPPED[form]).astype(jnp.float32)


def rotated(x: jax.Array) -> jax.Array:
    """``x[..., H]`` times the orthogonal Hadamard matrix of H, a power of two. By sums alone, so that a vector's bits
    do not depend on how many there are."""
    shape, H, n = x.shape, x.shape[-1], 1
    while n < H:
        pairs = x.reshape(*shape[:-1], H // (2 * n), 2, n)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x, n = jnp.stack([a + b, a - b], axis=-2).reshape(shape), 2 * n
    return x * H**-0.5


def _encode_int8(x: jax.Array) -> jax.Array:
    scale = _or_nan(x, jnp.abs(x).max(-1, keepdims=True) * (1 / 127))
    q = jnp.clip(jnp.round(_ratio(x, scale)), -127, 127).astype(BYTES)
    return jnp.concatenate([q, _bytes(scale)], axis=-1)


def _encode_int4(x: jax.Array) -> jax.Array:
    low = x.min(-1, keepdims=True).astype(jnp.bfloat16)
    over = x - low.astype(jnp.float32)
    scale = _or_nan(x, over.max(-1, keepdims=True) * (1 / 15)).astype(jnp.bfloat16)
    q = jnp.clip(jnp.round(_ratio(over, scale.astype(jnp.float32))), 0, 15).astype(jnp.uint8)
    half = x.shape[-1] // 2
    pairs = lax.bitcast_convert_type(q[..., :half] | (q[..., half:] << 4), BYTES)
    return jnp.concatenate([pairs, _bytes(low), _bytes(scale)], axis=-1)


def _decode_int4(x: jax.Array, H: int) -> jax.Array:
    pairs = lax.bitcast_convert_type(x[..., : H // 2], jnp.uint8)
    q = jnp.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(jnp.float32)
    low, scale = (
        _numbers_of(x[..., at : at + 2], jnp.bfloat16).astype(jnp.float32)
        for at in (H // 2, H // 2 + 2)
    )
    return low + scale * q


def _or_nan(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``scale`` where all of ``x`` is finite. XLA:CPU's maximum passes over NaN."""
    return jnp.where(jnp.isfinite(x).all(-1, keepdims=True), scale, jnp.nan)


def _ratio(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / scale``, 0 where there is no scale."""
    usable = scale > 0
    return jnp.where(usable, x / jnp.where(usable, scale, 1.0), 0.0)


def _bytes(x: jax.Array) -> jax.Array:
    """int8[..., n * itemsize] of [..., n]."""
    return lax.bitcast_convert_type(x, BYTES).reshape(*x.shape[:-1], -1)


def _numbers_of(x: jax.Array, dtype: Any) -> jax.Array:
    """``_bytes`` undone."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, size), dtype)
