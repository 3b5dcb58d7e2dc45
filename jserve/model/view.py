"""The packed int32 buffer of a step: its layout, and the ``StepView`` unpacked from it inside jit.

It owns the order, shapes and dtypes of a step's inputs (``layout``) and the device side of reading it
(``unpack``). The runner fills the same layout through numpy views; nothing else knows an offset. Floats travel as
their bits. A field whose bucket feature is off has no bytes and is None in the view.

Token axis of a bucket with D decode rows of J = 1 + drafts tokens, and P prefill tokens of F rows::

    buf  | flags, counts | rows_RX: slot, start ... stop ids | tok_T | row_T | page_table_RM | ... |

    T = D * J + P      |d0 d0 d1 d1 ... |f0 f0 f0 f0 f0 f1 f1 f1 .. pad|
    R = D + F            row r: r*J ...   row D+i: first_R[D+i] ...

Unused rows have ``count == 0`` and slot C (out of range: scatters drop it). Page 0 is scratch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jserve.kv_layout import KVGroups
from jserve.model import group_pages
from jserve.model.draft_tree import DraftMask, TreeShape, mask_of
from jserve.model.feature import StepFeature
from jserve.sampling import MAX_LOGPROBS, MAX_STOP_IDS

# Bits of ``flags``: what any row of the step needs, so that lax.cond can skip the rest.
RANDOM, TRUNCATE, PENALTY, BIAS, BAD_WORDS, LOGPROBS, MIN_TOKENS = (1 << i for i in range(7))
LONG = 1 << 7
"""Of ``uses_R`` alone: the row's text has longrope's long factors (``Request.is_long``)."""

N_STOP_IDS = MAX_STOP_IDS + 8
"""Stop ids of a request and end-of-sequence ids of a model that one row holds."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bucket:
    """The static shape of a step. Choosing one is a function of the plan."""

    D: int
    """Decode (or verify) rows."""
    P: int
    """Prefill tokens."""
    F: int
    """Prefill rows."""
    J: int = 1
    """Tokens of a decode row: one plus its drafts."""
    features: tuple[StepFeature, ...] = ()
    """The features that rows can ask for beside tokens, in order."""
    n_draft: int = 0
    """Drafts that the device drafter leaves in the slot of each emitting row; 0: it is not in the
    program."""
    tree: TreeShape = ()
    """Parents of drafts 1, 2 ... as ``jserve.model.draft_tree`` has them, of those verified and of those
    left; empty: chains."""

    @property
    def T(self) -> int:
        return self.D * self.J + self.P

    @property
    def R(self) -> int:
        return self.D + self.F

    def with_also(self, *features: StepFeature) -> Bucket:
        return replace(self, features=tuple(sorted({*self.features, *features})))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDims:
    """Sizes that are the same for all buckets of an engine."""

    C: int
    M: int
    """Pages of one row: ceil(max_model_len / Z)."""
    Z: int
    V: int
    drafts: int = 0
    """Drafts that a slot holds; 0: there is no device drafter."""
    text: int = 0
    """Newest tokens of its text that a slot holds; 0: nobody reads them."""
    scored: int = MAX_LOGPROBS
    """Most likely tokens that are found beside each prompt token."""
    picks: int = 0
    """Ids that a request may name to have their log-probabilities beside every token's; 0: programs
    have neither these nor the ranks of drawn tokens."""
    n_vocab_rows: int = 0
    """Sequences that can have penalties or biases at once; 0: programs have neither."""
    groups: KVGroups | None = None
    """The groups of layers that pages belong to; None: a page holds its tokens for all layers."""
    columns: tuple[int, ...] = ()
    """Of the page tables of each of ``groups.reaches``; the first has M."""
    states: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    """(name, shape, dtype) of what each slot holds for features."""


@dataclass(frozen=True, slots=True)
class Field:
    """A named part of the buffer. ``per_row`` fields are neighbours and share one matrix, a row of
    it per row of the step: the host fills them with one gather."""

    name: str
    shape: tuple[int, ...]
    is_float: bool = False
    per_row: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


