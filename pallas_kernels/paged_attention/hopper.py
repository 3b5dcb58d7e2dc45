"""Paged decode attention for Hopper in Mosaic GPU: TMA, wgmma, a warpgroup that loads and one that
computes, split-KV over a work list made of true lengths.

It owns the first kernel and the work list. All visible key blocks of all rows lie on one line; a kv head's S blocks
of the grid ("splits") each take an equal run of it, whatever row it belongs to::

    rows        |r0        |r1 |r2                        |r3  |      cum_D1 marks the borders
    splits      |s0     |s1     |s2     |s3     |s4     |s5    |      ``per`` blocks each
    partials     0       1,2     3   4   5       6 ...                slot = row + split, unique

so a row that lies in splits a..b has its partial sums in slots row+a .. row+b, neighbours, and the
second kernel (``combine``) adds them up. A 64-row tile of the matrix unit holds the J tokens of a row times the G
query heads of the kv head (row j * G + g), several tiles if they are more than 64.

Idea of splitting keys: Flash-Decoding (Dao and others, 2023).
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
from pallas_kernels.paged_attention.tree import MAX_PLACES, Tree
from pallas_kernels.registers import set_compute, set_load
from pallas_kernels.spec import Pages, Rows

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

OUT_COLUMNS = 32
"""Columns of the output that pass through shared memory at once."""
EARLY_COPIES = 4
"""Up to so many page ids a block are read one block ahead; more would need registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Everything static about one call. ``block`` keys are scored at once, ``stages`` of them are
    in flight; ``splits`` teams share a kv head's keys. A block of the grid holds ``teams`` of them
    (1 or 2) that know nothing of each other: they work on neighbouring kv heads if those are even
    in number, else on neighbouring splits."""

    J: int
    G: int
    K: int
    H: int
    Z: int
    block: int
    stages: int
    splits: int
    split_blocks: int
    """Fewest blocks of a split: below, adding up what the splits left would take longer than they save."""
    teams: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    tree: Tree | None = None
    """The visibility of the newest keys for the J tokens; None: they are a chain."""
    widens: bool = False
    """KV has 8 bits: the warpgroup that computes makes the 16-bit values that are multiplied."""
    scaled: bool = False
    """These are int8, with a scale for each key and value."""
    register_p: bool = True
    """Weights stay in registers and sums in the accumulator. The interpreter knows only the other
    way, through shared memory and a fresh accumulator."""

    @property
    def base(self) -> int:
        """The start of the tree's places, counted from the first of the tokens."""
        return -self.tree.n_before if self.tree else 0

    @property
    def common(self) -> int:
        """Keys from the first of the tokens that all of them see."""
        return self.base + self.tree.common if self.tree else 1

    @property
    def q_rows(self) -> int:
        """Rows of queries of one kv head, padded: a multiple of 8, of 64 above 64."""
        return padded_rows(self.J * self.G)

    @property
    def tile_rows(self) -> int:
        return min(self.q_rows, M)

    @property
    def tiles(self) -> int:
        return self.q_rows // self.tile_rows

    @property
    def copies(self) -> int:
        """Of a block of keys: one a page, or one in all."""
        return self.block // flash.page_rows(self.Z, self.block)

    @property
    def arrivals(self) -> int:
        """Copies of a block of keys, those of its scales included."""
        return self.copies * (2 if self.scaled else 1)

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.K * self.G

    @property
    def partial_rows(self) -> int:
        """Rows of one slot of partial sums: those of each kv head, of which J * G are used."""
        return self.K * self.q_rows

    def partial_row(self, token: Any, head: Any) -> Any:
        """The row in which a slot has the sums of a query."""
        kv_head, member = lax.div(head, jnp.int32(self.G)), lax.rem(head, jnp.int32(self.G))
        return kv_head * self.q_rows + token * self.G + member

    @property
    def chunk(self) -> int:
        """Columns of the output that are accumulated and written together."""
        return min(self.H, 128)

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a team that compute (one more loads). Each has its own columns of the
        output; all score all keys."""
        return self.H // self.chunk

    @property
    def team_heads(self) -> bool:
        """True where the teams of a block differ in the kv head, not in the split."""
        return self.teams > 1 and self.K % self.teams == 0

    @property
    def grid(self) -> tuple[int, int, int]:
        if self.team_heads:
            return (self.splits, self.K // self.teams, self.tiles)
        return (self.splits // self.teams, self.K, self.tiles)

    @property
    def q_stages(self) -> int:
        """Queries of this many segments lie in shared memory."""
        narrow = 64 if self.widens else 128
        return 2 if narrow >= self.H else 1


def padded_rows(n: int) -> int:
    """Rows that a tile or several have for ``n`` queries."""
    return -(-n // 8) * 8 if n <= M else -(-n // M) * M


class Work(NamedTuple):
    """The work list on the device, int32. ``first_D`` is the first visible block of each row."""

    cum_E: jax.Array
    first_D: jax.Array
    row0_S: jax.Array
    row1_S: jax.Array
    per_1: jax.Array


def plan(rows: Rows, tile: Tile) -> Work:
    """Share the visible blocks of all rows out to the splits. A row of length 0 has none."""
    start_D, len_D = rows
    reach_D = start_D + (tile.base - tile.window + 1)
    low_D = jnp.maximum(reach_D, 0) if tile.window else jnp.zeros_like(len_D)
    first_D = low_D // tile.block
    n_D = jnp.where(len_D > 0, -(-len_D // tile.block) - first_D, 0)
    end_D = jnp.cumsum(n_D)
    per = jnp.maximum(-(-end_D[-1] // tile.splits), tile.split_blocks)
    begin_S = jnp.arange(tile.splits, dtype=jnp.int32) * per
    last_S = jnp.minimum(begin_S + per, end_D[-1]) - 1
    row0_S = (end_D[None] <= begin_S[:, None]).sum(1, dtype=jnp.int32)
    row1_S = (end_D[None] <= last_S[:, None]).sum(1, dtype=jnp.int32) + 1
    row1_S = jnp.where(last_S >= begin_S, row1_S, row0_S)
    cum_E = jnp.concatenate([jnp.zeros(1, jnp.int32), end_D])
    return Work(cum_E, first_D, row0_S, row1_S, per[None])


def attend(
    q_DKQH: jax.Array,
    pages: Pages,
    rows: Rows,
    work: Work,
    tile: Tile,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Partial sums of every slot: weighted means of values, float32[D + S, partial_rows, H], and log2 of
    the sums of weights behind them, float32[D + S, partial_rows]. Slots that no row uses are not
    written."""
    slots = rows.len_D.shape[0] + tile.splits
    row = jax.ShapeDtypeStruct((slots, tile.partial_rows), jnp.float32)
    sums = jax.ShapeDtypeStruct((slots, tile.partial_rows, tile.H), jnp.float32)
    return plgpu.kernel(
        partial(_attend, tile=tile),
        out_type=(sums, row),
        grid=tile.grid,
        grid_names=("s", "h", "t"),
        num_threads=tile.teams * (tile.warpgroups + 1),
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(tile, q_DKQH.dtype, pages.keys_PKZH.dtype),
    )(q_DKQH, *pages, *rows, *work)


