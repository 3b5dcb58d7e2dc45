"""Packs a ``StepPlan`` into a ``StepBatch``: one int32 buffer, filled through named numpy views.

It owns the host side of ``jserve.model.view.layout``: which number goes where, and the range check of every index,
because JAX clamps a bad index to a wrong answer.

What a sequence never changes (temperature, seed, stop ids ...) is kept per slot and gathered by
slot; only starts, counts, pages and the tokens of prefill rows are written per step. The buffer of
a bucket is reused and copied out, for a transfer may alias the copy::

    rows     decode 0 .. n_decode-1 | unused .. D-1 | prefill D .. D+n_prefill-1 | unused
    slot_R      s0 s1 s2                 C              s7 s9                        C
    start_R     -1 -1 -1  (device reads its slots; the backend's plan sees the upper bounds first)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jserve.model.feature import StepFeature, in_range
from jserve.model.group_pages import field_of
from jserve.model.view import (
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    LONG,
    MIN_TOKENS,
    N_STOP_IDS,
    PENALTY,
    RANDOM,
    ROW_WIDTH,
    ROWS,
    TRUNCATE,
    Bucket,
    Field,
    StepDims,
    buffer_size,
    numpy_views,
    row_columns,
)
from jserve.runner.buckets import Ladder, Needs
from jserve.sampling import GREEDY_TEMPERATURE, SamplingParams
from jserve.types import Choice, RowPlan, StepPlan

FieldsOf = Callable[[Bucket], tuple[Field, ...]]
PlanAttention = Callable[[Mapping[str, np.ndarray], Bucket, StepDims], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A bucket and its packed buffer, fresh: nobody writes to it again."""

    bucket: Bucket
    buf: np.ndarray
    flags: int
    """OR of the rows' flag bits."""
    n_decode: int
    features: tuple[StepFeature, ...]
    """Those that a row asks for; the values of the bucket's others stay on the device."""


@dataclass(slots=True)
class _Slate:
    """The reused buffer of one bucket."""

    buf: np.ndarray
    views: dict[str, np.ndarray]
    first_D: np.ndarray
    width: int = 0
    """Page table columns that may be non-zero."""


