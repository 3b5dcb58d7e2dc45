"""Latent attention for Hopper in Mosaic GPU: what the kernels over decode rows and over chunks share.

It owns one block of the grid: 64 rows of queries, (token, head) pairs of one row of the batch, over a run of blocks of
64 latents. All heads meet the same latents, so a tile is full of heads and a latent is read once, key and value::

    q    [64, C]   --TMA--.                        warpgroup 0                warpgroup 1           2 loads
    page [64, C]   --TMA--+--> S[64, 64] = q page^T, in both
                               p = 2^(S - top)
                               O[64, :A/2] += p page[:, :A/2]   O[64, A/2:] += p page[:, A/2:A]

Sums of 64 rows and 512 columns in float32 are 256 registers a thread, more than one may have, so two warpgroups hold
half of the columns each. Both score all latents: queries and two blocks fill the shared memory (216 of 227 KiB with
C = 576), which leaves no room for weights to change hands, and neither ever waits for the other: one's softmax runs
beside the other's products. More than 64 rows, as of 128 heads, are several blocks of the grid, which read the same
latents at about the same time, from device memory once and then from the L2.

Results leave through the shared memory of the queries, once both warpgroups are through with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import flash
from pallas_kernels.flash import M, Sums, along_rows, swizzled
from pallas_kernels.registers import set_compute, set_load

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

TEAM = 2
"""Warpgroups that compute."""
EARLY_COPIES = 4
"""Up to so many page ids a block are read one block ahead; more would need registers."""
ROW_GROUP = 8
"""Rows that a bulk copy from swizzled memory moves at least."""
SMEM = 232448
"""Bytes of shared memory that a block of the grid may have on sm_90."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static that both kernels share."""

    N: int
    """Heads: tokens' queries lie N rows apart."""
    A: int
    C: int
    Z: int
    block: int
    stages: int
    scale: float
    register_p: bool = True
    """As of ``paged_attention``: the interpreter needs weights in shared memory."""

    @property
    def columns(self) -> int:
        """Of the values, that each warpgroup sums."""
        return self.A // TEAM

    @property
    def copies(self) -> int:
        """Of a block: one a page, or one in all."""
        return self.block // flash.page_rows(self.Z, self.block)

    @property
    def load_budget(self) -> int:
        """Registers per thread of the warpgroup that loads: it holds the page ids of a block, and of the next."""
        return 24 if self.copies <= 2 else 40

    def out_columns(self, dtype: Any) -> int:
        """Columns that pass through shared memory at once: all, or as many as divide them."""
        most = 512 // jnp.dtype(dtype).itemsize
        return self.columns if self.columns <= most else math.gcd(self.columns, most)

    def smem_bytes(self, dtype: Any, out_dtype: Any) -> int:
        """Of a block of the grid, barriers and alignment included."""
        size, out_size = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype).itemsize
        queries = M * self.C * size
        results = TEAM * M * self.out_columns(out_dtype) * out_size
        weights = 0 if self.register_p else TEAM * M * self.block * size
        ring = self.stages * self.block * self.C * size
        barriers = 8 * (3 + 2 * self.stages)
        # Each part begins at a multiple of 1024, the logarithms and the barriers too.
        return max(queries, results) + ring + weights + barriers + 3 * 1024


