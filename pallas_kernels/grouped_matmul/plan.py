"""Where each (token, expert) pair lies while the experts work: the list of tiles, made on the device.

Pairs of an expert are neighbours from a multiple of the tile's columns on, so that a tile never holds two experts and
the kernels need no masks; what is left of an expert's last tile holds some pair again, and nobody reads it::

    pairs       t0:e2 t0:e0 t1:e2 t1:- t2:e2 ...        X a token, "-" goes nowhere
    rows Y      |e0 . . .|e2 e2 e2 .|                   columns = 4
    tiles I      0        1          (2, 3: of nobody)

No host value, no sort, and the order of an expert's pairs is that of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
BLOCK = 1024
"""Pairs that are ranked by comparing each with each; more of them are ranked block by block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything static about the rows: T tokens choose X of E experts; a tile has ``columns`` rows."""

    T: int
    X: int
    E: int
    columns: int

    @property
    def pairs(self) -> int:
        return self.T * self.X

    @property
    def tiles(self) -> int:
        """The most that the pairs can fill: every expert but its last row leaves a tile begun."""
        begun = min(self.pairs, self.E)
        return (self.pairs + begun * (self.columns - 1)) // self.columns

    @property
    def rows(self) -> int:
        return self.tiles * self.columns


class Work(NamedTuple):
    """int32."""

    expert_I: Array
    """The expert of each tile; of those from ``n_1`` on any."""
    n_1: Array
    """Tiles that hold pairs."""
    pair_Y: Array
    """The number of the pair in each row; some pair where a row is of none."""
    row_TX: Array
    """The row of each pair; negative for those that go nowhere."""


def plan(expert_TX: Array, order: Order) -> Work:
    """The rows and tiles of what the router chose."""
    E, e_A = order.E, expert_TX.reshape(-1)
    chosen_A = (e_A >= 0) & (e_A < E)
    e_A = jnp.where(chosen_A, e_A, E)
    rank_A, count_E = _ranks(e_A, E)
    tiles_E = -(-count_E // order.columns)
    end_E = _sums(tiles_E)
    i_I = jnp.arange(order.tiles, dtype=jnp.int32)
    expert_I = jnp.minimum((end_E[None] <= i_I[:, None]).sum(1, dtype=jnp.int32), E - 1)
    first_E = (end_E - tiles_E) * order.columns
    row_A = first_E[jnp.minimum(e_A, E - 1)] + rank_A
    a_A = jnp.arange(order.pairs, dtype=jnp.int32)
    # Pairs that go nowhere have places of their own beyond the rows, so that no two are the same.
    to_A = jnp.where(chosen_A, row_A, order.rows + a_A)
    pair_Y = jnp.zeros(order.rows, jnp.int32)
    pair_Y = pair_Y.at[to_A].set(a_A, mode="drop", unique_indices=True)
    row_TX = jnp.where(chosen_A, row_A, -1).reshape(expert_TX.shape)
    return Work(expert_I, end_E[-1:], pair_Y, row_TX)


def _ranks(e_A: Array, E: int) -> tuple[Array, Array]:
    """(how many pairs before each one have its expert, pairs of each expert); E is no expert."""
    A = e_A.shape[0]
    block = min(BLOCK, A)
    e_BI = jnp.pad(e_A, (0, -A % block), constant_values=E).reshape(-1, block)
    i_I = jnp.arange(block, dtype=jnp.int32)
    before_II = i_I[None] < i_I[:, None]
    same_BII = (e_BI[:, :, None] == e_BI[:, None, :]) & before_II
    rank_BI = same_BII.sum(2, dtype=jnp.int32)
    count_BE = (e_BI[:, :, None] == jnp.arange(E)).sum(1, dtype=jnp.int32)
    if e_BI.shape[0] > 1:
        earlier_BE = _sums(count_BE) - count_BE
        rank_BI += jnp.take_along_axis(earlier_BE, jnp.minimum(e_BI, E - 1), axis=1)
    return rank_BI.reshape(-1)[:A], count_BE.sum(0)


def _sums(x: Array) -> Array:
    """Running sums along the first dimension, in one pass: XLA makes several kernels of ``cumsum``."""
    i = jnp.arange(x.shape[0], dtype=jnp.int32)
    reached = (i[None] <= i[:, None]).reshape(*(x.shape[0],) * 2, *(1,) * (x.ndim - 1))
    return jnp.where(reached, x[None], 0).sum(1, dtype=x.dtype)
