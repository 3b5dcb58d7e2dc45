"""The search for a row's bound on Hopper in Mosaic GPU: few passes over the row, fewer tiles in each.

It owns the kernel. One warpgroup searches one row. A pass takes four candidates t and sums, over the logits x >= t,
their count and their mass 2 ** ((x - top) * slope); the answer is the largest t whose sum is still enough::

    lo                                            hi        enough at lo, not at hi
    |--------t0--------t1--------t2--------t3-----|         a pass leaves a fifth of the interval
             |<- not enough from here on

The first pass also keeps the maximum of each tile of the row. As lo rises, tiles that lie below all
candidates are neither copied nor read again: of logits with a peak few tiles remain after the first
pass. Counts tell when to stop: with one token between lo and hi the set can no longer change.
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

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2E = math.log2(math.e)
CANDIDATES = 4
"""More of them end in fewer passes and cost more arithmetic in each: four balance the two."""
FIRST = (8.0, 2.0)
"""Candidates of the first pass lie so many temperatures below the top, beside the floor and the
top itself."""
LINE = 128
"""Logits that lie together; a bulk copy takes no more than 256 along a dimension."""
VECTOR = 4
"""Floats that a thread reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A row of logits is ``lines`` of LINE of them; ``size`` lines (a multiple of 4, at most
    ``lines``) are read at once, ``stages`` copies are in flight."""

    lines: int
    size: int
    stages: int

    @property
    def tiles(self) -> int:
        return -(-self.lines // self.size)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.size, LINE)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=VECTOR)


class _Bounds(NamedTuple):
    """The interval and what is known of its ends: tokens and mass at or above them."""

    lo: Any
    n_lo: Any
    m_lo: Any
    hi: Any
    n_hi: Any


class _Sums(NamedTuple):
    """Of each candidate, tokens and mass at or above it."""

    at: tuple[Any, ...]
    n: tuple[Any, ...]
    m: tuple[Any, ...]


def search(
    logits_RYX: jax.Array,
    top_R: jax.Array,
    temperature_R: jax.Array,
    floor_R: jax.Array,
    k_R: jax.Array,
    p_R: jax.Array,
    tile: Tile,
    interpret: Any = None,
) -> jax.Array:
    """float32[R]; all arguments float32, logits [R, lines, LINE]. ``floor_R``: no bound is lower
    (LOWEST: none). ``k_R`` is infinite and ``p_R`` 1 where they do not limit."""
    R = logits_RYX.shape[0]
    return plgpu.kernel(
        functools.partial(_search, tile=tile),
        out_type=jax.ShapeDtypeStruct((R,), jnp.float32),
        grid=(R,),
        grid_names=("r",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types={
            "room": plgpu.SMEM((tile.stages, *tile.shape), jnp.float32),
            "maxima": plgpu.SMEM((tile.tiles,), jnp.float32),
            "here": plgpu.Barrier(num_barriers=tile.stages),
            "read": plgpu.Barrier(num_barriers=tile.stages),
        },
    )(logits_RYX, top_R, temperature_R, floor_R, k_R, p_R)


def _search(logits, tops, temperatures, floors, ks, ps, out, *, tile: Tile, **sm):
    r = lax.axis_index("r")
    row = _Row(tile, logits.at[r], tops[r], LOG2E / temperatures[r], sm)
    spread = temperatures[r]
    at = (floors[r], *(row.top - c * spread for c in FIRST), row.top)
    first, least = row.first_pass(at)
    start = _Bounds(at[0], first.n[0], first.m[0], row.top, first.n[-1])

    def bound(b: _Bounds, want: Any, by_mass: bool) -> _Bounds:
        b = _narrowed(b, first, want, by_mass)
        # From LOWEST it would take some fifty passes more, and ``hi - lo`` could be infinite.
        b = b._replace(lo=jnp.maximum(b.lo, least))
        # Nothing to search where there is no limit (``want`` is infinite) or too little at lo: the
        # answer is lo, and the passes that would say so are saved.
        enough = (b.m_lo if by_mass else b.n_lo) >= want
        b = b._replace(hi=jnp.where(enough, b.hi, b.lo))
        return lax.while_loop(
            lambda b: _open(b, want, by_mass),
            lambda b: _narrowed(b, row.one_pass(_between(b)), want, by_mass),
            b,
        )

    b = bound(start, ks[r], by_mass=False)
    b = b._replace(hi=row.top, n_hi=first.n[-1])
    want = jnp.where(ps[r] < 1.0, ps[r] * b.m_lo, jnp.float32(jnp.inf))
    out[r] = bound(b, want, by_mass=True).lo


def _between(b: _Bounds) -> tuple[Any, ...]:
    """Rounding may put the last one at hi or above: there it is not enough either, so nothing moves."""
    step = (b.hi - b.lo) * (1.0 / (CANDIDATES + 1))
    return tuple(b.lo + step * (i + 1.0) for i in range(CANDIDATES))


def _open(b: _Bounds, want: Any, by_mass: bool) -> Any:
    """Whether another pass can change the set. NaN ends it."""
    inside = functools.reduce(jnp.logical_or, ((t > b.lo) & (t < b.hi) for t in _between(b)))
    several = b.n_lo - b.n_hi > 1.0
    return inside & (several if by_mass else several & (b.n_lo > want))


def _narrowed(b: _Bounds, sums: _Sums, want: Any, by_mass: bool) -> _Bounds:
    for t, n, m in zip(*sums, strict=True):
        enough = (m if by_mass else n) >= want
        up = enough & (t > b.lo)
        down = jnp.logical_not(enough) & (t < b.hi)
        b = _Bounds(
            lo=jnp.where(up, t, b.lo),
            n_lo=jnp.where(up, n, b.n_lo),
            m_lo=jnp.where(up, m, b.m_lo),
            hi=jnp.where(down, t, b.hi),
            n_hi=jnp.where(down, n, b.n_hi),
        )
    return b


class _Row(NamedTuple):
    """One row in device memory and the block's shared memory."""

    tile: Tile
    logits: Any
    top: Any
    slope: Any
    sm: dict[str, Any]

    def first_pass(self, at: tuple[Any, ...]) -> tuple[_Sums, Any]:
        """(sums, the least finite logit); keeps each tile's maximum."""

        def add(i, x, carry):
            sums, least = carry
            self.sm["maxima"][i] = x.max()
            finite = jnp.where(x >= LOWEST, x, jnp.float32(jnp.inf))
            return self._added(sums, x, at), jnp.minimum(least, finite)

        none = (self._nothing(), self._full(jnp.inf))
        sums, least = self._stream(lambda i: i < self.tile.tiles, add, none)
        return self._total(at, sums), least.min()

    def one_pass(self, at: tuple[Any, ...]) -> _Sums:
        maxima, last = self.sm["maxima"], self.tile.tiles - 1

        def wanted(i):
            return (i <= last) & (maxima[jnp.minimum(i, last)] >= at[0])

        def add(_, x, sums):
            return self._added(sums, x, at)

        return self._total(at, self._stream(wanted, add, self._nothing()))

    def _stream(self, wanted, add, carry):
        """``add`` every wanted tile, copied ``stages`` ahead."""
        tile, read = self.tile, self.sm["read"]

        def fetch(i) -> None:
            slot = lax.rem(i, jnp.int32(tile.stages))
            begin = jnp.minimum(i * tile.size, tile.lines - tile.size)
            source = self.logits.at[pl.ds(begin, tile.size)]
            room, here = self.sm["room"].at[slot], self.sm["here"].at[slot]
            pl.when(wanted(i))(lambda: plgpu.copy_gmem_to_smem(source, room, here))

        def use(i, carry):
            slot = lax.rem(i, jnp.int32(tile.stages))
            plgpu.barrier_wait(self.sm["here"].at[slot])
            carry = add(i, self._load(i, slot), carry)
            # Every thread has its part in registers before the next copy may land here.
            plgpu.commit_smem()
            plgpu.barrier_arrive(read.at[slot])
            plgpu.barrier_wait(read.at[slot])
            return carry

        def step(i, carry):
            carry = lax.cond(wanted(i), lambda c: use(i, c), lambda c: c, carry)
            fetch(i + tile.stages)
            return carry

        pl.loop(0, min(tile.stages, tile.tiles))(fetch)
        return lax.fori_loop(0, tile.tiles, step, carry)

    def _load(self, i, slot):
        """Tile ``i``; the last one begins earlier than its turn, what it repeats is hidden."""
        tile = self.tile
        x = plgpu.load(self.sm["room"].at[slot], layout=tile.layout)
        if tile.lines % tile.size == 0:
            return x
        repeated = jnp.maximum(i * tile.size - (tile.lines - tile.size), 0)
        place = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=tile.layout)
        return jnp.where(place >= repeated, x, jnp.float32(-jnp.inf))

    def _added(self, sums, x, at: tuple[Any, ...]):
        mass = jnp.exp2((x - self.top) * self.slope)
        n, m = sums
        n = tuple(a + jnp.where(x >= t, 1.0, 0.0) for a, t in zip(n, at, strict=True))
        m = tuple(a + jnp.where(x >= t, mass, 0.0) for a, t in zip(m, at, strict=True))
        return n, m

    def _nothing(self):
        zeros = tuple(self._full(0.0) for _ in range(CANDIDATES))
        return zeros, zeros

    def _full(self, value: float):
        full = jnp.full(self.tile.shape, value, jnp.float32)
        return plgpu.layout_cast(full, self.tile.layout)

    def _total(self, at, sums) -> _Sums:
        n, m = sums
        return _Sums(at, tuple(x.sum() for x in n), tuple(x.sum() for x in m))
