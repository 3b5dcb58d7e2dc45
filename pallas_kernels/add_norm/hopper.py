"""Partial sums, residual and norm on Hopper in Mosaic GPU: each number is read once and written once.

It owns the kernel. A block of the grid takes the row of a token, four neighbouring columns a load and thread::

    y[0, t] + .. + y[S - 1, t] + x[t]  ->  x'[t]                    float32
    x'[t] / rms(x'[t]) * weight        ->  what the next product reads
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

VECTOR = 4
"""Columns of one load: 16 bytes of float32."""
COLUMNS = 128 * VECTOR
"""Columns that the threads of a block load at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static about one call."""

    S: int
    T: int
    D: int
    eps: float
    dtype: Any

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.D,), vec_size=VECTOR)


def add_norm(
    y_STD: jax.Array, x_TD: jax.Array, weight_D: jax.Array, tile: Tile, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """(residual stream, its norm)."""
    shape = (tile.T, tile.D)
    return plgpu.kernel(
        functools.partial(_add_norm, tile=tile),
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, tile.dtype),
        ),
        grid=(tile.T,),
        grid_names=("t",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(y_STD, x_TD, weight_D)


def _add_norm(y, x, weight, x_out, normed_out, *, tile: Tile):
    t = lax.axis_index("t")
    load = functools.partial(plgpu.load, layout=tile.layout, optimized=False)
    # All loads come before the arithmetic: the row waits for memory once.
    parts = [load(ref) for ref in (x.at[t], *(y.at[s, t] for s in range(tile.S)))]
    scale = load(weight).astype(jnp.float32)
    row = functools.reduce(jnp.add, parts)
    mean = (row * row).sum() * (1 / tile.D)
    x_out.at[t][...] = row
    normed_out.at[t][...] = (row * lax.rsqrt(mean + tile.eps) * scale).astype(tile.dtype)
