"""The second kernel of paged attention: add up the partial sums of each row's splits.

It owns the reading of slots. A row that lies in splits a..b has its sums in slots row+a .. row+b. A block of the
grid adds one query row of one row of the batch, a thread a column, and writes it where the next product reads it::

    slots       | s s s s s s s s | s s s s s s s s | s s |      a round of 8 (or 32), then one of 2
                  their logarithms and columns are loaded together, then added with their weights

so what it waits for is one round after another, however long the row is.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.flash import MASKED
from pallas_kernels.paged_attention.hopper import Tile, Work

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

MANY_SPLITS = 64
"""Above so many splits a row may lie in more slots than rounds of 8 are good for. Few kv heads share the device
then, so that few blocks are in the grid and a thread may have more registers."""
FEW = 2
"""Most rows of a large batch lie in one slot or two: they do not read eight."""


class _Sums(NamedTuple):
    """Of the slots so far: weighted sum of a column, highest logarithm, sum of weights."""

    o: Any
    top: Any
    total: Any


def combine(
    o: jax.Array,
    log_total: jax.Array,
    sink_N: jax.Array | None,
    work: Work,
    tile: Tile,
    dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """[D, J * N, H] in ``dtype``, token-major: the weighted mean of each row's slots; zero for rows without any.

    Args:
        o: float32[slots, partial_rows, H], weighted means of values.
        log_total: float32[slots, partial_rows], log2 of the sums of weights behind them.
        sink_N: logit in units of log2 that each head's softmax also counts; None: none.
    """
    D, N = work.first_D.shape[0], tile.K * tile.G
    return plgpu.kernel(
        functools.partial(_combine, tile=tile),
        out_type=jax.ShapeDtypeStruct((D, tile.J * N, tile.H), dtype),
        grid=(D, tile.J * N),
        grid_names=("r", "y"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(o, log_total, sink_N, work.cum_E, work.per_1)


def columns(H: int) -> Any:
    """The columns of a row of H that each of the 128 threads holds; with 64 both halves of them hold it."""
    if H >= 128:
        return plgpu.Layout.WG_STRIDED((H,), vec_size=H // 128)
    tiling = plgpu.Tiling(((64,), (32,), (1,)))
    return plgpu.Layout.TILED(
        tiling, warp_dims=(plgpu.Replicated(2), -3), lane_dims=(-2,), vector_dim=-1
    )


def _combine(o, logs, sink, cum, per, out, *, tile: Tile):
    row, y = lax.axis_index("r"), lax.axis_index("y")
    begin, end = cum[row], cum[row + 1]
    token, head = lax.div(y, jnp.int32(tile.heads)), lax.rem(y, jnp.int32(tile.heads))
    here = tile.partial_row(token, head)
    sunk = None if sink is None else sink[head]

    s0 = row + lax.div(begin, per[0])
    s1 = jnp.where(end > begin, row + lax.div(end - 1, per[0]) + 1, s0)
    sums = _Sums(_zeros(tile.H), jnp.float32(MASKED), jnp.float32(0))
    for width in (32, FEW) if tile.splits > MANY_SPLITS else (8, FEW):
        # A wide round has empty places where the narrow one after it would not do.
        spare = width - 1 - (FEW if width > FEW else 0)
        n = lax.div(s1 - s0 + spare, jnp.int32(width))
        add = functools.partial(_add, o.at[:, here], logs.at[:, here], s0, s1, width)
        sums = lax.fori_loop(0, n, add, sums)
        s0 = jnp.minimum(s0 + n * width, s1)
    if sunk is not None:
        sums = _with_sink(sums, sunk)
    weight = jnp.where(sums.total > 0, 1 / sums.total, 0.0)
    out.at[row, y][...] = (sums.o * weight).astype(out.dtype)


def _add(o, logs, s0, s1, width: int, i, sums: _Sums) -> _Sums:
    """Add slots s0 + i * width and following, ``width`` of them: all are loaded before any is added. Those
    from s1 on are the last one, with a weight of zero."""
    slots = [s0 + (i * width + j) for j in range(width)]
    read = [jnp.minimum(slot, s1 - 1) for slot in slots]
    found = [logs[slot] for slot in read]
    parts = [plgpu.load(o.at[slot], layout=columns(o.shape[-1]), optimized=False) for slot in read]
    found = [jnp.where(slot < s1, x, MASKED) for slot, x in zip(slots, found, strict=True)]
    top = functools.reduce(jnp.maximum, found, sums.top)
    keep = jnp.exp2(sums.top - top)
    total, new = sums.total * keep, sums.o * keep
    for x, part in zip(found, parts, strict=True):
        weight = jnp.exp2(x - top)
        total, new = total + weight, new + part * weight
    return _Sums(new, top, total)


def _with_sink(sums: _Sums, sunk) -> _Sums:
    """A sink only adds to the total; where nothing was seen the total stays above zero with it."""
    top = jnp.maximum(sums.top, sunk)
    keep = jnp.exp2(sums.top - top)
    return _Sums(sums.o * keep, top, sums.total * keep + jnp.exp2(sunk - top))


def _zeros(H: int) -> Any:
    return plgpu.layout_cast(jnp.zeros((H,), jnp.float32), columns(H))
