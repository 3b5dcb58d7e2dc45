"""All collectives of a step, each over the mesh axis of one logical dimension.

An axis of None means that the dimension is whole on every device, and then no collective is in the
program. ``Axes`` (``jserve.model.shard``) says which axis that is for each logical dimension::

    tokens  parts of the sums over heads, ffn and routed, and a gather of what the next product reads
    embed   sum of the partial sums of every product that reads the residual stream, and of squares for its norms
    heads   sum of the output projection's partial sums, and of squares for a norm over all heads
    ffn     sum of the down projection's partial sums
    routed  sum over the experts that devices have, and of their down projections' partial sums
    vocab   sum of embedding rows (other shards give zero), gather of logits
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model.mesh import MeshAxis


def reduce(y: jax.Array, axis: MeshAxis, exchanged: Any = jnp.float32) -> jax.Array:
    """Sum of the shards' partial results, float32[..., D]. ``exchanged``: the type in which they go from device to
    device; a narrower one takes fewer bytes. They are added in float32 all the same, in the order of the devices."""
    if axis is None:
        return y
    if jnp.dtype(exchanged).itemsize >= y.dtype.itemsize:
        return lax.psum(y, axis)
    n = lax.axis_size(axis)
    if n <= FEW:
        return lax.all_gather(y.astype(exchanged), axis).astype(y.dtype).sum(0)
    return _in_parts(y, axis, n, exchanged)


FEW = 2
"""Devices up to which every one gets all partial sums: as many bytes as in parts, in one collective instead of two."""


def _in_parts(y: jax.Array, axis: MeshAxis, n: int, exchanged: Any) -> jax.Array:
    """Every device adds a part of D, rounds it, and all get all parts."""
    D = y.shape[-1]
    parts = jnp.pad(y.astype(exchanged), [(0, 0)] * (y.ndim - 1) + [(0, -D % n)])
    got = lax.all_to_all(parts.reshape(*y.shape[:-1], n, -1), axis, y.ndim - 1, 0)
    own = got.astype(y.dtype).sum(0).astype(exchanged)
    return lax.all_gather(own, axis, axis=y.ndim - 1, tiled=True)[..., :D].astype(y.dtype)


def reduce_scatter(y_TD: jax.Array, axis: MeshAxis, exchanged: Any = jnp.float32) -> jax.Array:
    """float32[ceil(T / n), D]: the rows of ``reduce`` that are this device's, zeros after the last one. It sends half
    of what ``reduce`` sends."""
    if axis is None:
        return y_TD
    y_TD = _in_equal_parts(y_TD, axis)
    if jnp.dtype(exchanged).itemsize >= y_TD.dtype.itemsize:
        return lax.psum_scatter(y_TD, axis, scatter_dimension=0, tiled=True)
    T, D = y_TD.shape
    n = lax.axis_size(axis)
    got_nTD = lax.all_to_all(y_TD.astype(exchanged).reshape(n, T // n, D), axis, 0, 0)
    return got_nTD.astype(y_TD.dtype).sum(0)


def own_rows(x_TD: jax.Array, axis: MeshAxis) -> jax.Array:
    """[ceil(T / n), D]: this device's rows of what is whole on every device, zeros after the last one."""
    if axis is None:
        return x_TD
    x_TD = _in_equal_parts(x_TD, axis)
    size = x_TD.shape[0] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x_TD, lax.axis_index(axis) * size, size)


def own_columns(x_TD: jax.Array, axis: MeshAxis) -> jax.Array:
    """This device's columns of what is whole on every device: [T, D / n]."""
    if axis is None:
        return x_TD
    size = x_TD.shape[1] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x_TD, lax.axis_index(axis) * size, size, axis=1)


def _in_equal_parts(x_TD: jax.Array, axis: MeshAxis) -> jax.Array:
    """With as many rows of zeros at the end as equal parts need."""
    spare = -x_TD.shape[0] % lax.axis_size(axis)
    return jnp.pad(x_TD, [(0, spare), (0, 0)]) if spare else x_TD


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
