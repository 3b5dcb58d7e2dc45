"""Prefill attention over pages for Hopper in Mosaic GPU: chunks of several sequences in one call.

It owns the kernel and its list of tiles. A tile is 128 rows of one sequence and one kv head; a row is a (token,
query head of the group) pair, token-major, so that all heads of a group share the keys they load::

    tokens      |f0 f0 f0 f0 f0 f0 f0|f1 f1 f1|   G = 4 rows each
    tiles       |--- 128 ---|--- 128 -|- 128 --|   a tile never crosses a sequence
                  warpgroup 0: rows 0..63, warpgroup 1: rows 64..127, warpgroup 2 loads

    keys        |plain     |plain     |masked    |      blocks up to the tile's last token
                 no masks   no masks   causal border, window, end of the sequence

While one computing warpgroup does its softmax the other has the matrix unit (``ping_pong``).
Idea of taking turns: FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import flash
from pallas_kernels.flash import M, Sums, along_rows, swizzled
from pallas_kernels.registers import set_compute, set_load
from pallas_kernels.spec import Chunks, Pages
from pallas_kernels.widen import Raw, load_widened

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

TEAM = 2
"""Warpgroups that compute."""
ROWS_OF_TILE = TEAM * M
OUT_COLUMNS = 64
"""Columns of the output that pass through shared memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static about one call of P tokens in at most F sequences."""

    P: int
    F: int
    G: int
    K: int
    H: int
    Z: int
    block: int
    stages: int
    ping_pong: bool
    scale: float
    ahead: bool = False
    """Scores of the next block are under way while the softmax of this one is computed, where neither needs masks:
    the matrix unit has work of the same warpgroup then, which takes more registers."""
    window: int = 0
    soft_cap: float = 0.0
    raw_stages: int = 0
    """As of ``paged_attention``: above 0 for KV of 8 bits."""
    scaled: bool = False
    """As of ``paged_attention``."""
    register_p: bool = True
    """As of ``paged_attention``: the interpreter needs weights in shared memory."""

    @property
    def copies(self) -> int:
        """Of a block of keys: one a page, or one in all."""
        return self.block // flash.page_rows(self.Z, self.block)

    @property
    def load_budget(self) -> int:
        """Registers per thread of the warpgroup that loads: it holds a page id for every copy."""
        return 56 if self.copies <= 8 else 72

    @property
    def tiles(self) -> int:
        """Tiles that P tokens in F sequences can need."""
        return self.P * self.G // ROWS_OF_TILE + self.F

    @property
    def rows(self) -> int:
        """Rows of all tiles of one kv head."""
        return self.tiles * ROWS_OF_TILE


class Work(NamedTuple):
    """The tiles, int32, by their place in queries and output: the rows of sequence f are neighbours
    from ``base_F`` on. ``n_1`` tiles in all; the rest of the places belong to nobody."""

    row_I: jax.Array
    """Sequence of each tile."""
    skip_I: jax.Array
    """First row of the tile within its sequence."""
    n_1: jax.Array
    base_F: jax.Array


def plan(count_F: jax.Array, tile: Tile) -> Work:
    """The tiles of rows with ``count_F`` (int32) tokens, row after row."""
    n_F = -(-count_F * tile.G // ROWS_OF_TILE)
    end_F = jnp.cumsum(n_F)
    i_I = jnp.arange(tile.tiles, dtype=jnp.int32)
    row_I = jnp.minimum((end_F[None] <= i_I[:, None]).sum(1, dtype=jnp.int32), tile.F - 1)
    skip_I = (i_I - (end_F - n_F)[row_I]) * ROWS_OF_TILE
    return Work(row_I, skip_I, end_F[-1:], (end_F - n_F) * ROWS_OF_TILE)


def attend(
    q_KYH: jax.Array,
    pages: Pages,
    chunks: Chunks,
    sinks_KG: jax.Array | None,
    work: Work,
    tile: Tile,
    interpret: Any = None,
) -> jax.Array:
    """[K, Y, H] in the queries' dtype: row ``base_F[f] + i`` is the i-th (token, head)
    pair of sequence f; others are not written or mean nothing. ``sinks_KG``: logits in units of
    log2, or None."""
    out = jax.ShapeDtypeStruct((tile.K, tile.rows, tile.H), q_KYH.dtype)
    return plgpu.kernel(
        partial(_attend, tile=tile),
        out_type=out,
        grid=(tile.tiles, tile.K),
        grid_names=("i", "h"),
        num_threads=TEAM + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(tile, q_KYH.dtype, pages.keys_PKZH.dtype),
    )(q_KYH, *pages, chunks.start_F, chunks.count_F, sinks_KG, *work[:3])


def _scratch(tile: Tile, dtype: Any, kv_dtype: Any) -> dict[str, Any]:
    room = partial(swizzled, dtype=dtype)
    arrivals = 1 if tile.raw_stages else tile.copies
    scratch = {
        "q_in": room(TEAM, M, tile.H),
        "k": room(tile.stages, tile.block, tile.H),
        "v": room(tile.stages, tile.block, tile.H),
        "o_out": room(TEAM, M, OUT_COLUMNS),
        "q_here": plgpu.Barrier(num_barriers=TEAM),
        "k_here": plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.stages),
        "v_here": plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.stages),
        "k_free": plgpu.Barrier(num_arrivals=TEAM, num_barriers=tile.stages),
        "v_free": plgpu.Barrier(num_arrivals=TEAM, num_barriers=tile.stages),
        "turn": plgpu.Barrier(num_arrivals=TEAM),
    }
    if not tile.raw_stages:
        scratch["unclean"] = plgpu.Barrier(num_arrivals=tile.copies)
    for name in ("k_raw", "v_raw") if tile.raw_stages else ():
        scratch[name] = swizzled(tile.raw_stages, tile.block, tile.H, dtype=kv_dtype)
        arrivals = tile.copies * (2 if tile.scaled else 1)
        barriers = plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.raw_stages)
        scratch[f"{name}_here"] = barriers
    for name in ("k", "v") if tile.scaled else ():
        scratch[f"{name}_raw_scale"] = plgpu.SMEM((tile.raw_stages, tile.block), jnp.float32)
        scratch[f"{name}_scale"] = plgpu.SMEM((tile.stages, tile.block), jnp.float32)
    if not tile.register_p:
        scratch["p"] = room(TEAM, M, tile.block)
    return scratch


class _Job(NamedTuple):
    """One tile of the list. ``start`` and ``length`` are of the sequence, ``skip`` the tile's first
    row within it; blocks ``begin`` .. ``end`` are what its tokens see."""

    tile: Tile
    sm: dict[str, Any]
    row: Any
    head: Any
    skip: Any
    place: Any
    start: Any
    length: Any
    begin: Any
    end: Any

    def slot(self, j: Any) -> Any:
        return lax.rem(j - self.begin, jnp.int32(self.tile.stages))


def _job(tile: Tile, sm, place, lists, start, count) -> _Job:
    row, skip = (ref[place] for ref in lists)
    begins, tokens = start[row], count[row]
    first_token = lax.div(skip, jnp.int32(tile.G))
    last_token = lax.div(skip + ROWS_OF_TILE - 1, jnp.int32(tile.G))
    keys = begins + jnp.minimum(tokens, last_token + 1)
    end = lax.div(keys + (tile.block - 1), jnp.int32(tile.block))
    begin = jnp.int32(0)
    if tile.window:
        low = jnp.maximum(begins + first_token - tile.window + 1, 0)
        begin = lax.div(low, jnp.int32(tile.block))
    head = lax.axis_index("h")
    return _Job(tile, sm, row, head, skip, place, begins, begins + tokens, begin, end)


def _attend(
    q, keys, values, table, k_scales, v_scales, start, count, sinks, *work_and_out, tile, **sm
):
    """The kernel: one tile."""
    row_I, skip_I, n_1, out = work_and_out
    wg = lax.axis_index("wg")

    @pl.when(lax.axis_index("i") < n_1[0])
    def _():
        # The last tile of a sequence has the most keys, so the last comes first.
        place = n_1[0] - 1 - lax.axis_index("i")
        job = _job(tile, sm, place, (row_I, skip_I), start, count)

        @pl.when(wg < TEAM)
        def _():
            set_compute(TEAM, 1, tile.load_budget)
            _write(job, out, _compute(job, wg, sinks), wg)

        @pl.when(wg == TEAM)
        def _():
            set_load(tile.load_budget)
            for w in range(TEAM):
                source = q.at[job.head, pl.ds(job.place * ROWS_OF_TILE + w * M, M)]
                plgpu.copy_gmem_to_smem(source, sm["q_in"].at[w], sm["q_here"].at[w])
            if tile.raw_stages:
                _load_widened(job, (keys, k_scales), (values, v_scales), table)
            else:
                _load(job, keys, values, table)
            _drain(job)


def _load(job: _Job, keys, values, table) -> None:
    """Copy the blocks in order, ``stages`` ahead; page ids are read one block ahead of their use."""
    tile, sm = job.tile, job.sm
    last = lax.div(job.length - 1, jnp.int32(tile.Z))

    def pages(j):
        return flash.page_ids(table, job.row, j, last, tile.Z, tile.block)

    def block(j, ids):
        slot = job.slot(j)
        following = pages(jnp.minimum(j + 1, job.end - 1))
        for name in ("k", "v"):

            @pl.when(j - job.begin >= tile.stages)
            def _(name=name):
                plgpu.barrier_wait(sm[f"{name}_free"].at[slot])

            if name == "k":
                flash.copy_block(
                    ids,
                    keys,
                    job.head,
                    j,
                    sm["k"].at[slot],
                    sm["k_here"].at[slot],
                    tile.Z,
                    tile.block,
                )
            else:
                _load_values(job, values, ids, j, slot)
        return following

    lax.fori_loop(job.begin, job.end, block, pages(job.begin))


def _load_widened(job: _Job, keys, values, table) -> None:
    """``_load`` of 8-bit KV."""
    tile, sm = job.tile, job.sm
    last = lax.div(job.length - 1, jnp.int32(tile.Z))

    def raw(name, pool, scales):
        here, ring = sm[f"{name}_raw_here"], sm.get(f"{name}_raw_scale")
        return Raw(name, pool, sm[f"{name}_raw"], lambda slot: here.at[slot], scales, ring)

    def pages(j):
        return flash.page_ids(table, job.row, j, last, tile.Z, tile.block)

    def copy(raw, ids, j, at):
        size = (tile.Z, tile.block)
        flash.copy_block(ids, raw.pool, job.head, j, raw.ring.at[at], raw.here(at), *size)
        if tile.scaled:
            to = raw.scale_ring.at[at]
            flash.copy_block(ids, raw.scales, job.head, j, to, raw.here(at), *size)

    def put(raw, j, at):
        name, slot = raw.name, job.slot(j)

        @pl.when(j - job.begin >= tile.stages)
        def _():
            plgpu.barrier_wait(sm[f"{name}_free"].at[slot])

        if tile.scaled:
            sm[f"{name}_scale"].at[slot][...] = _scales_seen(job, raw.scale_ring.at[at], j)
        flash.widen(raw.ring.at[at], sm[name].at[slot])
        if name == "v" and not tile.scaled:
            pl.when(jnp.logical_not(_clean(job, j)))(partial(_wipe, job, j, slot))
        plgpu.barrier_arrive(sm[f"{name}_here"].at[slot])

    raws = (raw("k", *keys), raw("v", *values))
    early = tile.copies <= 4
    load_widened(raws, job.begin, job.end, tile.raw_stages, pages, early, copy, put)


def _drain(job: _Job) -> None:
    """Wait for the last uses of the rings, so that every phase is observed."""
    for name in ("k_free", "v_free"):

        @pl.loop(jnp.maximum(job.end - job.tile.stages, job.begin), job.end)
        def _(j, name=name):
            plgpu.barrier_wait(job.sm[name].at[job.slot(j)])


def _first_seen(job: _Job) -> Any:
    """The start of the window of the sequence's first token; it may be negative."""
    return job.start - job.tile.window + 1 if job.tile.window else jnp.int32(0)