PLACE = (
    Field("slot_R", ()),
    Field("start_R", ()),
    Field("count_R", ()),
    Field("first_R", ()),
    Field("emit_R", ()),
)
SAMPLING = (
    Field("uses_R", ()),
    Field("temperature_R", (), True),
    Field("top_p_R", (), True),
    Field("min_p_R", (), True),
    Field("repetition_R", (), True),
    Field("presence_R", (), True),
    Field("frequency_R", (), True),
    Field("top_k_R", ()),
    Field("seed_R2", (2,)),
    Field("min_pos_R", ()),
    Field("stop_RS", (N_STOP_IDS,)),
)
COLUMNS = (*PLACE, *SAMPLING)
"""The fields of every row, in the order of its matrix row: its place in the sequence, its sampling values."""
ROW_WIDTH = sum(c.size for c in COLUMNS)


def row_columns(matrix_RX: np.ndarray) -> dict[str, np.ndarray]:
    """Named, writable views of an int32[R, ROW_WIDTH] matrix (float columns as float32)."""
    return {
        name: part.view(np.float32) if is_float else part
        for name, is_float, part in _columns(matrix_RX)
    }


def _columns(matrix_RX: Any) -> list[tuple[str, bool, Any]]:
    """(name, is_float, part) of each column of a numpy or jax matrix."""
    parts, at = [], 0
    for c in COLUMNS:
        part = matrix_RX[:, at : at + c.size] if c.shape else matrix_RX[:, at]
        parts.append((c.name, c.is_float, part))
        at += c.size
    return parts


def layout(
    bucket: Bucket, dims: StepDims, attn: Mapping[str, tuple[int, ...]]
) -> tuple[Field, ...]:
    """The fields of the packed buffer in order. ``attn`` are the ints that the attention backend
    plans."""
    T, R = bucket.T, bucket.R
    fields = [
        Field("flags", ()),
        Field("n_decode", ()),
        Field("n_prefill", ()),
        *(Field(c.name, (R, *c.shape), c.is_float, per_row=True) for c in COLUMNS),
        Field("tok_T", (T,)),
        Field("row_T", (T,)),
        *_tables(dims, R),
    ]
    fields += [f for feature in bucket.features for f in feature.fields(bucket, dims)]
    if bucket.n_draft and bucket.F:
        fields += [Field("next_F", (bucket.F,)), Field("backfill_F", (bucket.F,))]
    fields += [Field(f"attn.{name}", shape) for name, shape in sorted(attn.items())]
    return tuple(fields)


def _tables(dims: StepDims, R: int) -> list[Field]:
    """One page table, or those of the groups of each reach."""
    if dims.groups is None:
        return [Field("page_table_RM", (R, dims.M))]
    tables = group_pages.shapes(dims.groups, dims.columns, R)
    return [Field(name, shape) for name, shape in tables.items()]


def buffer_size(fields: tuple[Field, ...]) -> int:
    return sum(f.size for f in fields)


def numpy_views(buf: np.ndarray, fields: tuple[Field, ...]) -> dict[str, np.ndarray]:
    """Named, writable views of one host buffer (float fields as float32)."""
    views: dict[str, np.ndarray] = {}
    for f, at, n, shape in _parts(fields):
        part = buf[at : at + n].reshape(shape)
        if f is None:
            views[ROWS] = part
            views.update(row_columns(part))
        else:
            views[f.name] = part.view(np.float32) if f.is_float else part
    return views


ROWS = "rows_RX"
"""The name of the whole per-row matrix among the numpy views."""


def _parts(fields: tuple[Field, ...]) -> list[tuple[Field | None, int, int, tuple[int, ...]]]:
    """(field, offset, size, shape) in order; the per-row fields are one part, with None for the
    field."""
    parts: list[tuple[Field | None, int, int, tuple[int, ...]]] = []
    at = 0
    for f in fields:
        if not f.per_row:
            parts.append((f, at, f.size, f.shape))
            at += f.size
        elif f.name == COLUMNS[0].name:
            n = f.shape[0] * ROW_WIDTH
            parts.append((None, at, n, (f.shape[0], ROW_WIDTH)))
            at += n
    return parts