def scratch(tile: Tile, dtype: Any, out_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers. ``through``: queries, and in their place results on their way out."""
    results = swizzled(TEAM, M, tile.out_columns(out_dtype), dtype=out_dtype)
    found = {
        "through": plgpu.RefUnion(swizzled(1, M, tile.C, dtype=dtype), results),
        "ring": swizzled(tile.stages, tile.block, tile.C, dtype=dtype),
        "log_out": plgpu.SMEM((M,), jnp.float32),
        "q_here": plgpu.Barrier(),
        "q_free": plgpu.Barrier(num_arrivals=TEAM),
        "q_read": plgpu.Barrier(num_arrivals=TEAM),
        "here": plgpu.Barrier(num_arrivals=tile.copies, num_barriers=tile.stages),
        "free": plgpu.Barrier(num_arrivals=TEAM, num_barriers=tile.stages),
    }
    if not tile.register_p:
        found["p"] = swizzled(TEAM, M, tile.block, dtype=dtype)
    return found


class Unit(NamedTuple):
    """A tile of queries of one row of the batch, and the run of its blocks that a block of the grid takes."""

    row: Any
    skip: Any
    """Place of the tile's first query among the row's (token, head) pairs."""
    start: Any
    """Position of the row's first token."""
    length: Any
    begin: Any
    """First block, counted along all that the block of the grid reads; ``end`` likewise."""
    end: Any
    base: Any
    """Turns such a number into one of the row's own blocks."""
    low: Any
    """The number of the first block that the block of the grid reads."""


class Shared(NamedTuple):
    """The shared memory of a block of the grid, for the parts of a kernel."""

    tile: Tile
    sm: dict[str, Any]

    def queries(self, zero: Any = 0) -> Any:
        """[64, C]. ``zero``: a number of which the compiler does not know that it is none. Where they are is then
        worked out for each block of a loop, and not kept for all of it in a register for each of 36 products."""
        return self.sm["through"][0].at[zero]

    @property
    def results(self) -> Any:
        return self.sm["through"][1]

    def slot(self, i: Any, low: Any) -> Any:
        return lax.rem(i - low, jnp.int32(self.tile.stages))


def set_registers(tile: Tile, *, compute: bool) -> None:
    """Move registers from the warpgroup that loads to those that compute."""
    if compute:
        set_compute(TEAM, 1, tile.load_budget)
    else:
        set_load(tile.load_budget)


def load(shared: Shared, unit: Unit, n: Any, q: Any, pool: Any, table: Any) -> None:
    """Copy the blocks of the ``n``-th unit, ``stages`` ahead of the computation, and its queries ``q`` [rows, C]: after
    as many blocks as there is room for while those of the unit before are still in use."""
    tile, sm = shared.tile, shared.sm
    last = lax.div(unit.length - 1, jnp.int32(tile.Z))
    early = tile.copies <= EARLY_COPIES
    q_after = jnp.minimum(unit.begin + (tile.stages - 1), unit.end - 1)

    def pages(i: Any) -> tuple:
        return flash.page_ids(table, unit.row, i + unit.base, last, tile.Z, tile.block)

    def block(i: Any, ids: tuple) -> tuple:
        slot = shared.slot(i, unit.low)
        following = pages(jnp.minimum(i + 1, unit.end - 1)) if early else ()
        ids = ids or pages(i)

        @pl.when(i - unit.low >= tile.stages)
        def _() -> None:
            plgpu.barrier_wait(sm["free"].at[slot])

        to, here = sm["ring"].at[slot], sm["here"].at[slot]
        flash.copy_block(ids, pool, 0, i + unit.base, to, here, tile.Z, tile.block)
        pl.when(i == q_after)(partial(_load_q, shared, n, q))
        return following

    lax.fori_loop(unit.begin, unit.end, block, pages(unit.begin) if early else ())


def _load_q(shared: Shared, n: Any, q: Any) -> None:
    @pl.when(n > 0)
    def _() -> None:
        plgpu.barrier_wait(shared.sm["q_free"])

    to = shared.queries().at[pl.ds(0, q.shape[0])]
    plgpu.copy_gmem_to_smem(q, to, shared.sm["q_here"])


def drain(shared: Shared, n_units: Any, n_blocks: Any) -> None:
    """Wait for the last uses of what was loaded, so that every phase is observed."""

    @pl.when(n_units > 0)
    def _() -> None:
        plgpu.barrier_wait(shared.sm["q_free"])

    @pl.loop(jnp.maximum(n_blocks - shared.tile.stages, 0), n_blocks)
    def _(i: Any) -> None:
        plgpu.barrier_wait(shared.sm["free"].at[shared.slot(i, 0)])


def compute(shared: Shared, unit: Unit, part: Any) -> Sums:
    """The unit's softmax sums over the columns of warpgroup ``part``. Afterwards nobody reads the queries."""
    tile, sm = shared.tile, shared.sm
    step = partial(_block, shared, unit, part)
    first = unit.start + lax.div(unit.skip, jnp.int32(tile.N))
    seen_by_all = jnp.minimum(first + 1, unit.length)
    plain_end = lax.div(seen_by_all, jnp.int32(tile.block)) - unit.base
    plain_end = jnp.clip(plain_end, unit.begin, unit.end)
    plgpu.barrier_wait(sm["q_here"])
    sums = flash.no_sums(tile.columns)
    sums = lax.fori_loop(unit.begin, plain_end, partial(step, masked=False), sums)
    sums = lax.fori_loop(plain_end, unit.end, partial(step, masked=True), sums)
    plgpu.barrier_arrive(sm["q_read"])
    plgpu.barrier_wait(sm["q_read"])
    return sums


def _block(shared: Shared, unit: Unit, part: Any, i: Any, sums: Sums, *, masked: bool) -> Sums:
    """Add block ``i``. What no token of the row may see is zeroed among the values of the own columns; they are the
    other warpgroup's keys too, whose scores it masks."""
    tile, sm, slot = shared.tile, shared.sm, shared.slot(i, unit.low)
    at = (i + unit.base) * tile.block
    plgpu.barrier_wait(sm["here"].at[slot])
    kept = sm["ring"].at[slot]
    values = kept.at[:, pl.ds(part * tile.columns, tile.columns)]
    if masked:
        # First, while no scores take registers.
        for c in range(0, tile.columns, M):
            flash.blank(values.at[:, pl.ds(c, M)], at, 0, unit.length)
    q = shared.queries(jnp.minimum(i - unit.low, 0))
    x = flash.scores(q, kept, tile.scale, 0.0, None)
    if masked:

        def position(row: Any) -> Any:
            return lax.div(row + unit.skip, jnp.int32(tile.N)) + unit.start

        x = flash.mask(x, at, position, unit.length, None, None)
    p, keep, top, total = flash.weights(x, sums)
    room = None if tile.register_p else sm["p"].at[part]
    o = flash.weigh(p, sums.o, keep, values, room)
    plgpu.barrier_arrive(sm["free"].at[slot])
    return Sums(o, top, total)


def write(shared: Shared, sums: Sums, part: Any, copy: Callable[[Any, Any], None]) -> None:
    """Hand the mean of the values to ``copy(room [64, n], columns)``, so many columns at a time, and then the room to
    the next queries."""
    tile, room = shared.tile, shared.results.at[part]
    mean = sums.o * along_rows(1 / sums.total, sums.o)
    n = room.shape[1]
    for c in range(0, tile.columns, n):
        room[...] = mean[:, c : c + n].astype(room.dtype)
        plgpu.commit_smem()
        copy(room, pl.ds(part * tile.columns + c, n))
        plgpu.wait_smem_to_gmem(0)