class Packer:
    """Packs plans. Remembers, per slot, the sampling fields of the sequence that holds it."""

    def __init__(
        self,
        *,
        dims: StepDims,
        n_pages: int,
        ladder: Ladder,
        fields_of: FieldsOf,
        plan_attention: PlanAttention,
    ) -> None:
        self.dims = dims
        self.n_pages = n_pages
        self.ladder = ladder
        self._fields_of = fields_of
        self._plan_attention = plan_attention
        self._features = ladder.features
        self._slates: dict[Bucket, _Slate] = {}
        self._owner: list[Choice | None] = [None] * dims.C
        # One row per slot, in the columns of ``rows_RX``, and one for rows that are not in use.
        self._known_CX = np.zeros((dims.C, ROW_WIDTH), np.int32)
        self._known = row_columns(self._known_CX)
        self._known["slot_R"][...] = np.arange(dims.C)
        self._known["emit_R"][...] = 1
        idle_1X = np.zeros((1, ROW_WIDTH), np.int32)
        idle = row_columns(idle_1X)
        idle["slot_R"][...], idle["temperature_R"][...] = dims.C, 1.0
        self._idle_X = idle_1X[0]

    def pack(self, plan: StepPlan, bucket: Bucket | None = None) -> StepBatch:
        """The plan's buffer, in the cheapest bucket that takes it (or the one given).

        Raises:
            ValueError: an index out of range, or a plan that no bucket takes: a fault of the
            scheduler.
        """
        needs = Needs.of(plan, self._features)
        bucket = bucket or self.ladder.choose(needs)
        if not needs.fit(bucket):
            raise ValueError(f"{bucket} does not take {needs}")
        slate = self._slate(bucket)
        views, n, rows = slate.views, needs.D, plan.rows
        slots = [row.slot for row in rows]
        counts = [row.count for row in rows]
        self._check(plan, slots, counts)
        self._learn(rows)
        self._rows(slate, bucket, n, slots, counts, rows)
        self._pages(slate, plan, bucket, needs)
        views["row_T"][...] = bucket.R
        _decode_tokens(views, rows[:n], counts[:n], bucket, self.dims)
        _prefill_tokens(views, rows[n:], bucket, self.dims.V)
        if "next_F" in views:
            _next_tokens(views, rows[n:], self.dims.V)
        elif any([row.backfill for row in rows[n:]]):
            raise ValueError(f"{bucket} has no drafter to show tokens to")
        for feature in bucket.features:
            at = [*range(n), *range(bucket.D, bucket.D + needs.F)]
            feature.pack(views, rows, at, self.dims)
        flags = int(np.bitwise_or.reduce(views["uses_R"])) & ~LONG
        views["flags"][...], views["n_decode"][...], views["n_prefill"][...] = flags, n, needs.F
        self._plan_attention(views, bucket, self.dims)
        views["start_R"][:n] = -1
        return StepBatch(
            bucket=bucket,
            buf=slate.buf.copy(),
            flags=flags,
            n_decode=n,
            features=needs.features,
        )

    def forget(self) -> None:
        """Drop what is remembered of the slots."""
        self._owner = [None] * self.dims.C

    def _slate(self, bucket: Bucket) -> _Slate:
        slate = self._slates.get(bucket)
        if slate is None:
            fields = self._fields_of(bucket)
            buf = np.zeros(buffer_size(fields), np.int32)
            slate = self._slates[bucket] = _Slate(
                buf, numpy_views(buf, fields), np.arange(bucket.D, dtype=np.int32) * bucket.J
            )
        return slate

    def _rows(
        self,
        slate: _Slate,
        bucket: Bucket,
        n: int,
        slots: list[int],
        counts: list[int],
        rows: tuple[RowPlan, ...],
    ) -> None:
        views = slate.views
        views[ROWS][...] = self._idle_X
        picked_RX = self._known_CX[slots]
        columns = row_columns(picked_RX)
        columns["start_R"][...] = [row.start for row in rows]
        columns["count_R"][...] = counts
        views[ROWS][:n] = picked_RX[:n]
        views[ROWS][bucket.D : bucket.D + len(rows) - n] = picked_RX[n:]
        views["first_R"][: bucket.D] = slate.first_D

    def _check(self, plan: StepPlan, slots: list[int], counts: list[int]) -> None:
        dims, table = self.dims, plan.page_table_RM
        if not slots:
            return
        starts = [row.start for row in plan.rows]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        in_range("slot", slots, 0, dims.C - 1)
        in_range("start", starts, 0, dims.M * dims.Z - 1)
        in_range("count", counts, 1, dims.M * dims.Z)
        if table.shape[0] != len(slots) or table.shape[1] > dims.M:
            raise ValueError(f"page table {table.shape} for {len(slots)} rows of {dims.M} pages")
        in_range("start + count", ends, 1, table.shape[1] * dims.Z)
        if dims.groups is not None:
            self._check_groups(plan, table.shape)
        for pages in plan.group_tables or (table,):
            if int(pages.min()) < 0 or int(pages.max()) >= self.n_pages:
                raise ValueError(f"page out of range [0, {self.n_pages - 1}]")

    def _check_groups(self, plan: StepPlan, shape: tuple[int, ...]) -> None:
        """The tables of groups are those that programs read; ``shape`` of the first group's."""
        assert self.dims.groups is not None
        ns, (first, *others) = [r.n_groups for r in self.dims.groups.reaches], self.dims.columns
        assert first == self.dims.M, "the widest reach has a column for every page"
        expected = [(n, shape[0], w) for n, w in zip(ns, (shape[1], *others), strict=True)]
        if [table.shape for table in plan.group_tables] != expected:
            found = [table.shape for table in plan.group_tables]
            raise ValueError(f"page tables of groups {found}, not {expected}")

    def _learn(self, rows: tuple[RowPlan, ...]) -> None:
        owner = self._owner
        for row in rows:
            if owner[row.slot] is not row.choice:
                owner[row.slot] = row.choice
                _fill(self._known, row.slot, row.choice)

    def _pages(self, slate: _Slate, plan: StepPlan, bucket: Bucket, needs: Needs) -> None:
        if plan.group_tables:
            for i, table in enumerate(plan.group_tables):
                _put_pages(slate.views[field_of(i)], table, bucket, needs, slate.width)
        else:
            out = slate.views["page_table_RM"]
            _put_pages(out, plan.page_table_RM, bucket, needs, slate.width)
        slate.width = plan.page_table_RM.shape[1]


