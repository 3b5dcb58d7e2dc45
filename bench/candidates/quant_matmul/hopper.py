"""Few rows times 4-bit weights on Hopper in Mosaic GPU: weights are the wide operand of the matrix unit.

It owns the kernel. The matrix unit has 64 rows or nothing, and x has few, so the roles are swapped: y.T = w x.T, 64
weight rows a warpgroup, the rows of x as the narrow side (8 to 64)::

    w [64, block] int4, shared memory -> registers, bfloat16, exact -> A of wgmma
    x [M, block] bfloat16, shared memory, seen transposed           -> B of wgmma
    part[64, M] of one block of weights;  y.T += scale[64] * part     scales act on float32 sums

A block of the grid has ``warpgroups`` that compute, neighbours along N, and one that loads; it takes a
``splits``-th of D. The sums of splits are added by whoever reads them (XLA: in the fusion that follows).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.flash import ROWS, WGMMA, M, along_rows, swizzled

plgpu: Any = mosaic_gpu  # its names differ between releases of jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static about one call. ``block`` weights along D share a scale; ``blocks`` of them
    are read at once, ``stages`` such reads are in flight."""

    M: int
    N: int
    D: int
    block: int
    blocks: int
    warpgroups: int
    stages: int
    splits: int
    register_w: bool
    """Weights go to the matrix unit from registers. The interpreter knows only the other way,
    through shared memory."""

    @property
    def width(self) -> int:
        """Weight rows of a block of the grid."""
        return self.warpgroups * M

    @property
    def depth(self) -> int:
        """Weights along D that are read at once."""
        return self.block * self.blocks

    @property
    def steps(self) -> int:
        return self.D // self.depth

    def run(self, s: Any) -> tuple[Any, Any]:
        """(first step, number of steps) of split ``s``: all have as many but the last, which may have
        fewer. Copies from beyond D would bring zeros, so no value shows a run that is too long."""
        per = -(-self.steps // self.splits)
        return s * per, jnp.minimum(per, self.steps - s * per)

    def split(self, most: int) -> Tile:
        """With as many splits as ``most`` allows and as leave each the same number of steps, or
        the last one fewer, none without any."""
        per = -(-self.steps // min(most, self.steps))
        return dataclasses.replace(self, splits=-(-self.steps // per))


def multiply(
    x_MD: jax.Array, w_ND: jax.Array, scales_BN: jax.Array, tile: Tile, interpret: Any = None
) -> jax.Array:
    """float32[splits, N, M]: the sums of each split."""
    return plgpu.kernel(
        functools.partial(_multiply, tile=tile),
        out_type=jax.ShapeDtypeStruct((tile.splits, tile.N, tile.M), jnp.float32),
        grid=(tile.N // tile.width, tile.splits),
        grid_names=("n", "s"),
        num_threads=tile.warpgroups + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(tile),
    )(x_MD, w_ND, scales_BN)


def _scratch(tile: Tile) -> dict[str, Any]:
    # A tile of the layout is as wide as a block, so that a block can be cut out.
    int4 = (plgpu.TilingTransform((8, tile.block)), plgpu.SwizzleTransform(tile.block // 2))
    shape = (tile.stages, tile.width, tile.depth)
    scratch = {
        "w_room": plgpu.SMEM(shape, jnp.int4, transforms=int4),
        "x_room": swizzled(tile.stages, tile.M, tile.depth, dtype=jnp.bfloat16),
        "scale_room": plgpu.SMEM((tile.stages, tile.blocks, tile.width), jnp.float32),
        "here": plgpu.Barrier(num_arrivals=3, num_barriers=tile.stages),
        "free": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }
    if not tile.register_w:
        scratch["wide"] = swizzled(tile.warpgroups, M, tile.block, dtype=jnp.bfloat16)
    return scratch


def _multiply(x, w, scales, out, *, tile: Tile, **sm):
    wg, n, s = lax.axis_index("wg"), lax.axis_index("n"), lax.axis_index("s")
    begin, count = tile.run(s)
    columns = pl.ds(n * tile.width, tile.width)

    def load(i, _):
        slot = lax.rem(i, jnp.int32(tile.stages))

        @pl.when(i >= tile.stages)
        def _():
            plgpu.barrier_wait(sm["free"].at[slot])

        step = begin + i
        along = pl.ds(step * tile.depth, tile.depth)
        rows = pl.ds(step * tile.blocks, tile.blocks)
        for source, name in (
            (w.at[columns, along], "w_room"),
            (x.at[:, along], "x_room"),
            (scales.at[rows, columns], "scale_room"),
        ):
            plgpu.copy_gmem_to_smem(source, sm[name].at[slot], sm["here"].at[slot])

    def drain(i, _):
        plgpu.barrier_wait(sm["free"].at[lax.rem(i, jnp.int32(tile.stages))])

    @pl.when(wg == tile.warpgroups)
    def _():
        lax.fori_loop(0, count, load, None)
        lax.fori_loop(jnp.maximum(count - tile.stages, 0), count, drain, None)

    @pl.when(wg < tile.warpgroups)
    def _():
        nothing = plgpu.layout_cast(jnp.zeros((M, tile.M), jnp.float32), WGMMA)
        step = functools.partial(_step, tile, sm, wg)
        mine = pl.ds(n * tile.width + wg * M, M)
        out.at[s, mine][...] = lax.fori_loop(0, count, step, nothing)


def _step(tile: Tile, sm, wg, i, y):
    """Add one read's blocks."""
    slot = lax.rem(i, jnp.int32(tile.stages))
    plgpu.barrier_wait(sm["here"].at[slot])
    mine = pl.ds(wg * M, M)
    for b in range(tile.blocks):
        along = pl.ds(b * tile.block, tile.block)
        # Whole registers of eight weights are read and then exchanged between neighbours, as 4 bits.
        weights = plgpu.load(
            sm["w_room"].at[slot, mine, along], layout=plgpu.Layout.WGMMA_UPCAST_4X
        )
        weights = plgpu.layout_cast(weights, WGMMA).astype(jnp.bfloat16)
        if not tile.register_w:
            sm["wide"].at[wg][...] = weights
            plgpu.commit_smem()
            weights = sm["wide"].at[wg]
        part = _product(weights, sm["x_room"].at[slot, :, along], tile)
        scale = plgpu.load(sm["scale_room"].at[slot, b, mine], layout=ROWS)
        y = y + along_rows(scale, part) * part
    plgpu.commit_smem()  # what was read by loads comes before the copy that lands here next
    plgpu.barrier_arrive(sm["free"].at[slot])
    return y


def _product(weights, x, tile: Tile):
    def product(acc):
        plgpu.wgmma(acc, weights, x.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((M, tile.M), jnp.float32))