def _clean(job: _Job, j) -> Any:
    """True where some token of the sequence may see each key of block ``j``."""
    at = j * job.tile.block
    return (at + job.tile.block <= job.length) & (at >= _first_seen(job))


def _wipe(job: _Job, j, slot) -> None:
    """Zero the values of block ``j`` that no token of the sequence may see."""
    for c in range(0, job.tile.H, M):
        v = job.sm["v"].at[slot, :, pl.ds(c, M)]
        flash.blank(v, j * job.tile.block, _first_seen(job), job.length)


def _scales_seen(job: _Job, scales, j) -> Any:
    """Of keys or values of block ``j``, zero where no token of the sequence may see them."""
    at = j * job.tile.block
    return flash.seen_scales(scales, at, _first_seen(job), job.length)


def _of_keys(job: _Job, slot, _) -> Any:
    """The factor of each key of a block."""
    return flash.by_column(job.sm["k_scale"].at[slot])


def _load_values(job: _Job, values, ids, j, slot) -> None:
    """Copy a block of values. One that holds what no token of the sequence may see is cleaned
    before anyone is told that it is here."""
    tile, sm, clean = job.tile, job.sm, _clean(job, j)
    to, here = sm["v"].at[slot], sm["v_here"].at[slot]

    @pl.when(clean)
    def _():
        flash.copy_block(ids, values, job.head, j, to, here, tile.Z, tile.block)

    @pl.when(jnp.logical_not(clean))
    def _():
        flash.copy_block(ids, values, job.head, j, to, sm["unclean"], tile.Z, tile.block)
        plgpu.barrier_wait(sm["unclean"])
        _wipe(job, j, slot)
        for _ in ids:
            plgpu.barrier_arrive(here)


