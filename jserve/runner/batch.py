"""StepPlan -> StepBatch: one packed int32 buffer, filled through named numpy views.

Owns the host side of ``jserve.model.view.layout``: which number goes where, and the range check of every index,
because JAX clamps a bad index to a wrong answer. Must not know a scheduler, nor run anything on a device.

What a sequence never changes (temperature, seed, stop ids ...) is kept per slot and gathered by slot; only starts,
counts, pages and the tokens of prefill rows are written per step. The buffer of a bucket is reused and copied out,
for a transfer may alias the copy::

    rows     decode 0 .. n_decode-1 | unused .. D-1 | prefill D .. D+n_prefill-1 | unused
    slot_R      s0 s1 s2                 C              s7 s9                        C
    start_R     -1 -1 -1  (device reads its slots; the backend's plan sees the upper bounds first)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jserve.model.view import (
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    MIN_TOKENS,
    N_STOP_IDS,
    PENALTY,
    RANDOM,
    TRUNCATE,
    Bucket,
    Field,
    StepDims,
    buffer_size,
    numpy_views,
)
from jserve.runner.buckets import Ladder, Needs
from jserve.types import GREEDY_TEMPERATURE, RowPlan, SamplingParams, Sequence, StepPlan

FieldsOf = Callable[[Bucket], tuple[Field, ...]]
PlanAttention = Callable[[Mapping[str, np.ndarray], Bucket, StepDims], None]

_STATIC = (
    "uses_R",
    "temperature_R",
    "top_p_R",
    "min_p_R",
    "repetition_R",
    "presence_R",
    "frequency_R",
    "top_k_R",
    "min_pos_R",
    "seed_R2",
    "stop_RS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A bucket and its packed buffer, fresh: nobody writes to it again."""

    bucket: Bucket
    buf: np.ndarray
    flags: int
    """OR of the rows' flag bits."""
    n_decode: int


