"""KV of 8 bits on its way to the matrix unit of a chunk: copied as it is, made wider by the warpgroup that loads.

It owns the ring of raw blocks: which is copied when, and who waits for it::

    copies    | 0  1  2 |  3  4  5 ...          ``ahead`` blocks before any is needed
    puts                |  0  1  2 ...          raw block -> wide block, announced
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its names differ between releases of jax


class Raw(NamedTuple):
    """Keys or values: where they lie, and their raw blocks [ahead, block, H] in shared memory."""

    name: str
    pool: Any
    ring: Any
    here: Callable[[Any], Any]
    """Slot of the ring -> barrier at which its copies arrive."""
    scales: Any = None
    """The scales of each of them, where they are int8."""
    scale_ring: Any = None
    """Theirs [ahead, block] in shared memory."""


def load_widened(
    raws: Sequence[Raw],
    begin: Any,
    end: Any,
    ahead: int,
    ids: Callable[[Any], tuple],
    early: bool,
    copy: Callable[[Raw, tuple, Any, Any], None],
    put: Callable[[Raw, Any, Any], None],
) -> None:
    """Load blocks ``begin`` .. ``end``.

    Args:
        ids: page ids of a block.
        early: read them one block ahead of their use; few pages a block leave registers for that.
        copy: (raw, ids, block, slot of the ring) begins the copies of a block.
        put: (raw, block, slot of the ring) waits for room, widens and announces.
    """

    def pages(i: Any) -> tuple:
        return ids(jnp.minimum(i, end - 1))

    def start(raw: Raw, i: Any, found: tuple) -> None:
        slot = lax.rem(i - begin, jnp.int32(ahead))
        copy(raw, found or pages(i), i, slot)

    def first(i: Any, _: Any) -> None:
        found = pages(i)
        for raw in raws:
            start(raw, i, found)

    def block(i: Any, found: tuple) -> tuple:
        slot = lax.rem(i - begin, jnp.int32(ahead))
        following = pages(i + ahead + 1) if early else ()
        for raw in raws:
            plgpu.barrier_wait(raw.here(slot))
            put(raw, i, slot)
            pl.when(i + ahead < end)(functools.partial(start, raw, i + ahead, found))
        return following

    lax.fori_loop(begin, jnp.minimum(begin + ahead, end), first, None)
    lax.fori_loop(begin, end, block, pages(begin + ahead) if early else ())