def _take_turn(job: _Job) -> None:
    """Wait until the other warpgroup comes here too."""
    plgpu.barrier_arrive(job.sm["turn"])
    plgpu.barrier_wait(job.sm["turn"])


def _compute(job: _Job, wg, sinks) -> Any:
    """float32[64, H]: the finished output of this warpgroup's rows."""
    tile, block = job.tile, jnp.int32(job.tile.block)
    skip = job.skip + wg * M
    first = job.start + lax.div(skip, jnp.int32(tile.G))
    last = jnp.minimum(job.start + lax.div(skip + M - 1, jnp.int32(tile.G)), job.length - 1)
    high_plain = jnp.clip(
        lax.div(jnp.minimum(first, job.length - 1) + 1, block), job.begin, job.end
    )
    low_plain = job.begin
    if tile.window:
        below = jnp.maximum(last - tile.window + tile.block, 0)
        low_plain = jnp.clip(lax.div(below, block), job.begin, high_plain)
    step = partial(_block, job, wg, skip)
    plain = partial(step, masked=False)
    masked = partial(step, masked=True)
    plgpu.barrier_wait(job.sm["q_here"].at[wg])
    if tile.ping_pong:
        pl.when(wg == 1)(lambda: _take_turn(job))
    sums = flash.no_sums(tile.H)
    if tile.window:
        sums = lax.fori_loop(job.begin, low_plain, masked, sums)
    if tile.ahead:
        sums = _plain_ahead(job, wg, low_plain, high_plain, sums)
    else:
        sums = lax.fori_loop(low_plain, high_plain, plain, sums)
    sums = lax.fori_loop(high_plain, job.end, masked, sums)
    if tile.ping_pong:
        pl.when(wg == 0)(lambda: _take_turn(job))
    return _finish(job, sums, skip, sinks)