@dataclass(slots=True)
class _Slate:
    """The reused buffer of one bucket."""

    buf: np.ndarray
    views: dict[str, np.ndarray]
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
        self._slates: dict[Bucket, _Slate] = {}
        self._owner: list[Sequence | None] = [None] * dims.C
        self._static = _static_rows(dims.C)

    def pack(self, plan: StepPlan, bucket: Bucket | None = None) -> StepBatch:
        """The plan's buffer, in the cheapest bucket that takes it (or the one given).

        Raises:
            ValueError: an index out of range, or a plan that no bucket takes: a fault of the scheduler.
        """
        needs = Needs.of(plan)
        bucket = bucket or self.ladder.choose(needs)
        if not needs.fit(bucket):
            raise ValueError(f"{bucket} does not take {needs}")
        slate = self._slate(bucket)
        views, n = slate.views, needs.D
        self._clear(slate, bucket)
        slots = np.array([row.slot for row in plan.rows], np.intp)
        starts = np.array([row.start for row in plan.rows], np.int32)
        counts = np.array([row.count for row in plan.rows], np.int32)
        self._check(plan, slots, starts, counts)
        self._learn(plan.rows)
        for rows, part in ((slice(0, n), slice(0, n)), (slice(n, None), _prefill(bucket, needs))):
            views["slot_R"][part] = slots[rows]
            views["start_R"][part] = starts[rows]
            views["count_R"][part] = counts[rows]
            for name in _STATIC:
                views[name][part] = self._static[name][slots[rows]]
        views["emit_R"][:n] = 1
        self._pages(slate, plan, bucket, needs)
        _decode_tokens(views, plan.rows[:n], counts[:n], bucket, self.dims.V)
        _prefill_tokens(views, plan.rows[n:], bucket, self.dims.V)
        if bucket.mask:
            _masks(views, plan.rows, n, bucket)
        if bucket.lora:
            _adapters(views, plan.rows, n, bucket)
        flags = int(np.bitwise_or.reduce(self._static["uses_R"][slots])) if len(slots) else 0
        views["flags"][...], views["n_decode"][...], views["n_prefill"][...] = flags, n, needs.F
        self._plan_attention(views, bucket, self.dims)
        views["start_R"][:n] = -1
        return StepBatch(bucket=bucket, buf=slate.buf.copy(), flags=flags, n_decode=n)

    def forget(self) -> None:
        """Drop what is remembered of the slots."""
        self._owner = [None] * self.dims.C

    def _slate(self, bucket: Bucket) -> _Slate:
        slate = self._slates.get(bucket)
        if slate is None:
            fields = self._fields_of(bucket)
            buf = np.zeros(buffer_size(fields), np.int32)
            slate = self._slates[bucket] = _Slate(buf, numpy_views(buf, fields))
            slate.views["temperature_R"][...] = 1.0
        return slate

    def _clear(self, slate: _Slate, bucket: Bucket) -> None:
        views = slate.views
        views["row_T"][...] = bucket.R
        views["slot_R"][...] = self.dims.C
        views["count_R"][...] = 0
        views["start_R"][...] = 0
        views["emit_R"][...] = 0
        if bucket.score:
            views["target_T"][...] = -1
        views["first_R"][: bucket.D] = np.arange(0, bucket.D * bucket.J, bucket.J)
        views["first_R"][bucket.D :] = 0

    def _check(
        self, plan: StepPlan, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> None:
        dims, table = self.dims, plan.page_table_RM
        if not len(slots):
            return
        _in_range("slot", slots, 0, dims.C - 1)
        _in_range("start", starts, 0, dims.M * dims.Z - 1)
        _in_range("count", counts, 1, dims.M * dims.Z)
        _in_range("start + count", starts + counts, 1, dims.M * dims.Z)
        if table.shape[0] != len(slots) or table.shape[1] > dims.M:
            raise ValueError(f"page table {table.shape} for {len(slots)} rows of {dims.M} pages")
        if table.size:
            _in_range("page", table, 0, self.n_pages - 1)
        _in_range("start + count", starts + counts, 1, table.shape[1] * dims.Z)

    def _learn(self, rows: tuple[RowPlan, ...]) -> None:
        owner = self._owner
        for row in rows:
            if owner[row.slot] is not row.seq:
                owner[row.slot] = row.seq
                _fill_static(self._static, row.slot, row.seq)

    def _pages(self, slate: _Slate, plan: StepPlan, bucket: Bucket, needs: Needs) -> None:
        table, out = plan.page_table_RM, slate.views["page_table_RM"]
        n, width = needs.D, table.shape[1]
        out[:n, :width] = table[:n]
        out[_prefill(bucket, needs), :width] = table[n:]
        if width < slate.width:
            out[:, width : slate.width] = 0
        slate.width = width


def _prefill(bucket: Bucket, needs: Needs) -> slice:
    return slice(bucket.D, bucket.D + needs.F)


def _static_rows(C: int) -> dict[str, np.ndarray]:
    floats = {"temperature_R", "top_p_R", "min_p_R", "repetition_R", "presence_R", "frequency_R"}
    shapes = {"seed_R2": (C, 2), "stop_RS": (C, N_STOP_IDS)}
    return {
        name: np.zeros(shapes.get(name, (C,)), np.float32 if name in floats else np.int32)
        for name in _STATIC
    }


def _fill_static(static: dict[str, np.ndarray], slot: int, seq: Sequence) -> None:
    params = seq.request.params
    static["uses_R"][slot] = uses(params)
    static["temperature_R"][slot] = 0.0 if params.greedy else params.temperature
    static["top_p_R"][slot] = params.top_p
    static["min_p_R"][slot] = params.min_p
    static["repetition_R"][slot] = params.repetition_penalty
    static["presence_R"][slot] = params.presence_penalty
    static["frequency_R"][slot] = params.frequency_penalty
    static["top_k_R"][slot] = max(params.top_k, 0)
    static["min_pos_R"][slot] = min(seq.n_prompt + params.min_tokens, 2**31 - 1)
    static["seed_R2"][slot] = np.array([seq.seed], np.int64).view(np.int32)
    stops = [*seq.request.eos_ids, *params.stop_token_ids]
    if len(stops) > N_STOP_IDS:
        raise ValueError(f"stop ids and eos ids together exceed {N_STOP_IDS}: {len(stops)}")
    static["stop_RS"][slot] = -1
    static["stop_RS"][slot, : len(stops)] = stops


def uses(params: SamplingParams) -> int:
    """The flag bits of ``jserve.model.view`` that these parameters need."""
    random = params.temperature >= GREEDY_TEMPERATURE
    truncates = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    lengths = {len(word) for word in params.bad_token_ids}
    biased = bool(params.logit_bias) or params.allowed_token_ids is not None or 1 in lengths
    return (
        RANDOM * random
        | TRUNCATE * (random and truncates)
        | PENALTY * params.penalised
        | BIAS * biased
        | BAD_WORDS * bool(lengths - {1})
        | LOGPROBS * (params.logprobs is not None)
        | MIN_TOKENS * (params.min_tokens > 0)
    )


def _in_range(name: str, values: np.ndarray, low: int, high: int) -> None:
    if values.min() < low or values.max() > high:
        raise ValueError(
            f"{name} out of range [{low}, {high}]: {int(values.min())} .. {int(values.max())}"
        )


def _decode_tokens(
    views: dict[str, np.ndarray],
    rows: tuple[RowPlan, ...],
    counts: np.ndarray,
    bucket: Bucket,
    V: int,
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
    row_DJ[...] = np.where(np.arange(J) < counts[:, None], row_DJ[:, :1], bucket.R)
    for r, row in enumerate(rows):
        if len(row.drafts) != row.count - 1:
            raise ValueError(f"row {r} has count {row.count} and {len(row.drafts)} drafts")
        tok_DJ[r, 1 : row.count] = row.drafts
        tok_DJ[r, row.count :] = 0
    _in_range("draft", tok_DJ[:, 1:], 0, V - 1)


def _prefill_tokens(
    views: dict[str, np.ndarray], rows: tuple[RowPlan, ...], bucket: Bucket, V: int
) -> None:
    at = bucket.D * bucket.J
    for i, row in enumerate(rows):
        r, part = bucket.D + i, slice(at, at + row.count)
        if row.from_slot or len(row.tokens) != row.count:
            raise ValueError(f"row {i} of prefill: {len(row.tokens)} tokens, count {row.count}")
        tokens = np.asarray(row.tokens, np.int32)
        _in_range("token id", tokens, 0, V - 1)
        views["tok_T"][part] = tokens
        views["row_T"][part] = r
        views["first_R"][r] = at
        views["emit_R"][r] = row.emits
        if row.score:
            targets = score_targets(row)
            views["target_T"][at : at + len(targets)] = targets
        at += row.count


def score_targets(row: RowPlan) -> list[int]:
    """The prompt tokens that follow the row's tokens; fewer than ``count`` at the prompt's end."""
    seq = row.seq
    return seq.tokens[row.start + 1 : min(row.start + row.count + 1, seq.n_prompt)]


def _masks(
    views: dict[str, np.ndarray], rows: tuple[RowPlan, ...], n_decode: int, bucket: Bucket
) -> None:
    views["mask_RJW"][...] = -1
    for i, row in enumerate(rows):
        if row.mask is not None:
            r = i if i < n_decode else bucket.D + i - n_decode
            views["mask_RJW"][r, : len(row.mask)] = row.mask


def _adapters(
    views: dict[str, np.ndarray], rows: tuple[RowPlan, ...], n_decode: int, bucket: Bucket
) -> None:
    views["adapter_R"][...] = 0
    for i, row in enumerate(rows):
        views["adapter_R"][i if i < n_decode else bucket.D + i - n_decode] = row.adapter
