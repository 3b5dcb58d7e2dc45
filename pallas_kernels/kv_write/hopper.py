"""Norm, rotation and page write on Hopper in Mosaic GPU: each partial sum of a projection is read once, each
result written once.

It owns the kernel. The heads of a token, its queries, keys and values alike, are K * (G + 2) rows of H. A block of
the grid takes four of them, a warp each::

    row of token t   | k0: q0 q1 .. | k | v | k1: q0 q1 .. | k | v | ...     sum of y[:, t], float32
                      '---- 4 ----'                                          one block
    q  -> norm -> turn -> queries[t, kv head, i]
    k  -> norm -> turn -> keys[page, kv head, offset]       a row leaves shared memory by one bulk
    v  ----------------> values[page, kv head, offset]      copy to wherever it belongs

Where the heads are no multiple of four the last block begins earlier and writes some rows again,
the same values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

ROWS = 4
"""Rows of a block: one a warp."""
E4M3_MAX = 448.0
ALIGNED = 128
"""Bytes that the rows of shared memory must be a multiple of for a bulk copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static about one call."""

    S: int
    T: int
    K: int
    G: int
    H: int
    q_rows: int
    q_dtype: Any
    kv_dtype: Any
    eps: float
    normed: bool

    @property
    def C(self) -> int:
        """Rows of a kv head: its queries, its key, its value."""
        return self.G + 2

    @property
    def half(self) -> int:
        return self.H // 2

    @property
    def blocks(self) -> int:
        return -(-self.K * self.C // ROWS)

    @property
    def layout(self) -> Any:
        """Of [ROWS, half]: a row a warp, neighbours along it in each thread."""
        vector = self.half // 32
        tiling = plgpu.Tiling(((ROWS, self.half), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


class Angles(NamedTuple):
    """float32 of each token, X = H / 2: dimension i turns with i + X."""

    cos_TX: Any
    sin_TX: Any


class Places(NamedTuple):
    """int32 places of the tokens, no two the same; nothing is written where the page is negative."""

    page_T: Any
    off_T: Any


def write(
    y_STKCH: jax.Array,
    angles: Angles,
    places: Places,
    pools: tuple[jax.Array, jax.Array],
    optional: dict[str, jax.Array],
    tile: Tile,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(queries, keys, values). ``optional``: ``bias`` [K, C, H], ``q_norm`` and ``k_norm`` [H], float32
    ``factors`` [2, K] of 8-bit keys and values."""
    rows = tile.K * tile.C
    optional = dict(optional)
    if "bias" in optional:
        optional["bias"] = optional["bias"].reshape(rows, tile.H)
    keys, values = (jax.new_ref(pool) for pool in pools)
    kernel = plgpu.kernel(
        functools.partial(_write, tile=tile, names=tuple(optional)),
        out_type=jax.ShapeDtypeStruct((tile.T, tile.K, tile.q_rows, tile.H), tile.q_dtype),
        grid=(tile.T, tile.blocks),
        grid_names=("t", "b"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types={
            "q_room": _room(tile.H, tile.q_dtype),
            "kv_room": _room(tile.H, tile.kv_dtype),
        },
    )
    y_STRH = y_STKCH.reshape(tile.S, tile.T, rows, tile.H)
    q = kernel(y_STRH, *angles, *places, keys, values, *optional.values())
    return q, jax.freeze(keys), jax.freeze(values)


def _room(H: int, dtype: Any) -> Any:
    return plgpu.SMEM((ROWS, max(H, ALIGNED // dtype.itemsize)), dtype)


def _write(y, cos, sin, page, off, keys, values, *rest, tile: Tile, names, q_room, kv_room):
    *more, q_out = rest
    optional = dict(zip(names, more, strict=True))
    t = lax.axis_index("t")
    base = jnp.minimum(lax.axis_index("b") * ROWS, tile.K * tile.C - ROWS)
    parts = _normed(_read(y, t, base, optional, tile), base, optional, tile)
    parts = _turned(parts, cos, sin, t, base, tile)
    _keep(parts, q_room, tile)
    _keep(_scaled(parts, base, optional, tile), kv_room, tile)
    plgpu.commit_smem()
    for r in range(ROWS):
        head, kind = lax.div(base + r, jnp.int32(tile.C)), lax.rem(base + r, jnp.int32(tile.C))
        _send(q_room, r, kind < tile.G, q_out, (t, head, kind), tile)
        for which, pool in enumerate((keys, values)):
            mine = (kind == tile.G + which) & (page[t] >= 0)
            _send(kv_room, r, mine, pool, (page[t], head, off[t]), tile)
    plgpu.wait_smem_to_gmem(0)


def _send(room, r: int, mine, to, place: tuple[Any, ...], tile: Tile) -> None:
    """Copy row ``r`` of shared memory to its place, if it is one of ``mine``."""

    @pl.when(mine)
    def _():
        plgpu.copy_smem_to_gmem(room.at[r, pl.ds(0, tile.H)], to.at[place])


def _halves(ref, tile: Tile, layout: Any) -> list[Any]:
    """The first and the last half of the last dimension of a reference to device memory, float32."""
    lead = (slice(None),) * (len(ref.shape) - 1)
    places = (pl.ds(0, tile.half), pl.ds(tile.half, tile.half))
    found = [plgpu.load(ref.at[(*lead, p)], layout=layout, optimized=False) for p in places]
    return [x.astype(jnp.float32) for x in found]


def _read(y, t, base, optional, tile: Tile) -> list[Any]:
    rows = [y.at[s, t, pl.ds(base, ROWS)] for s in range(tile.S)]
    if "bias" in optional:
        rows.append(optional["bias"].at[pl.ds(base, ROWS)])
    # All loads come before the sums: a block waits for memory once.
    loaded = [_halves(row, tile, tile.layout) for row in rows]
    return [functools.reduce(jnp.add, halves) for halves in zip(*loaded, strict=True)]


def _kind(base, tile: Tile) -> Any:
    """int32[ROWS, half]: below G a query, then the key, then the value."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, tile.half), 0, layout=tile.layout)
    return lax.rem(row + base, jnp.int32(tile.C))


def _normed(parts, base, optional, tile: Tile) -> list[Any]:
    if not tile.normed:
        return parts
    kind = _kind(base, tile)
    squares = (parts[0] * parts[0] + parts[1] * parts[1]).sum(axis=1)
    factor = lax.rsqrt(squares * (1.0 / tile.H) + tile.eps)
    factor = lax.broadcast_in_dim(factor, parts[0].shape, [0])
    of_q, of_k = (_along(optional[name], tile) for name in ("q_norm", "k_norm"))
    found = []
    for x, wq, wk in zip(parts, of_q, of_k, strict=True):
        normed = x * factor * jnp.where(kind < tile.G, wq, wk)
        found.append(jnp.where(kind > tile.G, x, normed))
    return found


def _along(ref, tile: Tile) -> list[Any]:
    """Halves of a vector [H], the same for all rows."""
    halves = _halves(ref, tile, tile.layout.reduce(0))
    return [lax.broadcast_in_dim(x, (ROWS, tile.half), [1]) for x in halves]


def _turned(parts, cos, sin, t, base, tile: Tile) -> list[Any]:
    def angles(ref):
        row = plgpu.load(ref.at[t], layout=tile.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row, (ROWS, tile.half), [1])

    (a, b), c, s = parts, angles(cos), angles(sin)
    value = _kind(base, tile) > tile.G
    return [jnp.where(value, a, a * c - b * s), jnp.where(value, b, b * c + a * s)]


def _scaled(parts, base, optional, tile: Tile) -> list[Any]:
    """Divided by the scales of 8-bit keys and values; what is too large becomes the largest."""
    if "factors" not in optional:
        return parts
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, tile.half), 0, layout=tile.layout)
    factor = plgpu.layout_cast(jnp.ones((ROWS, tile.half), jnp.float32), tile.layout)
    for r in range(ROWS):
        head, kind = lax.div(base + r, jnp.int32(tile.C)), lax.rem(base + r, jnp.int32(tile.C))
        mine = optional["factors"][jnp.maximum(kind - tile.G, 0), head]
        factor = jnp.where(row == r, mine, factor)
    return [jnp.clip(x * factor, -E4M3_MAX, E4M3_MAX) for x in parts]


def _keep(parts, room, tile: Tile) -> None:
    for i, x in enumerate(parts):
        room.at[:, pl.ds(i * tile.half, tile.half)][...] = x.astype(room.dtype)
