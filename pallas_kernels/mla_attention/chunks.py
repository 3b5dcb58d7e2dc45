"""The kernel over chunks of prompts: tiles of (token, head) pairs, each over all that its tokens see.

It owns the kernel and its list of tiles. Queries lie as the model makes them, a token's heads as neighbouring rows::

    tokens   |f0 f0 f0 f0 f0|f1 f1|pad|     N rows each
    tiles    |- 64 -|- 64 -|- 6|- 64 |      a tile never crosses a sequence; of the last one fewer rows are written

so nothing is gathered before it or after it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash import M
from pallas_kernels.mla_attention import hopper
from pallas_kernels.mla_attention.hopper import ROW_GROUP, TEAM, Shared, Tile, Unit, plgpu
from pallas_kernels.spec import Chunks


class Work(NamedTuple):
    """The tiles, int32; the places after the ``n_1``-th belong to nobody."""

    row_I: jax.Array
    """Sequence of each tile."""
    skip_I: jax.Array
    """Its first row among those of the sequence."""
    n_1: jax.Array


def most_tiles(P: int, F: int, N: int) -> int:
    """Tiles that P tokens in F sequences can need."""
    return P * N // M + F


def plan(count_F: jax.Array, N: int, most: int) -> Work:
    """The tiles of sequences with ``count_F`` (int32) tokens, one sequence after another."""
    n_F = -(-count_F * N // M)
    end_F = jnp.cumsum(n_F)
    i_I = jnp.arange(most, dtype=jnp.int32)
    row_I = (end_F[None] <= i_I[:, None]).sum(1, dtype=jnp.int32)
    row_I = jnp.minimum(row_I, count_F.shape[0] - 1)
    return Work(row_I, (i_I - (end_F - n_F)[row_I]) * M, end_F[-1:])


def attend(
    q_YC: jax.Array,
    pool_PZC: jax.Array,
    table_FM: jax.Array,
    chunks: Chunks,
    work: Work,
    tile: Tile,
    n_rows: int,
    interpret: Any = None,
) -> jax.Array:
    """[n_rows, A] in the queries' dtype; rows of tokens of no sequence are not written.

    Args:
        q_YC: (token, head) pairs, token-major; 64 rows more than ``n_rows``, of anything.
    """
    return plgpu.kernel(
        partial(_attend, tile=tile),
        out_type=jax.ShapeDtypeStruct((n_rows, tile.A), q_YC.dtype),
        grid=(work.row_I.shape[0],),
        grid_names=("i",),
        num_threads=TEAM + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=hopper.scratch(tile, q_YC.dtype, q_YC.dtype),
    )(q_YC, pool_PZC[:, None], table_FM, *chunks, *work)


def _attend(q, pool, table, first, start, count, row_I, skip_I, n_1, out, *, tile: Tile, **sm):
    """The kernel: one tile."""
    wg, shared = lax.axis_index("wg"), Shared(tile, sm)

    @pl.when(lax.axis_index("i") < n_1[0])
    def _():
        # The last tile of a sequence has the most keys, so the last comes first.
        place = n_1[0] - 1 - lax.axis_index("i")
        row, skip = row_I[place], skip_I[place]
        unit = _unit(tile, row, skip, start[row], count[row])
        y = pl.multiple_of(first[row] * tile.N + skip, ROW_GROUP)

        @pl.when(wg < TEAM)
        def _():
            hopper.set_registers(tile, compute=True)
            sums = hopper.compute(shared, unit, wg)
            copy = partial(_copy, out, y, count[row] * tile.N - skip)
            hopper.write(shared, sums, wg, copy)
            plgpu.barrier_arrive(sm["q_free"])

        @pl.when(wg == TEAM)
        def _():
            hopper.set_registers(tile, compute=False)
            hopper.load(shared, unit, jnp.int32(0), q.at[pl.ds(y, M)], pool, table)
            hopper.drain(shared, jnp.int32(1), unit.end)


def _unit(tile: Tile, row: Any, skip: Any, start: Any, count: Any) -> Unit:
    last = lax.div(skip + (M - 1), jnp.int32(tile.N))
    keys = start + jnp.minimum(count, last + 1)
    end, zero = lax.div(keys + (tile.block - 1), jnp.int32(tile.block)), jnp.int32(0)
    # Zero, too, which the compiler does not see (``Shared.queries``).
    low = jnp.minimum(skip, 0)
    return Unit(row, skip, start, start + count, zero, end, zero, low)


def _copy(out: Any, y: Any, left: Any, room: Any, columns: Any) -> None:
    """Write the rows of the sequence, of which ``left`` begin with the tile: what follows is another sequence's."""

    @pl.when(left >= M)
    def _():
        plgpu.copy_smem_to_gmem(room, out.at[pl.ds(y, M), columns])

    @pl.when(left < M)
    def _():
        for r in range(0, M, ROW_GROUP):

            @pl.when(r < left)
            def _(r=r):
                some = room.at[pl.ds(r, ROW_GROUP)]
                here = pl.ds(pl.multiple_of(y + r, ROW_GROUP), ROW_GROUP)
                plgpu.copy_smem_to_gmem(some, out.at[here, columns])
