"""Products of each expert's matrix with its tokens on Hopper in Mosaic GPU: weights are the wide operand.

It owns the kernel, which runs twice: gate and up with the activation, then down. The matrix
unit has 64 rows or nothing and an expert has few tokens in a decode step, so the roles are swapped, y.T = w x.T::

    x [columns, depth]      tokens of one expert, shared memory, seen transposed     B of wgmma
    w [parts, 64, depth]    rows of its matrix, a warpgroup each, as stored          A of wgmma
       first product:  rows f of gate and rows f of up -> act(gate) * up     -> h[tokens, f]     16 bits
       second product: neighbouring rows d of down                           -> y[tokens, d]     float32

A block of the grid takes every ``sms``-th of the items (tile, block of the matrix); the warpgroup that loads goes from one
item to the next without a pause. Neighbouring tiles, mostly of one expert, take a block of the matrix at the same time,
which comes from device memory once and then from the L2::

    items of a panel    block 0: tile 0 1 2 .. 7 | block 1: tile 0 1 2 .. 7 | ...
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.flash import LOG2E, ROWS, M, along_rows, swizzled
from pallas_kernels.grouped_matmul.plan import Work
from pallas_kernels.grouped_matmul.values import Activation
from pallas_kernels.registers import set_compute, set_load

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

OUT_COLUMNS = 32
"""Tokens of the result that pass through shared memory at once."""
LOAD_BUDGET = 40
"""Registers per thread of the warpgroup that loads, where several compute."""
GELU = math.sqrt(2 / math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static about one of the two products: of [tokens, K] with matrices [E, R, K]."""

    R: int
    K: int
    tiles: int
    columns: int
    sms: int
    panel: int
    warpgroups: int
    parts: int
    depth: int
    stages: int
    gated: Activation | None
    """The activation of the first product; None: the second one."""

    @property
    def out(self) -> int:
        """Numbers of a token in the result."""
        return self.R // 2 if self.gated else self.R

    @property
    def width(self) -> int:
        """Neighbouring rows of one part."""
        return self.warpgroups * M

    @property
    def apart(self) -> int:
        """Rows from a part to the next."""
        return self.out if self.gated else self.width

    @property
    def span(self) -> int:
        """Numbers of the result that an item computes for each of its tokens."""
        return self.width if self.gated else self.parts * self.width

    @property
    def blocks(self) -> int:
        return -(-self.out // self.span)

    @property
    def steps(self) -> int:
        return self.K // self.depth

    @property
    def out_rows(self) -> int:
        return min(self.columns, OUT_COLUMNS)


class _Item(NamedTuple):
    """A tile and a block of its expert's matrix."""

    tile: Any
    expert: Any
    row: Any
    """Of the matrix: the first of the first part."""


def multiply(
    x_YK: jax.Array,
    w_ERK: jax.Array,
    bias_ER: jax.Array | None,
    work: Work,
    tile: Tile,
    interpret: Any = None,
) -> jax.Array:
    """[Y, out]: the product of each row of x with the matrix of its tile's expert; 16 bits after an activation, else
    float32. Rows of tiles that hold no pairs are not written."""
    dtype = x_YK.dtype if tile.gated else jnp.float32
    return plgpu.kernel(
        functools.partial(_multiply, tile=tile),
        out_type=jax.ShapeDtypeStruct((x_YK.shape[0], tile.out), dtype),
        grid=(tile.sms,),
        grid_names=("b",),
        num_threads=tile.warpgroups + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(tile, x_YK.dtype, dtype),
    )(x_YK, w_ERK, bias_ER, work.expert_I, work.n_1)


def _scratch(tile: Tile, dtype: Any, out_dtype: Any) -> dict[str, Any]:
    return {
        "w_room": swizzled(tile.stages, tile.parts, tile.width, tile.depth, dtype=dtype),
        "x_room": swizzled(tile.stages, tile.columns, tile.depth, dtype=dtype),
        "out_room": swizzled(tile.warpgroups, tile.out_rows, M, dtype=out_dtype),
        "here": plgpu.Barrier(num_arrivals=tile.parts + 1, num_barriers=tile.stages),
        "free": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }


def _multiply(x, w, bias, expert, n, out, *, tile: Tile, **sm):
    """The kernel: one block of the grid."""
    wg, block = lax.axis_index("wg"), lax.axis_index("b")
    items = n[0] * tile.blocks
    count = lax.div(jnp.maximum(items - block + (tile.sms - 1), 0), jnp.int32(tile.sms))

    def item(j) -> _Item:
        return _item(tile, expert, n[0], block + j * tile.sms)

    @pl.when(wg < tile.warpgroups)
    def _():
        if tile.warpgroups > 1:
            set_compute(tile.warpgroups, 1, LOAD_BUDGET)

        def compute(j, _):
            at = item(j)
            found = _finish(tile, _product(tile, sm, wg, j), bias, at, wg)
            _write(tile, sm["out_room"].at[wg], out, at, wg, found)

        lax.fori_loop(0, count, compute, None)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tile.warpgroups)
    def _():
        if tile.warpgroups > 1:
            set_load(LOAD_BUDGET)
        lax.fori_loop(0, count, lambda j, _: _load(tile, sm, x, w, item(j), j), None)
        # Every phase of a barrier is observed.
        n_steps = count * tile.steps

        @pl.loop(jnp.maximum(n_steps - tile.stages, 0), n_steps)
        def _(i):
            plgpu.barrier_wait(sm["free"].at[lax.rem(i, jnp.int32(tile.stages))])


