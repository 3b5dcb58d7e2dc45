"""Writes and moves the latents of multi-head latent attention, which lie alike for all backends: [P, Z, C].

A page of a layer is one contiguous run, the same on every device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jserve.model.kv_quant import stored
from jserve.model.view import StepView

Places = tuple[jax.Array, jax.Array]
"""(pages, offsets) of entries, int32[A] each."""


def write(pool_PZC: jax.Array, x_TC: jax.Array, view: StepView) -> jax.Array:
    """Scatter each token's latent to its page and offset; padding writes nothing. No two tokens share a place, and XLA
    is told so (``kv_pool.write_kv``)."""
    page_T = jnp.where(view.pos_T >= 0, view.write_page_T, pool_PZC.shape[0])
    return _put(pool_PZC, (page_T, view.write_off_T), stored(x_TC, pool_PZC.dtype))


def move(pool_PZC: jax.Array, old: Places, new: Places) -> jax.Array:
    """Copy entries to other places; those of page 0 belong to no token, and stay."""
    to_A = jnp.where(new[0] > 0, new[0], pool_PZC.shape[0])
    return _put(pool_PZC, (to_A, new[1]), pool_PZC[old])


def _put(pool_PZC: jax.Array, places: Places, x_AC: jax.Array) -> jax.Array:
    """``pool_PZC`` with entries; those of a page beyond its end are dropped."""
    P, Z, C = pool_PZC.shape
    row_A = jnp.where(places[0] < P, places[0] * Z + places[1], P * Z)
    rows = pool_PZC.reshape(P * Z, C).at[row_A]
    return rows.set(x_AC, mode="drop", unique_indices=True).reshape(P, Z, C)
