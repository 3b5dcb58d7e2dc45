"""Drafts the next step's tokens at the end of this step, in the same program.

It owns the order: the drafter sees the step's tokens, then draws draft after draft for the rows that emitted, level
by level of the tree (a chain is the tree with one node a level). The children of a node are the likeliest tokens
there, given the noise with which the target draws (``DraftPasses.likeliest``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import draft_tree as trees
from jserve.model.attention import LayerKV
from jserve.model.draft_tree import DraftMask, Parents
from jserve.model.slots import SlotState, keep_drafts, text_of
from jserve.model.view import SAMPLING, Bucket
from jserve.speculation.device.draft_passes import DraftContext, DraftPasses, StepOutcome
from jserve.speculation.drafters.drafter import Seen


@dataclass(frozen=True, slots=True)
class _Level:
    """One depth of the tree that has children."""

    inner: tuple[int, ...]
    """Nodes of this depth with children, in order."""
    children: tuple[tuple[int, ...], ...]
    """Of each of them."""


def _levels(parents: Parents) -> list[_Level]:
    depth = trees.depths(parents)
    found = []
    for d in range(max(depth)):
        inner = tuple(n for n in range(len(depth)) if depth[n] == d and n in parents)
        found.append(_Level(inner, tuple(tuple(trees.children(parents, n)) for n in inner)))
    return found


def leave_drafts(
    draft_ctx: DraftContext,
    kv: list[LayerKV],
    outcome: StepOutcome,
    slots: SlotState,
    bucket: Bucket,
) -> tuple[list[LayerKV], SlotState]:
    """The drafter's new KV, and the slots with ``bucket.n_draft`` drafts for those who emitted."""
    slot_R, live_R = outcome.view.slot_R, outcome.n_ok_R > 0
    if draft_ctx.drafter.copy is not None:
        draft_RJ = draft_ctx.drafter.copy(text_of(slots, slot_R), outcome.len_R, bucket.n_draft)
    else:
        carry_RX, kv = draft_ctx.observe(_seen(outcome), kv)
        draft_RJ, kv = _drafts(draft_ctx, outcome, slots, bucket, carry_RX, kv)
    draft_RJ = jnp.clip(draft_RJ, 0, draft_ctx.dims.V - 1)
    return kv, keep_drafts(slots, slot_R, live_R, draft_RJ)


class _Made(NamedTuple):
    draft_RJ: jax.Array
    """int32: drafts in the order of their nodes."""
    kv: list[LayerKV]


def _drafts(
    draft_ctx: DraftContext,
    outcome: StepOutcome,
    slots: SlotState,
    bucket: Bucket,
    carry_RX: jax.Array,
    kv: list[LayerKV],
) -> _Made:
    shape, n, R = bucket.tree, bucket.n_draft, carry_RX.shape[0]
    if R == 1:
        outcome, carry_RX = _doubled(outcome), jnp.repeat(carry_RX, 2, axis=0)
    if shape:
        fixed = _Fixed(shape)
        passes = DraftPasses(outcome, slots, draft_ctx, n_places=len(fixed.rank))
        made = _tree(passes, fixed, carry_RX, kv)
    else:
        made = _chain(DraftPasses(outcome, slots, draft_ctx, n_places=n), n, carry_RX, kv)
    return made._replace(draft_RJ=made.draft_RJ[:R])


def _seen(outcome: StepOutcome) -> Seen:
    """The drafter's input: the tokens of the step and what followed each."""
    view, token_RJ = outcome.view, outcome.token_RJ
    D, n = view.D, view.D * view.J
    next_T = jnp.concatenate([token_RJ[:D].reshape(-1), jnp.roll(view.tok_T[n:], -1)])
    is_decode = jnp.arange(view.D + view.F) < D
    last_R = view.first_R + jnp.where(is_decode, outcome.n_ok_R, view.count_R) - 1
    if view.F:
        assert view.next_F is not None, "a layout of steps without a drafter"
        after_F = jnp.where(view.emit_R[D:], token_RJ[D:, 0], view.next_F)
        at_F = jnp.where(view.count_R[D:] > 0, last_R[D:], next_T.shape[0])
        next_T = next_T.at[at_F].set(after_F, mode="drop")
    return Seen(
        view=view,
        next_T=jnp.maximum(next_T, 0),
        x_TD=outcome.x_TD,
        taps=outcome.taps,
        last_R=jnp.maximum(last_R, 0),
    )


def _doubled(outcome: StepOutcome) -> StepOutcome:
    """One row as two, the second of them dead: XLA:CPU is far slower on a pass over one row."""
    view = outcome.view
    named = [c.name for c in SAMPLING] + ["slot_R", "count_R", "page_table_RM"]
    rows = {name: jnp.repeat(getattr(view, name), 2, axis=0) for name in named}
    return replace(
        outcome,
        view=replace(view, **rows),
        token_RJ=jnp.repeat(outcome.token_RJ, 2, axis=0),
        n_ok_R=jnp.pad(outcome.n_ok_R, (0, 1)),
        len_R=jnp.repeat(outcome.len_R, 2),
    )