def _scratch(tile: Tile, dtype: Any, kv_dtype: Any) -> dict[str, Any]:
    room = partial(swizzled, dtype=dtype)
    teams = tile.teams
    ring = swizzled(teams, tile.stages, tile.block, tile.H, dtype=kv_dtype)
    scratch = {
        "q_in": room(teams, tile.q_stages, M, tile.H),
        "k": ring,
        "v": ring,
        "o_out": swizzled(teams, tile.warpgroups, M, OUT_COLUMNS, dtype=jnp.float32),
        "log_out": plgpu.SMEM((teams, M), jnp.float32),
        "q_here": plgpu.Barrier(num_barriers=teams * tile.q_stages),
        "q_free": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=teams * tile.q_stages),
        "k_here": plgpu.Barrier(num_arrivals=tile.arrivals, num_barriers=teams * tile.stages),
        "v_here": plgpu.Barrier(num_arrivals=tile.arrivals, num_barriers=teams * tile.stages),
        "free": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=teams * tile.stages),
    }
    for name in ("k_wide", "v_wide") if tile.widens else ():
        scratch[name] = room(teams, tile.block, tile.H)
    for name in ("k_scale", "v_scale") if tile.scaled else ():
        scratch[name] = plgpu.SMEM((teams, tile.stages, tile.block), jnp.float32)
    if not tile.register_p:
        scratch["p"] = room(teams, tile.warpgroups, M, tile.block)
    return scratch