@register_dataclass
@dataclass(frozen=True)
class StepView:
    """The packed buffer inside jit: named and shaped, starts and tokens resolved from the slots.

    Token axis entries that are padding have ``pos_T == -1`` and ``row_T == R``.
    """

    flags: jax.Array
    n_decode: jax.Array
    """Decode rows in use; they are rows 0 .. n_decode-1."""
    n_prefill: jax.Array
    """Prefill rows in use; they are rows D .. D+n_prefill-1."""
    tok_T: jax.Array
    row_T: jax.Array
    pos_T: jax.Array
    """int32: absolute position of each token, -1 for padding."""
    write_page_T: jax.Array
    """int32: page that receives the token's KV (0, the scratch page, for padding)."""
    write_off_T: jax.Array
    slot_R: jax.Array
    start_R: jax.Array
    """int32: true position of the row's first token (decode rows: length on the device)."""
    count_R: jax.Array
    first_R: jax.Array
    """int32: index in T of the row's first token."""
    kv_len_R: jax.Array
    """int32: start + count, the context of the row's last token; 0 for an unused row."""
    emit_R: jax.Array
    uses_R: jax.Array
    """int32: the flag bits that this row needs, and ``LONG``."""
    page_table_RM: jax.Array
    temperature_R: jax.Array
    top_p_R: jax.Array
    min_p_R: jax.Array
    repetition_R: jax.Array
    presence_R: jax.Array
    frequency_R: jax.Array
    top_k_R: jax.Array
    seed_R2: jax.Array
    """uint32[R, 2]: low and high word of the sequence's seed."""
    min_pos_R: jax.Array
    """int32: stop ids are banned for tokens drawn at positions below this one."""
    stop_RS: jax.Array
    """int32: EOS and stop ids, padded with -1."""
    extra: dict[str, jax.Array]
    """The fields of the bucket's features, and the rows of their ``StepFeature.state``."""
    next_F: jax.Array | None
    """int32: the known token after each prefill row that does not emit (only where there are drafts to
    be made)."""
    backfill_F: jax.Array | None
    """bool: the target's KV of this prefill row exists already; only the drafter writes its own."""
    attn: dict[str, jax.Array]
    D: int = jax.tree.static()
    P: int = jax.tree.static()
    F: int = jax.tree.static()
    J: int = jax.tree.static()
    tree: DraftMask | None = None
    """The visibility among the tokens of a decode row; None: each sees those before it."""
    groups: tuple[group_pages.GroupPages, ...] = ()
    """Of each group of layers; empty: ``page_table_RM`` and ``write_page_T`` are those of all layers."""
    places: tuple[tuple[int, int], ...] = jax.tree.static(default=())
    """As ``KVGroups.places``."""

    @property
    def long_T(self) -> jax.Array:
        """bool: tokens of rows that are ``LONG``."""
        last = self.uses_R.shape[0] - 1
        return (self.uses_R[jnp.minimum(self.row_T, last)] & LONG) > 0

    def array(self, layer: int) -> int:
        """Number of the pool's array that has the KV of ``layer``."""
        return self.places[layer][1] if self.places else layer

    def of_layer(self, layer: int) -> StepView:
        """The view with the pages of ``layer``."""
        if not self.places:
            return self
        pages = self.groups[self.places[layer][0]]
        return replace(
            self, page_table_RM=pages.table_RM, write_page_T=pages.write_T, groups=(), places=()
        )