def _chain(passes: DraftPasses, n: int, carry_RX: jax.Array, kv: list[LayerKV]) -> _Made:
    """Draft after draft; on a CPU as a loop, which compiles once."""
    drafter = passes.draft_ctx.drafter
    token_RN = jnp.zeros((passes.R, n + 1), jnp.int32).at[:, 0].set(passes.outcome.newest_R)

    def draw(i: Any, token_RN: jax.Array, carry_RX: jax.Array) -> jax.Array:
        best_R1 = passes.likeliest(passes.draft_ctx.logits(carry_RX, i), i, 1)
        return jax.lax.dynamic_update_slice_in_dim(token_RN, best_R1, i + 1, 1)

    def one(i: Any, held: Any) -> Any:
        token_RN, carry_RX, kv = held
        tok_R1 = jax.lax.dynamic_slice_in_dim(token_RN, i, 1, 1)
        carry_RX, kv = passes.draft_ctx.advance(carry_RX, passes.view(i - 1, i, tok_R1, None), kv)
        return draw(i, token_RN, carry_RX), carry_RX, kv

    if drafter.advance is None:
        for i in range(n):
            token_RN = draw(i, token_RN, carry_RX)
        return _Made(token_RN[:, 1:], kv)
    if drafter.reads_next:
        token_RN = draw(0, token_RN, carry_RX)
    first = int(drafter.reads_next)
    held = (token_RN, carry_RX, kv)
    token_RN, _, kv = jax.lax.fori_loop(first, n, one, held, unroll=not passes.draft_ctx.loops)
    return _Made(token_RN[:, 1:], kv)


class _Fixed:
    """A tree of one shape, and where its nodes lie while they are made."""

    def __init__(self, parents: Parents) -> None:
        self.parents, self.levels = parents, _levels(parents)
        self.depth, self.paths = trees.depths(parents), trees.paths(parents)
        inner = [n for n in range(len(self.depth)) if n in parents]
        self.rank = {n: i - 1 for i, n in enumerate(inner)}
        """Place of each node with children, counted from the base; the root's is -1."""

    def mask(self, nodes: tuple[int, ...]) -> DraftMask | None:
        """The visibility of the inner nodes for ``nodes``; None for the root."""
        if nodes == (0,):
            return None
        upto = [n for n, i in self.rank.items() if 0 <= i <= self.rank[nodes[-1]]]
        sees = tuple(tuple(x in self.paths[n] for x in upto) for n in nodes)
        return DraftMask(sees, tuple(self.depth[x] - 1 for x in upto))


def _tree(passes: DraftPasses, fixed: _Fixed, carry_RX: jax.Array, kv: list[LayerKV]) -> _Made:
    """Level by level, all nodes of a depth in one pass."""
    drafter, levels = passes.draft_ctx.drafter, fixed.levels
    token_RN = (
        jnp.zeros((passes.R, len(fixed.depth)), jnp.int32).at[:, 0].set(passes.outcome.newest_R)
    )
    carry_EX = carry_RX
    for d, level in enumerate(levels):
        inner = np.array(level.inner)
        if d:
            carry_EX = _of_parents(carry_EX, levels[d - 1], level, fixed.parents)
        if drafter.advance is not None and (d or not drafter.reads_next):
            first = fixed.rank[level.inner[0]]
            view = passes.view(first, d, token_RN[:, inner], fixed.mask(level.inner))
            carry_EX, kv = passes.draft_ctx.advance(carry_EX, view, kv)
        token_RN = _grow(token_RN, passes.draft_ctx.logits(carry_EX, d), d, level, passes)
    return _Made(token_RN[:, 1:], kv)


def _of_parents(carry_EX: jax.Array, above: _Level, level: _Level, parents: Parents) -> jax.Array:
    """The carry of each inner node's parent."""
    at = np.array([above.inner.index(parents[n - 1]) for n in level.inner])
    R = carry_EX.shape[0] // len(above.inner)
    return carry_EX.reshape(R, len(above.inner), -1)[:, at].reshape(R * len(at), -1)


def _grow(
    token_RN: jax.Array,
    raw_EV: jax.Array,
    depth: int,
    level: _Level,
    passes: DraftPasses,
) -> jax.Array:
    """The tokens with those of the level's children."""
    W, most = len(level.inner), max(map(len, level.children))
    found_RWM = passes.likeliest(raw_EV, depth, most).reshape(passes.R, W, most)
    for w, nodes in enumerate(level.children):
        token_RN = token_RN.at[:, np.array(nodes)].set(found_RWM[:, w, : len(nodes)])
    return token_RN
