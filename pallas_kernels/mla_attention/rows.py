"""The kernel over decode and verification rows: each row's latents are shared out to the device, then added up.

It owns the kernel; the line of blocks, its splits and their addition are those of ``paged_attention`` with one kv head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash import M, Sums
from pallas_kernels.mla_attention import hopper
from pallas_kernels.mla_attention.hopper import TEAM, Shared, Tile, Unit, plgpu
from pallas_kernels.paged_attention.hopper import Tile as Line, Work
from pallas_kernels.spec import Rows


def attend(
    q_DQC: jax.Array,
    pool_PZC: jax.Array,
    table_DM: jax.Array,
    rows: Rows,
    work: Work,
    tile: Tile,
    line: Line,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Partial sums of every slot, as of ``paged_attention.hopper.attend``: float32[D + S, Q, A] and [D + S, Q]."""
    slots = rows.len_D.shape[0] + line.splits
    sums = jax.ShapeDtypeStruct((slots, line.partial_rows, tile.A), jnp.float32)
    log = jax.ShapeDtypeStruct((slots, line.partial_rows), jnp.float32)
    return plgpu.kernel(
        partial(_attend, tile=tile, line=line),
        out_type=(sums, log),
        grid=(line.splits, line.tiles),
        grid_names=("s", "t"),
        num_threads=TEAM + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=hopper.scratch(tile, q_DQC.dtype, jnp.float32),
    )(q_DQC, pool_PZC[:, None], table_DM, *rows, work.cum_E, work.row0_S, work.row1_S, work.per_1)


def _attend(
    q,
    pool,
    table,
    start,
    length,
    cum,
    row0,
    row1,
    per,
    o,
    log_total,
    *,
    tile: Tile,
    line: Line,
    **sm,
):
    """The kernel: one split of the line, one tile of each row's queries."""
    wg, split, m_tile = (lax.axis_index(name) for name in ("wg", "s", "t"))
    shared, low = Shared(tile, sm), split * per[0]
    here = pl.ds(m_tile * M, line.tile_rows)

    def units(use):
        """``use(unit, n)`` each row of the split that has blocks in it, the ``n``-th; the number of them."""

        def row(r, n):
            begin = jnp.maximum(cum[r], low)
            end = jnp.minimum(cum[r + 1], low + per[0])

            @pl.when(end > begin)
            def _():
                use(Unit(r, m_tile * M, start[r], length[r], begin, end, -cum[r], low), n)

            return jnp.where(end > begin, n + 1, n)

        return lax.fori_loop(row0[split], row1[split], row, jnp.int32(0))

    @pl.when(wg < TEAM)
    def _():
        hopper.set_registers(tile, compute=True)

        def compute(unit: Unit, _) -> None:
            sums = hopper.compute(shared, unit, wg)
            _write(shared, line, sums, wg, (o, log_total), unit.row + split, here)
            plgpu.barrier_arrive(sm["q_free"])

        units(compute)

    @pl.when(wg == TEAM)
    def _():
        hopper.set_registers(tile, compute=False)

        def load(unit: Unit, n) -> None:
            hopper.load(shared, unit, n, q.at[unit.row, here], pool, table)

        n = units(load)
        hopper.drain(shared, n, jnp.clip(cum[table.shape[0]] - low, 0, per[0]))


def _write(shared: Shared, line: Line, sums: Sums, part: Any, out: Any, slot: Any, here: Any):
    """The rows of the tile to a slot of partial sums. A unit has blocks, and so each of its rows a total above zero."""
    o, log_total = out
    used = pl.ds(0, line.tile_rows)

    def copy(room: Any, columns: Any) -> None:
        plgpu.copy_smem_to_gmem(room.at[used], o.at[slot, here, columns])

    hopper.write(shared, sums, part, copy)

    @pl.when(part == 0)
    def _():
        log_out = shared.sm["log_out"]
        log_out[...] = sums.top + jnp.log2(sums.total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(log_out.at[used], log_total.at[slot, here])
        plgpu.wait_smem_to_gmem(0)
