"""All collectives of a step, each over the mesh axis of one logical dimension.

An axis of None means that the dimension is whole on every device, and then no collective is in the
program. ``Axes`` (``jserve.model.shard``) says which axis that is for each logical dimension::

    heads   sum of the output projection's partial sums, and of squares for a norm over all heads
    ffn     sum of the down projection's partial sums
    routed  sum over the experts that devices have, and of their down projections' partial sums
    vocab   sum of embedding rows (other shards give zero), gather of logits
"""

from __future__ import annotations

import jax
from jax import lax

from jserve.model.shard import MeshAxis


def reduce(y: jax.Array, axis: MeshAxis) -> jax.Array:
    """Sum of the shards' partial results."""
    return y if axis is None else lax.psum(y, axis)


def gather(y: jax.Array, axis: MeshAxis, dimension: int) -> jax.Array:
    """The shards' parts one after another along ``dimension``."""
    return y if axis is None else lax.all_gather(y, axis, axis=dimension, tiled=True)


def shard_index(axis: str | tuple[str, ...]) -> jax.Array:
    """int32: which part of a dimension split over ``axis`` this shard holds."""
    return lax.axis_index(axis)


def n_shards(axis: MeshAxis) -> int:
    """Parts of a dimension split over ``axis``."""
    return 1 if axis is None else lax.axis_size(axis)
