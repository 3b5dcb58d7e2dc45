"""All collectives of a step, each over the mesh axis of one logical dimension.

An axis of None means that the dimension is whole on every device, and then no collective is in the
program. ``Axes`` (``jserve.model.shard``) says which axis that is for each logical dimension::

    heads   sum of the output projection's partial sums, and of squares for a norm over all heads
    ffn     sum of the down projection's partial sums
    routed  sum over the experts that devices have, and of their down projections' partial sums
    vocab   sum of embedding rows (other shards give zero), gather of logits or what sampling needs of them

With ``Axes.sums`` partial sums travel in that type and are added in float32: an exchange of parts, each added by one
device, and a gather of the results, which together move half the bytes that a sum of float32 moves where the type has
16 bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.shard import MeshAxis


def reduce(y: jax.Array, axis: MeshAxis) -> jax.Array:
    """Sum of the shards' partial results."""
    return y if axis is None else lax.psum(y, axis)


def reduce_partial(y_TD: jax.Array, axis: MeshAxis, dtype: str) -> jax.Array:
    """float32[T, D]: sum of the shards' partial products, which travel in ``dtype``; empty: as float32."""
    if axis is None or dtype in ("", "float32"):
        return reduce(y_TD, axis)
    (T, D), n = y_TD.shape, n_shards(axis)
    y_TD = jnp.pad(y_TD.astype(dtype), ((0, 0), (0, -D % n)))
    part_nTX = y_TD.reshape(T, n, -1).swapaxes(0, 1)
    part_nTX = lax.all_to_all(part_nTX, axis, split_axis=0, concat_axis=0)
    sum_TX = part_nTX.astype(jnp.float32).sum(0).astype(dtype)
    return gather(sum_TX, axis, 1)[:, :D].astype(jnp.float32)


def maximum(y: jax.Array, axis: MeshAxis) -> jax.Array:
    """The largest of the shards' values."""
    return y if axis is None else lax.pmax(y, axis)


def minimum(y: jax.Array, axis: MeshAxis) -> jax.Array:
    """The smallest of the shards' values."""
    return y if axis is None else lax.pmin(y, axis)


def gather(y: jax.Array, axis: MeshAxis, dimension: int) -> jax.Array:
    """The shards' parts one after another along ``dimension``."""
    return y if axis is None else lax.all_gather(y, axis, axis=dimension, tiled=True)


def shard_index(axis: str | tuple[str, ...]) -> jax.Array:
    """int32: which part of a dimension split over ``axis`` this shard holds."""
    return lax.axis_index(axis)


def n_shards(axis: MeshAxis) -> int:
    """Parts of a dimension split over ``axis``."""
    return 1 if axis is None else lax.axis_size(axis)