def _block(job: _Job, wg, skip, j, sums: Sums, *, masked: bool) -> Sums:
    """Add block ``j`` of the sequence."""
    tile, sm, slot = job.tile, job.sm, job.slot(j)
    at = j * tile.block
    plgpu.barrier_wait(sm["k_here"].at[slot])
    turn = partial(_take_turn, job) if tile.ping_pong else None
    of_keys = partial(_of_keys, job, slot) if tile.scaled else None
    x = flash.scores(sm["q_in"].at[wg], sm["k"].at[slot], tile.scale, tile.soft_cap, turn, of_keys)
    plgpu.barrier_arrive(sm["k_free"].at[slot])
    if masked:

        def position(row):
            return lax.div(row + skip, jnp.int32(tile.G)) + job.start

        def low(row):
            return position(row) - (tile.window - 1)

        x = flash.mask(x, at, position, job.length, low if tile.window else None, None)
    return _add(job, wg, x, j, sums)


def _add(job: _Job, wg, x, j, sums: Sums) -> Sums:
    """Add the values of block ``j``, whose scores are ``x``."""
    tile, sm, slot = job.tile, job.sm, job.slot(j)
    p, keep, m, total = flash.weights(x, sums)
    if tile.ping_pong:
        plgpu.barrier_arrive(sm["turn"])
    plgpu.barrier_wait(sm["v_here"].at[slot])
    if tile.ping_pong:
        plgpu.barrier_wait(sm["turn"])
    if tile.scaled:
        p = p * flash.along_columns(flash.by_column(sm["v_scale"].at[slot]), p)
    room = None if tile.register_p else sm["p"].at[wg]
    o = flash.weigh(p, sums.o, keep, sm["v"].at[slot], room)
    plgpu.barrier_arrive(sm["v_free"].at[slot])
    return Sums(o, m, total)


