"""The page tables of groups of layers in the packed buffer of a step, and what a group's layers read of them.

The tables of one reach are one field int32[N, R, W]; the page of position p is in column ``p // Z % W``. So of groups
with a window W is as many pages as a sequence holds at once, and on the device the columns repeat up to M::

    held      pages 5 6 7 8        W = 4       [ 8 ][ 5 ][ 6 ][ 7 ]
    as read   M = 10               [ 8 ][ 5 ][ 6 ][ 7 ][ 8 ][ 5 ][ 6 ][ 7 ][ 8 ][ 5 ]
                                                         '------- seen -------'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jserve.kv_layout import KVGroups


class GroupPages(NamedTuple):
    """The pages of a step in one group of layers, as ``StepView`` has them of all."""

    table_RM: jax.Array
    write_T: jax.Array


def field_of(reach: int) -> str:
    """The field with the tables of the groups of a reach, by its number."""
    return f"page_table{reach}_NRW"


def shapes(groups: KVGroups, columns: tuple[int, ...], R: int) -> dict[str, tuple[int, ...]]:
    """The fields of all reaches."""
    return {
        field_of(i): (reach.n_groups, R, width)
        for i, (reach, width) in enumerate(zip(groups.reaches, columns, strict=True))
    }


def unpacked(
    raw: Mapping[str, jax.Array],
    columns: tuple[int, ...],
    M: int,
    row_T: jax.Array,
    number_T: jax.Array,
    real_T: jax.Array,
) -> tuple[GroupPages, ...]:
    """The pages of each group.

    Args:
        columns: of the tables of each reach; M of the first.
        number_T: int32, number of the page in its row that a token is written to.
        real_T: False for padding, which is written to page 0.
    """
    groups = []
    for i, width in enumerate(columns):
        for table_RW in raw[field_of(i)]:
            write_T = jnp.where(real_T, table_RW[row_T, number_T % width], 0)
            table_RM = jnp.tile(table_RW, (1, -(-M // width)))[:, :M]
            groups.append(GroupPages(table_RM, write_T))
    return tuple(groups)
