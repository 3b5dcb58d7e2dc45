"""The drafts of the next step, made at the end of this one, in the same program.

Owns the order: the drafter sees the step's tokens, then draws draft after draft for the rows that
emitted, level by level of the tree (a chain is the tree with one node a level). Must not know any
particular drafter, nor how drafts are verified. A draft is drawn as the target would draw it: the
same sampling fields, counts and noise of its position, so that it stands as often as can be; the
other children of a node are its likeliest tokens.

Places of the drafter's own entries while it drafts (``base`` = what it has seen)::

    chain     | seen ...                  | d1 | d2 | ...        each at its position
    tree      | seen ...                  | inner nodes in order | each at its depth

A row whose drafts would leave the context gets none. Where its pages end, drafts are computed on
the scratch page and are merely bad.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import tree as trees
from jserve.model.attention import LayerKV
from jserve.model.drafter import Drafter, Seen, Target
from jserve.model.sample import Draws, sample
from jserve.model.slots import NONE, SlotState, keep_drafts, text_of
from jserve.model.tree import DraftMask, Parents
from jserve.model.view import LOGPROBS, SAMPLING, Bucket, StepDims, StepView

_SAMPLE = jax.jit(sample)


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


class Hands(NamedTuple):
    """The drafter of an engine and what it works with, on this shard."""

    drafter: Drafter
    target: Target
    params: Any
    dims: StepDims
    axis: str | None
    loops: bool
    """Draft in a loop: less to compile, but a GPU would launch its passes from the host."""

    def observe(self, seen: Seen, kv: list[LayerKV]) -> tuple[jax.Array, list[LayerKV]]:
        assert self.drafter.observe is not None, "not asked of a drafter that copies"
        return self.drafter.observe(self.target, self.params, seen, kv, self.axis)

    def advance(
        self, carry_EX: jax.Array, view: StepView, kv: list[LayerKV]
    ) -> tuple[jax.Array, list[LayerKV]]:
        assert self.drafter.advance is not None, "not asked of a drafter without passes"
        return self.drafter.advance(self.target, self.params, carry_EX, view, kv, self.axis)

    def logits(self, carry_EX: jax.Array, depth: Any) -> jax.Array:
        assert self.drafter.logits is not None, "not asked of a drafter that copies"
        return self.drafter.logits(self.target, self.params, carry_EX, depth, self.axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What came of a step, chains only."""

    view: StepView
    token_RJ: jax.Array
    """int32: what was drawn after each token of a row."""
    n_ok_R: jax.Array
    len_R: jax.Array
    """int32: position of the newest token of each row."""
    x_TD: jax.Array
    taps: list[jax.Array]

    @property
    def newest_R(self) -> jax.Array:
        last_R1 = jnp.maximum(self.n_ok_R - 1, 0)[:, None]
        return jnp.take_along_axis(self.token_RJ, last_R1, axis=1)[:, 0]


def leave_drafts(
    hands: Hands, kv: list[LayerKV], told: Told, slots: SlotState, bucket: Bucket
) -> tuple[list[LayerKV], SlotState]:
    """The drafter's new KV, and the slots with ``bucket.n_draft`` drafts for those who emitted."""
    slot_R = told.view.slot_R
    if hands.drafter.copy is not None:
        draft_RJ = hands.drafter.copy(text_of(slots, slot_R), told.len_R, bucket.n_draft)
    else:
        carry_RX, kv = hands.observe(_seen(told), kv)
        if len(carry_RX) == 1:
            told, carry_RX = _doubled(told), jnp.repeat(carry_RX, 2, axis=0)
        make = _tree if bucket.tree else _chain
        draft_RJ, kv = make(_Walk(told, slots, hands, bucket), carry_RX, kv)
        draft_RJ = draft_RJ[: len(slot_R)]
    draft_RJ = jnp.clip(draft_RJ, 0, hands.dims.V - 1)
    return kv, keep_drafts(slots, slot_R, told.n_ok_R > 0, draft_RJ)


def _seen(told: Told) -> Seen:
    """What the drafter is shown: the tokens of the step and what followed each."""
    view, token_RJ = told.view, told.token_RJ
    D, n = view.D, view.D * view.J
    next_T = jnp.concatenate([token_RJ[:D].reshape(-1), jnp.roll(view.tok_T[n:], -1)])
    is_decode = jnp.arange(view.D + view.F) < D
    last_R = view.first_R + jnp.where(is_decode, told.n_ok_R, view.count_R) - 1
    if view.F:
        assert view.next_F is not None, "a layout of steps without a drafter"
        after_F = jnp.where(view.emit_R[D:], token_RJ[D:, 0], view.next_F)
        at_F = jnp.where(view.count_R[D:] > 0, last_R[D:], next_T.shape[0])
        next_T = next_T.at[at_F].set(after_F, mode="drop")
    return Seen(
        view=view,
        next_T=jnp.maximum(next_T, 0),
        x_TD=told.x_TD,
        taps=told.taps,
        last_R=jnp.maximum(last_R, 0),
    )