class _Team(NamedTuple):
    """A team's own values: its place in the grid and its part of the shared memory."""

    tile: Tile
    sm: dict[str, Any]
    index: Any
    split: Any
    head: Any
    m_tile: Any
    low: Any
    """First block of its run on the common line."""

    def room(self, name: str) -> Any:
        return self.sm[name].at[self.index]

    def barrier(self, name: str, slot: Any) -> Any:
        n = self.tile.q_stages if name.startswith("q") else self.tile.stages
        return self.sm[name].at[self.index * n + slot]

    def slot(self, i: Any) -> Any:
        return lax.rem(i - self.low, jnp.int32(self.tile.stages))


def _team(tile: Tile, index, per, sm) -> _Team:
    split, head = lax.axis_index("s"), lax.axis_index("h")
    if tile.team_heads:
        head = head * tile.teams + index
    else:
        split = split * tile.teams + index
    return _Team(tile, sm, index, split, head, lax.axis_index("t"), split * per)


class _Segment(NamedTuple):
    """A run of blocks of one row within one split: ``begin`` .. ``end`` count from the row's first
    visible block 0 on the common line, ``base`` turns them into blocks of the row."""

    row: Any
    begin: Any
    end: Any
    base: Any


def _attend(q, keys, values, table, k_scales, v_scales, start, length, *work_and_out, tile, **sm):
    """The kernel: one block of the grid."""
    cum, first, row0, row1, per, o, log_total = work_and_out
    pools = (("k", keys, k_scales), ("v", values, v_scales))
    wg = lax.axis_index("wg")
    n_compute = tile.teams * tile.warpgroups

    def segments(team: _Team, use):
        """``use(segment, n)`` each segment that holds blocks, the ``n``-th of this team; the number
        of them."""

        def row(r, n):
            begin = jnp.maximum(cum[r], team.low)
            end = jnp.minimum(cum[r + 1], team.low + per[0])

            @pl.when(end > begin)
            def _():
                use(_Segment(r, begin, end, first[r] - cum[r]), n)

            return jnp.where(end > begin, n + 1, n)

        return lax.fori_loop(row0[team.split], row1[team.split], row, jnp.int32(0))

    @pl.when(wg < n_compute)
    def _():
        _set_registers(tile, compute=True)
        team = _team(tile, lax.div(wg, jnp.int32(tile.warpgroups)), per[0], sm)
        part = lax.rem(wg, jnp.int32(tile.warpgroups))

        def compute(seg: _Segment, n) -> None:
            sums = _compute(team, start[seg.row], length[seg.row], seg, n, part)
            _write(team, (o, log_total), sums, seg.row, part)

        segments(team, compute)

    @pl.when(wg >= n_compute)
    def _():
        _set_registers(tile, compute=False)
        team = _team(tile, wg - n_compute, per[0], sm)

        def load(seg: _Segment, n) -> None:
            _load_q(team, q.at[seg.row, team.head, pl.ds(team.m_tile * M, tile.tile_rows)], n)
            _load(team, pools, table, length[seg.row], seg)

        n = segments(team, load)
        n_blocks = jnp.clip(cum[table.shape[0]] - team.low, 0, per[0])
        _drain(team, "q_free", n, tile.q_stages)
        _drain(team, "free", n_blocks, tile.stages)


def _drain(team: _Team, name: str, n, stages: int) -> None:
    """Wait for the last uses of a ring of ``n`` in all, so that every phase is observed."""

    @pl.loop(jnp.maximum(n - stages, 0), n)
    def _(i):
        plgpu.barrier_wait(team.barrier(name, lax.rem(i, jnp.int32(stages))))


def _load_budget(tile: Tile) -> int:
    """Registers per thread of a warpgroup that loads: it holds the page ids of a block, and of the next."""
    return 24 if tile.teams == 1 and tile.copies <= 2 else 40


