"""The second kernel of paged attention: add up the partial sums of each row's splits.

It owns the reading of slots. A row that lies in splits a..b has
its sums in slots row+a .. row+b. A block of the grid takes 64 partial rows (kv heads and query rows alike) of one
row of the batch and a chunk of columns, straight from device memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import flash
from pallas_kernels.flash import MASKED, ROWS, WGMMA, M, Sums, along_rows
from pallas_kernels.paged_attention.hopper import Tile, Work

plgpu: Any = mosaic_gpu  # its names differ between releases of jax


def combine(
    o: jax.Array,
    top: jax.Array,
    total: jax.Array,
    sink_Y: jax.Array,
    work: Work,
    tile: Tile,
    interpret: Any = None,
) -> jax.Array:
    """float32[D, partial_rows, H] of the partial sums; zero for rows without any. ``sink_Y`` is the
    logit in units of log2 that each row's softmax also counts (MASKED: none)."""
    rows = work.first_D.shape[0]
    out = jax.ShapeDtypeStruct((rows, tile.partial_rows, tile.H), jnp.float32)
    return plgpu.kernel(
        functools.partial(_combine, tile=tile),
        out_type=out,
        grid=(rows, tile.partial_rows // M, tile.H // tile.chunk),
        grid_names=("r", "y", "c"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(o, top, total, sink_Y, work.cum_E, work.per_1)


def _combine(o, tops, totals, sink, cum, per, out, *, tile: Tile):
    row = lax.axis_index("r")
    here = pl.ds(lax.axis_index("y") * M, M)
    columns = pl.ds(lax.axis_index("c") * tile.chunk, tile.chunk)
    begin, end = cum[row], cum[row + 1]
    s0 = lax.div(begin, per[0])
    s1 = jnp.where(end > begin, lax.div(end - 1, per[0]) + 1, s0)

    def vector(ref):
        return plgpu.load(ref, layout=ROWS, optimized=False)

    def add(slot, sums: Sums) -> Sums:
        mine = vector(tops.at[slot, here])
        top = jnp.maximum(sums.top, mine)
        keep, count = jnp.exp2(sums.top - top), jnp.exp2(mine - top)
        part = plgpu.load(o.at[slot, here, columns], layout=WGMMA, optimized=False)
        new = sums.o * along_rows(keep, part) + part * along_rows(count, part)
        return Sums(new, top, sums.total * keep + vector(totals.at[slot, here]) * count)

    sums = lax.fori_loop(row + s0, row + s1, add, flash.no_sums(tile.chunk))
    # A sink only adds to the total; where nothing was seen the total stays above zero with it.
    sunk = vector(sink.at[here])
    top = jnp.maximum(sums.top, sunk)
    keep = jnp.exp2(sums.top - top)
    total = sums.total * keep + jnp.where(sunk > MASKED, jnp.exp2(sunk - top), 0.0)
    weight = jnp.where(total > 0, keep / total, 0.0)
    out.at[row, here, columns][...] = sums.o * along_rows(weight, sums.o)