def _put_pages(
    out: np.ndarray, table: np.ndarray, bucket: Bucket, needs: Needs, before: int
) -> None:
    """Page tables [..., rows, columns] of a plan's rows; ``before``: columns that the last plan may have filled."""
    n, width = needs.D, table.shape[-1]
    out[..., :n, :width] = table[..., :n, :]
    out[..., _prefill(bucket, needs), :width] = table[..., n:, :]
    if width < before:
        out[..., width:before] = 0


def _prefill(bucket: Bucket, needs: Needs) -> slice:
    return slice(bucket.D, bucket.D + needs.F)


def _fill(known: dict[str, np.ndarray], slot: int, choice: Choice) -> None:
    params = choice.request.params
    known["uses_R"][slot] = uses(params) | LONG * choice.request.is_long
    known["temperature_R"][slot] = 0.0 if params.greedy else params.temperature
    known["top_p_R"][slot] = params.top_p
    known["min_p_R"][slot] = params.min_p
    known["repetition_R"][slot] = params.repetition_penalty
    known["presence_R"][slot] = params.presence_penalty
    known["frequency_R"][slot] = params.frequency_penalty
    known["top_k_R"][slot] = max(params.top_k, 0)
    known["min_pos_R"][slot] = min(choice.n_prompt + params.min_tokens, 2**31 - 1)
    known["seed_R2"][slot] = np.array([choice.seed], np.int64).view(np.int32)
    stops = [*choice.request.eos_ids, *params.stop_token_ids]
    if len(stops) > N_STOP_IDS:
        raise ValueError(f"stop ids and eos ids together exceed {N_STOP_IDS}: {len(stops)}")
    known["stop_RS"][slot] = -1
    known["stop_RS"][slot, : len(stops)] = stops


def uses(params: SamplingParams) -> int:
    """The flag bits of ``jserve.model.view`` that these parameters need."""
    random = params.temperature >= GREEDY_TEMPERATURE
    truncates = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return (
        RANDOM * random
        | TRUNCATE * (random and truncates)
        | PENALTY * params.penalised
        | BIAS * params.biased
        | BAD_WORDS * params.bans_words
        | LOGPROBS * params.shows_logprobs
        | MIN_TOKENS * (params.min_tokens > 0)
    )


def _decode_tokens(
    views: dict[str, np.ndarray],
    rows: tuple[RowPlan, ...],
    counts: list[int],
    bucket: Bucket,
    dims: StepDims,
) -> None:
    n, J = len(rows), bucket.J
    if not n:
        return
    row_DJ = views["row_T"][: n * J].reshape(n, J)
    tok_DJ = views["tok_T"][: n * J].reshape(n, J)
    tok_DJ[:, 0] = -1
    row_DJ[:, 0] = np.arange(n)
    if J == 1:
        return
    count_D1 = np.asarray(counts)[:, None]
    row_DJ[...] = np.where(np.arange(J) < count_D1, row_DJ[:, :1], bucket.R)
    for r, row in enumerate(rows):
        if len(row.drafts) != row.count - 1:
            raise ValueError(f"row {r} has count {row.count} and {len(row.drafts)} drafts")
        tok_DJ[r, 1 : row.count] = row.drafts
        if row.drafts and row.drafts[0] >= 0:
            in_range("draft", row.drafts, 0, dims.V - 1)
        elif row.drafts:
            in_range("draft of the device", row.drafts, -1, -1)
            in_range("drafts of the device", [len(row.drafts)], 1, dims.drafts)


def _prefill_tokens(
    views: dict[str, np.ndarray], rows: tuple[RowPlan, ...], bucket: Bucket, V: int
) -> None:
    at = bucket.D * bucket.J
    for i, row in enumerate(rows):
        r, part = bucket.D + i, slice(at, at + row.count)
        if row.from_slot or len(row.tokens) != row.count:
            raise ValueError(f"row {i} of prefill: {len(row.tokens)} tokens, count {row.count}")
        in_range("token id", row.tokens, 0, V - 1)
        views["tok_T"][part] = row.tokens
        views["row_T"][part] = r
        views["first_R"][r] = at
        views["emit_R"][r] = row.emits
        at += row.count


def _next_tokens(views: dict[str, np.ndarray], rows: tuple[RowPlan, ...], V: int) -> None:
    """The token after each prefill row that draws none: the drafter waits for it. And which rows are
    for the drafter alone."""
    views["next_F"][...] = views["backfill_F"][...] = 0
    for i, row in enumerate(rows):
        views["backfill_F"][i] = row.backfill
        if not row.emits:
            in_range("next token", (row.next_token,), 0, V - 1)
            views["next_F"][i] = row.next_token
