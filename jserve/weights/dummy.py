"""Dummy weights: random values close to normal, drawn on the device, equal on every mesh.

Owns the generator. An element is a function of (seed, checkpoint tensor name, flat index in that
tensor), so tensor parallelism, kv-head repeat and fused layouts do not change a value. Must not
know files.

    h = hash32(index, key(seed, name))    multiply-xorshift rounds on uint32: exact everywhere
    x = (sum of h's 4 bytes - 510) / sigma    Irwin-Hall of 4: up to 3.4 sigma, kurtosis 2.7

Threefry would give better normals at a tenth of the speed on a CPU; nothing here needs them: dummy
weights exist to have the right shape, scale and lack of structure. A tensor of over 2**32 elements
repeats after 2**32.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jserve.model.shard import ParamSpec
from jserve.weights.layout import Index, Piece, pieces, shard_shape

_SIGMA = math.sqrt(4 * (256**2 - 1) / 12)


def draw_shard(spec: ParamSpec, index: Index, dtype: Any, seed: int, device: Any) -> jax.Array:
    """One shard of a parameter on ``device``: mean ``init_mean``, deviation ``init``."""
    shape = shard_shape(spec, index)
    with jax.default_device(device):
        if spec.init == 0:
            return jax.device_put(jnp.full(shape, spec.init_mean, dtype), device)
        todo = list(pieces(spec, index))
        if len(todo) == 1:
            return _draw(*_args(todo[0], spec, seed), **_static(todo[0], dtype))
        out = jnp.zeros(shape, dtype)
        for piece in todo:
            at = np.array([s.start for s in piece.out], np.int32)
            out = _fill(out, at, *_args(piece, spec, seed), **_static(piece, dtype))
        return jax.device_put(out, device)


def _args(piece: Piece, spec: ParamSpec, seed: int) -> tuple[Any, ...]:
    digest = hashlib.blake2b(f"{seed}/{piece.part.name}".encode(), digest_size=8).digest()
    start = np.array([s.start for s in piece.rows], np.uint32)
    scale = np.array([spec.init / _SIGMA, spec.init_mean], np.float32)
    return np.frombuffer(digest, np.uint32), start, scale


def _static(piece: Piece, dtype: Any) -> dict[str, Any]:
    part = piece.part
    return {
        "shape": piece.shape,
        "view": part.view,
        "repeat": part.repeat,
        "dtype": np.dtype(dtype),
    }


@functools.partial(jax.jit, static_argnames=("shape", "view", "repeat", "dtype"))
def _draw(
    key: Any, start: Any, scale: Any, *, shape: Any, view: Any, repeat: int, dtype: Any
) -> jax.Array:
    bits = _hash(_flat_index(shape, start, view, repeat), key)
    return (_normal(bits) * scale[0] + scale[1]).astype(dtype)


@functools.partial(jax.jit, static_argnames=("shape", "view", "repeat", "dtype"), donate_argnums=0)
def _fill(out: jax.Array, at: Any, *args: Any, **static: Any) -> jax.Array:
    """``out`` with one piece drawn in place, so that a fused parameter is never held twice."""
    return lax.dynamic_update_slice(out, _draw(*args, **static), at)


def _flat_index(
    shape: tuple[int, ...], start: Any, view: tuple[int, ...], repeat: int
) -> jax.Array:
    """uint32[shape]: the row-major index in the tensor of each element of the region."""
    flat, stride = jnp.zeros((), jnp.uint32), 1
    for d in reversed(range(len(shape))):
        i = lax.broadcasted_iota(jnp.uint32, shape, d) + start[d]
        i = i // jnp.uint32(repeat) if d == 0 and repeat > 1 else i
        flat = flat + i * jnp.uint32(stride % 2**32)
        stride *= view[d]
    return flat


def _hash(x: jax.Array, key: Any) -> jax.Array:
    """A bijection of uint32 chosen by ``key`` (uint32[2]); neighbours in, unrelated bits out."""
    x = (x + key[0]) * jnp.uint32(0x9E3779B1)
    x ^= x >> 16
    x = (x ^ key[1]) * jnp.uint32(0x85EBCA6B)
    x ^= x >> 13
    x *= jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _normal(bits: jax.Array) -> jax.Array:
    """Sum of the four bytes, centred: float32 whole numbers in [-510, 510], hence exact."""
    pairs = (bits & jnp.uint32(0xFF00FF)) + ((bits >> 8) & jnp.uint32(0xFF00FF))
    total = (pairs & jnp.uint32(0xFFFF)) + (pairs >> 16)
    return (total.astype(jnp.int32) - 510).astype(jnp.float32)
