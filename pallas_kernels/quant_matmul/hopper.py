"""Few rows times weights of 4 or 8 bits on Hopper in Mosaic GPU: weights are the wide operand of the matrix unit.

It owns the kernel. The matrix unit has 64 rows or nothing, and x has few, so the roles are swapped: y.T = w x.T, 64
weight rows a warpgroup, the rows of x as the narrow side (8 to 64)::

    w [64, unit] packed, shared memory -> registers, bfloat16, exact (``bits``) -> A of wgmma
    x [M, run] bfloat16, shared memory, seen transposed                          -> B of wgmma
    part[64, M] of a run of weights;  y.T += scale[64] * part          scales act on float32 sums

A block of the grid has ``warpgroups`` that compute, neighbours along N, and one that loads; it takes a
``splits``-th of D. Scales are read a unit ahead into registers, from device memory: their rows have any length, and
copies to shared memory want multiples of 16 bytes. The sums of splits are added by whoever reads them (XLA: in the
fusion that follows).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.flash import COLUMNS, ROWS, WGMMA, M, along_columns, along_rows
from pallas_kernels.quant_matmul import bits
from pallas_kernels.quant_matmul.values import Weights
from pallas_kernels.registers import set_compute, set_load

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

LOAD_BUDGET = 40
"""Registers per thread of the warpgroup that loads, where several compute."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static about one call. ``group`` inputs share a scale; ``depth`` of them are read at once, ``stages``
    such reads are in flight."""

    kind: str
    M: int
    N: int
    D: int
    group: int
    depth: int
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
    def blocks(self) -> int:
        """Blocks of the grid along N. The last one begins earlier where they do not tile the matrix, and writes some
        sums again."""
        return -(-self.N // self.width)

    @property
    def unit(self) -> int:
        """Inputs that are widened at once; of small groups few, whose scales take registers."""
        return min(self.depth, 128 if self.group >= 32 else 64)

    @property
    def run(self) -> int:
        """Inputs of one product, of one scale."""
        return min(self.unit, self.group)

    @property
    def scales(self) -> int:
        """Groups of a unit."""
        return max(self.unit // self.group, 1)

    @property
    def units(self) -> int:
        """Of a step."""
        return self.depth // self.unit

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one step's weights and x."""
        return self.depth * (self.width // bits.per_byte(self.kind) + 2 * self.M)

    @property
    def steps(self) -> int:
        return self.D // self.depth

    def steps_of(self, s: Any) -> tuple[Any, Any]:
        """(first step, number of steps) of split ``s``: all have as many but the last, which may have
        fewer. Copies from beyond D would bring zeros, so no value shows a run that is too long."""
        per = -(-self.steps // self.splits)
        return s * per, jnp.minimum(per, self.steps - s * per)

    def split(self, most: int) -> Tile:
        """With as many splits as ``most`` allows and as leave each the same number of steps, or
        the last one fewer, none without any."""
        per = -(-self.steps // min(most, self.steps))
        return dataclasses.replace(self, splits=-(-self.steps // per))


class _Factors(NamedTuple):
    """Of each group of a unit."""

    scales: tuple[Any, ...]
    """float32[64], of weight rows."""
    offsets: tuple[Any, ...] | None
    """bfloat16[64], what the widened numbers are more than they are; None: the kind's own."""


def multiply(
    x_MD: jax.Array, w: Weights, x_scale_BM: jax.Array | None, tile: Tile, interpret: Any = None
) -> jax.Array:
    """float32[splits, N, M]: the sums of each split. Inputs of x are ``bits.in_order``."""
    q = w.q if w.q.dtype == jnp.uint8 else lax.bitcast_convert_type(w.q, jnp.uint8)
    return plgpu.kernel(
        functools.partial(_multiply, tile=tile, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((tile.splits, tile.N, tile.M), jnp.float32),
        grid=(tile.blocks, tile.splits),
        grid_names=("n", "s"),
        num_threads=tile.warpgroups + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(tile),
    )(x_MD, w._replace(q=q), x_scale_BM)


def _scratch(tile: Tile) -> dict[str, Any]:
    # Columns of a tile of the layout are what is cut out of it at once.
    per = bits.per_byte(tile.kind)
    scratch = {
        "w_room": _tiled(tile.unit // per, tile.stages, tile.width, tile.depth // per, jnp.uint8),
        "x_room": _tiled(min(tile.run, 64), tile.stages, tile.M, tile.depth, jnp.bfloat16),
        "here": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "free": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }
    if not tile.register_w:
        scratch["wide"] = _tiled(min(tile.run, 64), tile.warpgroups, M, tile.run, jnp.bfloat16)
    return scratch


def _tiled(width: int, buffers: int, rows: int, columns: int, dtype: Any) -> Any:
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform((8, width)), swizzle)
    return plgpu.SMEM((buffers, rows, columns), dtype, transforms=transforms)


def _multiply(x, w, x_scale, out, *, tile: Tile, interpret: Any, **sm):
    wg, n, s = lax.axis_index("wg"), lax.axis_index("n"), lax.axis_index("s")
    begin, count = tile.steps_of(s)
    first = jnp.minimum(n * tile.width, tile.N - tile.width)

    @pl.when(wg == tile.warpgroups)
    def _():
        if tile.warpgroups > 1:
            set_load(LOAD_BUDGET)
        _load(tile, sm, x, w.q.at[pl.ds(first, tile.width)], begin, count)

    @pl.when(wg < tile.warpgroups)
    def _():
        if tile.warpgroups > 1:
            set_compute(tile.warpgroups, 1, LOAD_BUDGET)
        mine = pl.ds(first + wg * M, M)
        factors = functools.partial(_factors, tile, w, mine)
        step = functools.partial(_step, tile, sm, wg, x_scale, factors, interpret, begin)
        nothing = plgpu.layout_cast(jnp.zeros((M, tile.M), jnp.float32), WGMMA)
        y, _ = lax.fori_loop(0, count, step, (nothing, factors(begin * tile.units)))
        out.at[s, mine][...] = y


def _load(tile: Tile, sm, x, w, begin, count) -> None:
    """Copy weights and x, ``stages`` ahead of the products."""
    per = bits.per_byte(tile.kind)

    def load(i, _):
        slot = lax.rem(i, jnp.int32(tile.stages))

        @pl.when(i >= tile.stages)
        def _():
            plgpu.barrier_wait(sm["free"].at[slot])

        at, here = begin + i, sm["here"].at[slot]
        bytes_ = pl.ds(at * (tile.depth // per), tile.depth // per)
        plgpu.copy_gmem_to_smem(w.at[:, bytes_], sm["w_room"].at[slot], here)
        inputs = pl.ds(at * tile.depth, tile.depth)
        plgpu.copy_gmem_to_smem(x.at[:, inputs], sm["x_room"].at[slot], here)

    def drain(i, _):
        plgpu.barrier_wait(sm["free"].at[lax.rem(i, jnp.int32(tile.stages))])

    lax.fori_loop(0, count, load, None)
    lax.fori_loop(jnp.maximum(count - tile.stages, 0), count, drain, None)


def _factors(tile: Tile, w: Weights, mine, unit) -> _Factors:
    first = _group(tile, unit)

    def of_groups(array, change) -> tuple[Any, ...]:
        found = (array.at[mine, first + j] for j in range(tile.scales))
        return tuple(change(plgpu.load(one, layout=ROWS, optimized=False)) for one in found)

    def offset(zero):
        return (zero.astype(jnp.float32) + bits.offset(tile.kind)).astype(jnp.bfloat16)

    return _Factors(
        of_groups(w.scale_NB, lambda scale: scale),
        None if w.zero_NB is None else of_groups(w.zero_NB, offset),
    )


def _group(tile: Tile, unit):
    """The first of a unit."""
    return lax.div(unit * tile.unit, jnp.int32(tile.group))


def _step(tile: Tile, sm, wg, x_scale, factors, interpret, begin, i, carry):
    """Add one read's products."""
    y, now = carry
    slot = lax.rem(i, jnp.int32(tile.stages))
    plgpu.barrier_wait(sm["here"].at[slot])
    per, mine = bits.per_byte(tile.kind), pl.ds(wg * M, M)
    for u in range(tile.units):
        unit, at = (begin + i) * tile.units + u, u * tile.unit
        following = factors(jnp.minimum(unit + 1, tile.steps * tile.units - 1))
        bytes_ = sm["w_room"].at[slot, mine, pl.ds(at // per, tile.unit // per)]
        wide = bits.wide(plgpu.load(bytes_, layout=bits.BYTES), tile.kind, interpret)
        for r in range(0, tile.unit, tile.run):
            j = r // tile.group
            weights = _centred(tile, wide[:, r : r + tile.run], now, j)
            if not tile.register_w:
                sm["wide"].at[wg][...] = weights
                plgpu.commit_smem()
                weights = sm["wide"].at[wg]
            if x_scale is not None:
                row = x_scale.at[_group(tile, unit) + j]
                of_x = plgpu.load(row, layout=COLUMNS, optimized=False)
            part = _product(weights, sm["x_room"].at[slot, :, pl.ds(at + r, tile.run)], tile)
            if x_scale is not None:
                part = part * along_columns(of_x, part)
            y = y + along_rows(now.scales[j], part) * part
        now = following
    plgpu.commit_smem()  # what was read by loads comes before the copy that lands here next
    plgpu.barrier_arrive(sm["free"].at[slot])
    return y, now


def _centred(tile: Tile, wide, now: _Factors, j: int):
    """The numbers, less the zero of their group."""
    if now.offsets is not None:
        return wide - along_rows(now.offsets[j], wide)
    offset = bits.offset(tile.kind)
    return wide - jnp.bfloat16(offset) if offset else wide


def _product(weights, x, tile: Tile):
    def product(acc):
        plgpu.wgmma(acc, weights, x.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((M, tile.M), jnp.float32))
