"""Pages of int8 KV: a kv head's share of a page is all its numbers, then a float32 scale for each of its tokens.

It owns that order of bytes. In a pool [P, K, Z, H + 4] each (page, kv head) holds::

    | q[0] q[1] ...  q[Z-1] | s[0] s[1] ...  s[Z-1] |      q[z] is H bytes, s[z] four: the vector is s[z] * q[z]

so that the numbers of a page lie as those of any other pool do, for bulk copies and the matrix unit, and its scales are
one run. Both views of the pool below are the same bytes; XLA makes no copy of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.spec import Pages

BEHIND = 4
"""Bytes of a scale."""
LEAST_PAGE = 32
"""Tokens of the smallest page: a copy begins at a multiple of 128 bytes of shared memory, and a page is whole rows of
H bytes for heads of up to 128."""


def n_rows(Z: int, H: int) -> int:
    """Rows of H bytes that a page of a kv head has, those of its scales included."""
    return Z * (H + BEHIND) // H


def as_rows(pool_PKZW: jax.Array, H: int) -> jax.Array:
    """int8[P, K, Y, H]: the first Z of a page's Y rows are its numbers, the rest its scales."""
    P, K, Z, _ = pool_PKZW.shape
    return pool_PKZW.reshape(P, K, n_rows(Z, H), H)


def as_floats(pool_PKZW: jax.Array) -> jax.Array:
    """float32[P, K, X]: from ``Z * H / 4`` on a page's scales, before that what its numbers happen to be."""
    P, K, Z, W = pool_PKZW.shape
    return lax.bitcast_convert_type(pool_PKZW.reshape(P, K, Z * W // BEHIND, BEHIND), jnp.float32)


def pools_of(pages: Pages, H: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """((keys, values) as a kernel copies their numbers, the same as floats); without scales the pool and None."""
    pools = pages[:2]
    if pools[0].dtype != jnp.int8:
        return pools, (None, None)
    return (as_rows(pools[0], H), as_rows(pools[1], H)), (as_floats(pools[0]), as_floats(pools[1]))


def decoded(pages_XKZW: jax.Array) -> jax.Array:
    """float32[X, K, Z, H]: what so many pages stand for, in plain jnp."""
    X, K, Z, W = pages_XKZW.shape
    H = W - BEHIND
    flat = pages_XKZW.reshape(X, K, Z * W)
    q = flat[..., : Z * H].reshape(X, K, Z, H).astype(jnp.float32)
    s = lax.bitcast_convert_type(flat[..., Z * H :].reshape(X, K, Z, BEHIND), jnp.float32)
    return q * s[..., None]