def _set_registers(tile: Tile, *, compute: bool) -> None:
    """Move registers from the warpgroups that load to those that compute, where they are short."""
    n_compute = tile.teams * tile.warpgroups
    if n_compute + tile.teams <= 2:
        return
    if compute:
        set_compute(n_compute, tile.teams, _load_budget(tile))
    else:
        set_load(_load_budget(tile))


def _load_q(team: _Team, q, n) -> None:
    slot = lax.rem(n, jnp.int32(team.tile.q_stages))

    @pl.when(n >= team.tile.q_stages)
    def _():
        plgpu.barrier_wait(team.barrier("q_free", slot))

    to = team.room("q_in").at[slot, pl.ds(0, team.tile.tile_rows)]
    plgpu.copy_gmem_to_smem(q, to, team.barrier("q_here", slot))


def _load(team: _Team, pools, table, length, seg: _Segment) -> None:
    """Copy the segment's blocks, ``stages`` ahead of the computation. Page ids are read one block
    ahead of their use where registers suffice; those past the row's end repeat its last page (masked
    later)."""
    tile = team.tile
    early = tile.copies <= EARLY_COPIES
    last = lax.div(length - 1, jnp.int32(tile.Z))

    def pages(i):
        return flash.page_ids(table, seg.row, i + seg.base, last, tile.Z, tile.block)

    def block(i, ids):
        slot = team.slot(i)
        following = pages(jnp.minimum(i + 1, seg.end - 1)) if early else ()
        ids = ids or pages(i)

        @pl.when(i - team.low >= tile.stages)
        def _():
            plgpu.barrier_wait(team.barrier("free", slot))

        for name, pool, scales in pools:
            to, here = team.room(name).at[slot], team.barrier(f"{name}_here", slot)
            flash.copy_block(ids, pool, team.head, i + seg.base, to, here, tile.Z, tile.block)
            if tile.scaled:
                to = team.room(f"{name}_scale").at[slot]
                flash.copy_block(ids, scales, team.head, i + seg.base, to, here, tile.Z, tile.block)
        return following

    lax.fori_loop(seg.begin, seg.end, block, pages(seg.begin) if early else ())


def _compute(team: _Team, start, length, seg: _Segment, n, part) -> Sums:
    """The segment's softmax sums over the columns of this warpgroup."""
    slot = lax.rem(n, jnp.int32(team.tile.q_stages))
    plgpu.barrier_wait(team.barrier("q_here", slot))
    sums = _blocks(team, team.room("q_in").at[slot], start, length, seg, part)
    plgpu.barrier_arrive(team.barrier("q_free", slot))
    return sums


def _blocks(team: _Team, q, start, length, seg: _Segment, part) -> Sums:
    tile = team.tile
    step = partial(_block, team, q, start, length, seg.base, part)
    plain = partial(step, masked=False)
    masked = partial(step, masked=True)
    # Only the blocks at the ends of what the row sees need masks.
    high_plain = lax.div(start + tile.common, jnp.int32(tile.block)) - seg.base
    high_plain = jnp.clip(high_plain, seg.begin, seg.end)
    low_plain = seg.begin
    if tile.window:
        below = jnp.maximum(length - 1 - tile.window + tile.block, 0)
        low_plain = lax.div(below, jnp.int32(tile.block)) - seg.base
        low_plain = jnp.clip(low_plain, seg.begin, high_plain)
    sums = flash.no_sums(tile.chunk)
    if tile.window:
        sums = lax.fori_loop(seg.begin, low_plain, masked, sums)
    sums = lax.fori_loop(low_plain, high_plain, plain, sums)
    return lax.fori_loop(high_plain, seg.end, masked, sums)