def unpack(
    buf: jax.Array, fields: tuple[Field, ...], bucket: Bucket, dims: StepDims, slots: Any
) -> StepView:
    """Read the packed buffer against the slots (``slots.len_C``, ``slots.last_C``: int32[C]; with a
    drafter also ``slots.draft_CJ``)."""
    raw = _fields(buf, fields)
    R, C, Z = bucket.R, dims.C, dims.Z
    slot_R = raw["slot_R"]
    safe_R = jnp.minimum(slot_R, C - 1)
    start_R = jnp.where(raw["start_R"] < 0, slots.len_C[safe_R], raw["start_R"])
    row_T = raw["row_T"]
    real_T = row_T < R
    row = jnp.minimum(row_T, R - 1)
    index_T = jnp.arange(bucket.T, dtype=jnp.int32)
    place_T = jnp.where(real_T, start_R[row] + index_T - raw["first_R"][row], -1)
    pos_T, tree = place_T, None
    asked_T = raw["tok_T"] < 0
    held_T = slots.last_C[safe_R[row]]
    if dims.drafts and bucket.J > 1:
        held_T = _held(bucket, slots, safe_R, held_T)
    if bucket.tree and bucket.J > 1:
        tree = mask_of(bucket.tree)
        pos_T = _by_depth(bucket, tree, place_T)
    tok_T = jnp.where(asked_T, held_T, raw["tok_T"])
    number_T = jnp.clip(place_T // Z, 0, dims.M - 1)
    groups = group_pages.unpacked(raw, dims.columns, dims.M, row, number_T, real_T)
    if groups:
        raw["page_table_RM"] = groups[0].table_RM
    page = raw["page_table_RM"][row, number_T]
    attn = {f.name.removeprefix("attn."): raw[f.name] for f in fields if f.name.startswith("attn.")}
    plain = {k: raw[k] for k in _PASSED if k in raw}
    return StepView(
        **plain,
        extra=_of_features(bucket, dims, raw, slots, safe_R),
        next_F=raw.get("next_F"),
        backfill_F=raw["backfill_F"] > 0 if "backfill_F" in raw else None,
        tok_T=jnp.where(real_T, tok_T, 0),
        row_T=row_T,
        pos_T=pos_T,
        write_page_T=jnp.where(real_T, page, 0),
        write_off_T=jnp.where(real_T, place_T % Z, 0),
        start_R=start_R,
        kv_len_R=jnp.where(raw["count_R"] > 0, start_R + raw["count_R"], 0),
        emit_R=raw["emit_R"] > 0,
        seed_R2=raw["seed_R2"].astype(jnp.uint32),
        attn=attn,
        D=bucket.D,
        P=bucket.P,
        F=bucket.F,
        J=bucket.J,
        tree=tree,
        groups=groups,
        places=() if dims.groups is None else dims.groups.places,
    )


def state_name(feature: str) -> str:
    """The name in ``StepView.extra`` of what the slots of rows hold for a feature."""
    return f"{feature}.state_R"


def _of_features(
    bucket: Bucket, dims: StepDims, raw: Mapping[str, Any], slots: Any, slot_R: jax.Array
) -> dict[str, jax.Array]:
    """The fields of the bucket's features, and what the rows' slots hold for them."""
    found = {}
    for feature in bucket.features:
        found |= {f.name: raw[f.name] for f in feature.fields(bucket, dims)}
        if feature.state is not None:
            found[state_name(feature.name)] = slots.states[feature.name][slot_R]
    return found


def _held(bucket: Bucket, slots: Any, slot_R: jax.Array, last_T: jax.Array) -> jax.Array:
    """int32[T]: what -1 stands for: the slot's last token in column 0, then its drafts."""
    D, J = bucket.D, bucket.J
    draft_DJ = jnp.pad(slots.draft_CJ, ((0, 0), (0, J)))[slot_R[:D], : J - 1]
    held_DJ = jnp.concatenate([last_T[: D * J : J, None], draft_DJ], axis=1)
    return jnp.concatenate([held_DJ.reshape(-1), last_T[D * J :]])


def _by_depth(bucket: Bucket, tree: DraftMask, place_T: jax.Array) -> jax.Array:
    """Positions of tokens whose KV lies in ``place_T``: nodes of one depth share theirs."""
    up_DJ = np.arange(bucket.J, dtype=np.int32) - tree.depth_DX
    up_n = jnp.broadcast_to(up_DJ, (bucket.D, bucket.J)).reshape(-1)
    up_T = jnp.concatenate([up_n, jnp.zeros(bucket.P, jnp.int32)])
    return jnp.where(place_T < 0, place_T, place_T - up_T)


_AS_GIVEN = ("flags", "n_decode", "n_prefill", "slot_R", "count_R", "first_R", "page_table_RM")
_PASSED = (*_AS_GIVEN, *(c.name for c in SAMPLING if c.name != "seed_R2"))


def _fields(buf: jax.Array, fields: tuple[Field, ...]) -> dict[str, jax.Array]:
    def typed(part: jax.Array, is_float: bool) -> jax.Array:
        return jax.lax.bitcast_convert_type(part, jnp.float32) if is_float else part

    raw: dict[str, jax.Array] = {}
    for f, at, n, shape in _parts(fields):
        part = jax.lax.slice(buf, (at,), (at + n,)).reshape(shape)
        if f is None:
            raw.update({name: typed(x, is_float) for name, is_float, x in _columns(part)})
        else:
            raw[f.name] = typed(part, f.is_float)
    return raw