def _plain_ahead(job: _Job, wg, low, high, sums: Sums) -> Sums:
    """Add blocks ``low`` .. ``high`` - 1, each while the scores of the one after it are under way."""
    tile, sm = job.tile, job.sm

    def scores(j, during):
        slot = job.slot(j)
        plgpu.barrier_wait(sm["k_here"].at[slot])
        k = sm["k"].at[slot]
        of_keys = partial(_of_keys, job, slot) if tile.scaled else None
        found = flash.scores_while(sm["q_in"].at[wg], k, tile.scale, tile.soft_cap, during, of_keys)
        plgpu.barrier_arrive(sm["k_free"].at[slot])
        return found

    def block(j, carry):
        x, sums = carry
        return scores(j + 1, partial(_add, job, wg, x, j, sums))

    def some(sums):
        x, _ = scores(low, lambda: None)
        x, sums = lax.fori_loop(low, high - 1, block, (x, sums))
        return _add(job, wg, x, high - 1, sums)

    return lax.cond(high > low, some, lambda sums: sums, sums)


def _finish(job: _Job, sums: Sums, skip, sinks) -> Any:
    """Divide by the sum of weights, to which a sink adds its own."""
    total, o = sums.total, sums.o
    if sinks is not None:
        row = plgpu.broadcasted_iota(jnp.int32, (M, M), 0, layout=flash.WGMMA) + skip
        group = lax.rem(row, jnp.int32(job.tile.G))
        sunk = jnp.full((M, M), flash.MASKED, jnp.float32)
        for g in range(job.tile.G):
            sunk = jnp.where(group == g, sinks[job.head, g], sunk)
        sunk = sunk.max(axis=1)
        top = jnp.maximum(sums.top, sunk)
        keep = jnp.exp2(sums.top - top)
        total = total * keep + jnp.exp2(sunk - top)
        o = o * along_rows(keep, o)
    return o / along_rows(total, o)


def _write(job: _Job, out, o, wg) -> None:
    """Write this warpgroup's 64 rows to the tile's place, rows of no token included."""
    room = job.sm["o_out"].at[wg]
    rows = pl.ds(job.place * ROWS_OF_TILE + wg * M, M)
    for c in range(0, job.tile.H, OUT_COLUMNS):
        room[...] = o[:, c : c + OUT_COLUMNS].astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(room, out.at[job.head, rows, pl.ds(c, OUT_COLUMNS)])
        plgpu.wait_smem_to_gmem(0)