def _item(tile: Tile, expert, n, i) -> _Item:
    """Item ``i``: blocks one after another within a panel of tiles; the last panel may have fewer."""
    of_panel = jnp.int32(tile.panel * tile.blocks)
    first = lax.div(i, of_panel) * tile.panel
    rest, neighbours = lax.rem(i, of_panel), jnp.minimum(n - first, tile.panel)
    at = first + lax.rem(rest, neighbours)
    # The last block begins earlier where blocks do not tile the matrix, and writes some numbers again.
    row = jnp.minimum(lax.div(rest, neighbours) * tile.span, tile.out - tile.span)
    return _Item(at, expert[at], row)


def _load(tile: Tile, sm, x, w, item: _Item, j) -> None:
    """Copy the item's operands, ``stages`` ahead of the products."""
    tokens = pl.ds(item.tile * tile.columns, tile.columns)

    def step(k, _):
        i = j * tile.steps + k
        slot = lax.rem(i, jnp.int32(tile.stages))

        @pl.when(i >= tile.stages)
        def _():
            plgpu.barrier_wait(sm["free"].at[slot])

        along, here = pl.ds(k * tile.depth, tile.depth), sm["here"].at[slot]
        for p in range(tile.parts):
            rows = pl.ds(item.row + p * tile.apart, tile.width)
            source = w.at[item.expert, rows, along]
            plgpu.copy_gmem_to_smem(source, sm["w_room"].at[slot, p], here)
        plgpu.copy_gmem_to_smem(x.at[tokens, along], sm["x_room"].at[slot], here)

    lax.fori_loop(0, tile.steps, step, None)


def _product(tile: Tile, sm, wg, j) -> tuple[Any, ...]:
    """float32[64, columns] of each part: this warpgroup's rows of the item's block."""
    mine = pl.ds(wg * M, M)

    def slot_of(k):
        return lax.rem(j * tile.steps + k, jnp.int32(tile.stages))

    def steps(*sums):
        def step(k, _):
            slot = slot_of(k)
            plgpu.barrier_wait(sm["here"].at[slot])
            x = sm["x_room"].at[slot].transpose((1, 0))
            for p, acc in enumerate(sums):
                plgpu.wgmma(acc, sm["w_room"].at[slot, p, mine], x)
            plgpu.wgmma_wait(tile.parts)  # those of the step before are done, these run on
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(sm["free"].at[slot_of(k - 1)]))

        lax.fori_loop(0, tile.steps, step, None)
        found = tuple(acc[...] for acc in sums)
        plgpu.barrier_arrive(sm["free"].at[slot_of(tile.steps - 1)])
        return found

    return pl.run_scoped(steps, *[plgpu.ACC((M, tile.columns), jnp.float32)] * tile.parts)


def _finish(tile: Tile, sums, bias, item: _Item, wg) -> tuple[Any, ...]:
    """What is written of each part: one of both after an activation."""
    if bias is not None:
        rows = [item.row + p * tile.apart + wg * M for p in range(tile.parts)]
        load = functools.partial(plgpu.load, layout=ROWS, optimized=False)
        found = [load(bias.at[item.expert, pl.ds(row, M)]).astype(jnp.float32) for row in rows]
        sums = [x + along_rows(b, x) for x, b in zip(sums, found, strict=True)]
    return (_activate(*sums, tile.gated),) if tile.gated else tuple(sums)


def _activate(gate, up, activation: Activation):
    if activation.name == "gelu_tanh":
        inner = GELU * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1 + jnp.tanh(inner)) * up
    alpha = 1.0
    if activation.name == "clamped":
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit) + 1
        alpha = activation.alpha
    return gate * up / (1 + jnp.exp2(gate * (-alpha * LOG2E)))


def _write(tile: Tile, room, out, item: _Item, wg, parts) -> None:
    """Write this warpgroup's numbers of the tile's tokens, turned back to a row a token."""
    for p, y in enumerate(parts):
        numbers = pl.ds(item.row + p * tile.apart + wg * M, M)
        for c in range(0, tile.columns, tile.out_rows):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = y[:, c : c + tile.out_rows].astype(out.dtype)
            room.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            tokens = pl.ds(item.tile * tile.columns + c, tile.out_rows)
            plgpu.copy_smem_to_gmem(room, out.at[tokens, numbers])