def _doubled(told: Told) -> Told:
    """One row as two, the second of them dead: XLA:CPU is far slower on a pass over one row."""
    view = told.view
    named = [c.name for c in SAMPLING] + ["slot_R", "count_R", "page_table_RM"]
    rows = {name: jnp.repeat(getattr(view, name), 2, axis=0) for name in named}
    return replace(
        told,
        view=view.replace(**rows),  # type: ignore[attr-defined]
        token_RJ=jnp.repeat(told.token_RJ, 2, axis=0),
        n_ok_R=jnp.pad(told.n_ok_R, (0, 1)),
        len_R=jnp.repeat(told.len_R, 2),
    )


Drafted = tuple[jax.Array, list[LayerKV]]
"""(int32[R, J] drafts in the order of the tree's nodes, the new KV)"""


def _chain(walk: _Walk, carry_RX: jax.Array, kv: list[LayerKV]) -> Drafted:
    """Draft after draft; on a CPU as a loop, which compiles once."""
    drafter, n = walk.hands.drafter, walk.n
    token_RN = jnp.zeros((walk.R, n + 1), jnp.int32).at[:, 0].set(walk.told.newest_R)

    def draw(i: Any, token_RN: jax.Array, carry_RX: jax.Array) -> jax.Array:
        before_J = jnp.arange(1, n, dtype=jnp.int32) <= i
        prefix_RJ = jnp.where(before_J, token_RN[:, 1:n], NONE)
        drawn_R = walk.drawn(walk.hands.logits(carry_RX, i), i, prefix_RJ)
        return jax.lax.dynamic_update_index_in_dim(token_RN, drawn_R, i + 1, 1)

    def one(i: Any, held: Any) -> Any:
        token_RN, carry_RX, kv = held
        tok_R1 = jax.lax.dynamic_slice_in_dim(token_RN, i, 1, 1)
        carry_RX, kv = walk.hands.advance(carry_RX, walk.view(i - 1, i, tok_R1, None), kv)
        return draw(i, token_RN, carry_RX), carry_RX, kv

    if drafter.advance is None:
        for i in range(n):
            token_RN = draw(i, token_RN, carry_RX)
        return token_RN[:, 1:], kv
    if drafter.reads_next:
        token_RN = draw(0, token_RN, carry_RX)
    first = int(drafter.reads_next)
    held = (token_RN, carry_RX, kv)
    token_RN, _, kv = jax.lax.fori_loop(first, n, one, held, unroll=not walk.hands.loops)
    return token_RN[:, 1:], kv


def _tree(walk: _Walk, carry_RX: jax.Array, kv: list[LayerKV]) -> Drafted:
    """Level by level, all nodes of a depth in one pass."""
    drafter, levels = walk.hands.drafter, _levels(walk.parents)
    token_RN = jnp.zeros((walk.R, walk.n + 1), jnp.int32).at[:, 0].set(walk.told.newest_R)
    carry_EX, path = carry_RX, trees.paths(walk.parents)
    for d, level in enumerate(levels):
        inner = np.array(level.inner)
        if d:
            carry_EX = _of_parents(carry_EX, levels[d - 1], level, walk.parents)
        if drafter.advance is not None and (d or not drafter.reads_next):
            first = walk.rank[level.inner[0]]
            view = walk.view(first, d, token_RN[:, inner], walk.mask(level.inner))
            carry_EX, kv = walk.hands.advance(carry_EX, view, kv)
        at_WJ = np.array([path[n] for n in level.inner], np.int32).reshape(len(inner), d)
        prefix_EJ = token_RN[:, at_WJ].reshape(-1, d) if d else jnp.zeros((walk.R, 0), jnp.int32)
        token_RN = _grow(token_RN, walk.hands.logits(carry_EX, d), d, prefix_EJ, level, walk)
    return token_RN[:, 1:], kv


def _of_parents(carry_EX: jax.Array, above: _Level, level: _Level, parents: Parents) -> jax.Array:
    """The carry of each inner node's parent."""
    at = np.array([above.inner.index(parents[n - 1]) for n in level.inner])
    R = carry_EX.shape[0] // len(above.inner)
    return carry_EX.reshape(R, len(above.inner), -1)[:, at].reshape(R * len(at), -1)