def _block(team: _Team, q, start, length, base, part, i, sums: Sums, *, masked: bool) -> Sums:
    """Add block ``i`` of the common line."""
    tile, slot = team.tile, team.slot(i)
    at = (i + base) * tile.block
    _arrived(team, "k", slot)
    low = start + (tile.base - tile.window + 1) if tile.window else 0
    seen = (at, low, length) if masked else None
    issued = partial(_arrived, team, "v", slot) if tile.widens else None
    of_keys = partial(_key_scales, team, slot) if tile.scaled else None
    k = _multiplied(team, "k", slot)
    x = flash.scores(q, k, tile.scale, tile.soft_cap, issued, of_keys)
    if masked:
        x = _mask(team, x, at, start, length)
    p, keep, m, total = flash.weights(x, sums)
    if tile.scaled:
        p = p * flash.along_columns(_value_scales(team, slot, seen), p)
    if not tile.widens:
        _arrived(team, "v", slot)
    v = _multiplied(team, "v", slot).at[:, pl.ds(part * tile.chunk, tile.chunk)]
    if masked and not tile.scaled:
        flash.blank(v, at, low, length)
    room = None if tile.register_p else team.room("p").at[part]
    o = flash.weigh(p, sums.o, keep, v, room)
    if not tile.widens:
        plgpu.barrier_arrive(team.barrier("free", slot))
    return Sums(o, m, total)


def _arrived(team: _Team, name: str, slot: Any) -> None:
    """Wait for a block's keys or values; of 8 bits, make them wider. Once both are, their slot is free, but for
    scales, which ``_value_scales`` reads last."""
    plgpu.barrier_wait(team.barrier(f"{name}_here", slot))
    if team.tile.widens:
        flash.widen(team.room(name).at[slot], team.room(f"{name}_wide"))
        if name == "v" and not team.tile.scaled:
            plgpu.barrier_arrive(team.barrier("free", slot))


def _key_scales(team: _Team, slot: Any, _: Any) -> Any:
    """Of the keys of a block."""
    return flash.by_column(team.room("k_scale").at[slot])


def _value_scales(team: _Team, slot: Any, seen: Any) -> Any:
    """Of the values of a block, zero of those that are not ``seen``, if that says which are. They are read only when
    they are used, since a block's scales in registers beside its scores are more than there are."""
    scales = team.room("v_scale").at[slot]
    found = flash.seen_scales(scales, *seen) if seen else flash.by_column(scales)
    plgpu.commit_smem()  # loads come before the copy that lands here next
    plgpu.barrier_arrive(team.barrier("free", slot))
    return found


def _multiplied(team: _Team, name: str, slot: Any) -> Any:
    """[block, H] in shared memory, as the matrix unit reads it."""
    return team.room(f"{name}_wide") if team.tile.widens else team.room(name).at[slot]


def _mask(team: _Team, x, at, start, length):
    tile = team.tile

    def token(row):
        return lax.div(row + team.m_tile * M, jnp.int32(tile.G))

    def last(row):
        return token(row) + start

    def low(deep):
        return deep + (start + tile.base - tile.window + 1)

    def low_of_token(row):
        return low(token(row))

    def low_of_word(word):
        return low(lax.shift_right_logical(word, MAX_PLACES))

    if tile.tree is None:
        return flash.mask(x, at, last, length, low_of_token if tile.window else None, None)
    words = tile.tree.words(tile.window)
    tree = (start + tile.base, lambda row: flash.by_token(token(row), words))
    return flash.mask(x, at, last, length, low_of_word if tile.window else None, tree)


def _write(team: _Team, out, sums: Sums, row, part) -> None:
    """Write the rows of the tile to the slot of this row and split. A segment has blocks, and so each of
    its rows a total above zero, also one whose keys are all masked."""
    o, log_total = out
    tile, slot = team.tile, row + team.split
    used = pl.ds(0, tile.tile_rows)
    here = pl.ds(team.head * tile.q_rows + team.m_tile * M, tile.tile_rows)
    mean = sums.o * along_rows(1 / sums.total, sums.o)
    room = team.room("o_out").at[part]
    for c in range(0, tile.chunk, OUT_COLUMNS):
        room[...] = mean[:, c : c + OUT_COLUMNS]
        plgpu.commit_smem()
        columns = pl.ds(part * tile.chunk + c, OUT_COLUMNS)
        plgpu.copy_smem_to_gmem(room.at[used], o.at[slot, here, columns])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(part == 0)
    def _():
        team.room("log_out")[...] = sums.top + jnp.log2(sums.total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(team.room("log_out").at[used], log_total.at[slot, here])
        plgpu.wait_smem_to_gmem(0)