def _grow(
    token_RN: jax.Array,
    raw_EV: jax.Array,
    depth: int,
    prefix_EJ: jax.Array,
    level: _Level,
    walk: _Walk,
) -> jax.Array:
    """The tokens of the level's children: first what is drawn, then the likeliest others."""
    W, most = len(level.inner), max(map(len, level.children))
    drawn_E = walk.drawn(raw_EV, depth, prefix_EJ)
    found_EM = drawn_E[:, None]
    if most > 1:
        without_EV = raw_EV.at[jnp.arange(walk.R * W), drawn_E].set(-jnp.inf)
        others_EM = jax.lax.top_k(without_EV, most - 1)[1].astype(jnp.int32)
        found_EM = jnp.concatenate([found_EM, others_EM], axis=1)
    found_RWM = found_EM.reshape(walk.R, W, most)
    for w, nodes in enumerate(level.children):
        token_RN = token_RN.at[:, np.array(nodes)].set(found_RWM[:, w, : len(nodes)])
    return token_RN


class _Walk:
    """The rows that drafts are made for, and where the nodes of their tree lie meanwhile."""

    def __init__(self, told: Told, slots: SlotState, hands: Hands, bucket: Bucket) -> None:
        self.told, self.slots, self.hands = told, slots, hands
        self.n, self.R = bucket.n_draft, told.len_R.shape[0]
        self.parents = bucket.tree or trees.chain(bucket.n_draft)
        self.depth = trees.depths(self.parents)
        inner = [n for n in range(len(self.depth)) if n in self.parents]
        self.rank = {n: i - 1 for i, n in enumerate(inner)}
        """Place of each inner node, counted from the base; the root's is -1."""
        # The newest token has an entry before the base where its successor is not waited for.
        self.base_R = told.len_R + (0 if hands.drafter.reads_next else 1)
        fits_R = self.base_R + len(inner) <= hands.dims.M * hands.dims.Z
        self.live_R = (told.n_ok_R > 0) & fits_R

    def view(self, first: Any, depth: Any, tok_RW: jax.Array, tree: DraftMask | None) -> StepView:
        """The pass over some nodes of one depth: R decode rows of W tokens from place ``first``."""
        old, dims, live_R = self.told.view, self.hands.dims, self.live_R
        R, W = tok_RW.shape
        start_R = self.base_R + first
        place_RW = start_R[:, None] + jnp.arange(W, dtype=jnp.int32)
        page_RW = jnp.take_along_axis(
            old.page_table_RM, jnp.clip(place_RW // dims.Z, 0, dims.M - 1), axis=1
        )
        row_R = jnp.arange(R, dtype=jnp.int32)

        def each(x_RW: jax.Array, dead: int) -> jax.Array:
            x_RW = jnp.broadcast_to(x_RW, (R, W))
            return jnp.where(live_R[:, None], x_RW, dead).reshape(-1)

        return old.replace(  # type: ignore[attr-defined]
            tok_T=each(tok_RW, 0),
            row_T=each(row_R[:, None], R),
            pos_T=each((self.base_R + depth - 1)[:, None], -1),
            write_page_T=each(page_RW, 0),
            write_off_T=each(place_RW % dims.Z, 0),
            start_R=start_R,
            count_R=jnp.where(live_R, W, 0),
            first_R=row_R * W,
            kv_len_R=jnp.where(live_R, start_R + W, 0),
            n_decode=jnp.int32(R),
            n_prefill=jnp.int32(0),
            D=R,
            P=0,
            F=0,
            J=W,
            tree=tree,
        )

    def mask(self, nodes: tuple[int, ...]) -> DraftMask | None:
        """What ``nodes`` see of the inner nodes up to them; None for the root."""
        if nodes == (0,):
            return None
        upto = [n for n, i in self.rank.items() if 0 <= i <= self.rank[nodes[-1]]]
        path = trees.paths(self.parents)
        sees = tuple(tuple(x in path[n] for x in upto) for n in nodes)
        return DraftMask(sees, tuple(self.depth[x] - 1 for x in upto))

    def drawn(self, raw_EV: jax.Array, depth: Any, prefix_EJ: jax.Array) -> jax.Array:
        """int32[E]: what follows nodes of one depth, drawn as the target would draw it there."""
        view, E = self.told.view, raw_EV.shape[0]
        W = E // self.R
        rows = {
            c.name.replace("_R", "_E"): jnp.repeat(getattr(view, c.name), W, axis=0)
            for c in SAMPLING
        }
        draws = Draws(
            slot_E=jnp.repeat(jnp.where(view.count_R > 0, view.slot_R, 0), W),
            pos_E=jnp.repeat(self.told.len_R + 1 + depth, W),
            prefix_EJ=prefix_EJ,
            n_prefix_E=jnp.full(E, depth, jnp.int32),
            **rows,
        )
        return _SAMPLE(raw_EV, draws, self.slots, view.flags & ~LOGPROBS)[0]
