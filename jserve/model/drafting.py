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

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import tree as trees
from jserve.model.attention import LayerKV
from jserve.model.drafter import Drafter, Seen, Target
from jserve.model.sample import Draws, sample
from jserve.model.slots import SlotState, keep_drafts
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
    drafter, target, params, _, axis = hands
    carry_RX, kv = drafter.observe(target, params, _seen(told), kv, axis)
    if not bucket.n_draft:
        return kv, slots
    parents = bucket.tree or trees.chain(bucket.n_draft)
    draft_RJ, kv = _draft(hands, carry_RX, kv, told, slots, parents)
    return kv, keep_drafts(slots, told.view.slot_R, told.n_ok_R > 0, draft_RJ)


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


def _draft(
    hands: Hands,
    carry_RX: jax.Array,
    kv: list[LayerKV],
    told: Told,
    slots: SlotState,
    parents: Parents,
) -> tuple[jax.Array, list[LayerKV]]:
    """(int32[R, J] drafts in the order of the tree's nodes, the new KV)."""
    drafter, target, params, dims, axis = hands
    R, levels = told.len_R.shape[0], _levels(parents)
    token_RN = jnp.zeros((R, 1 + len(parents)), jnp.int32).at[:, 0].set(told.newest_R)
    walk, carry_EX = _Walk(told, parents, dims, drafter.reads_next), carry_RX
    for d, level in enumerate(levels):
        if d:
            carry_EX = _of_parents(carry_EX, levels[d - 1], level, parents)
        if drafter.advance is not None and (d or not drafter.reads_next):
            view = walk.view(level.inner, token_RN)
            carry_EX, kv = drafter.advance(target, params, carry_EX, view, kv, axis)
        raw_EV = drafter.logits(target, params, carry_EX, d, axis)
        token_RN = _grow(token_RN, raw_EV, level, walk, slots)
    return jnp.clip(token_RN[:, 1:], 0, dims.V - 1), kv


def _of_parents(carry_EX: jax.Array, above: _Level, level: _Level, parents: Parents) -> jax.Array:
    """The carry of each inner node's parent."""
    at = np.array([above.inner.index(parents[n - 1]) for n in level.inner])
    R = carry_EX.shape[0] // len(above.inner)
    return carry_EX.reshape(R, len(above.inner), -1)[:, at].reshape(R * len(at), -1)


def _grow(
    token_RN: jax.Array, raw_EV: jax.Array, level: _Level, walk: _Walk, slots: SlotState
) -> jax.Array:
    """The tokens of the level's children: first what is drawn, then the likeliest others."""
    R, W = token_RN.shape[0], len(level.inner)
    flags = walk.told.view.flags & ~LOGPROBS
    drawn_E, _ = _SAMPLE(raw_EV, walk.draws(level.inner, token_RN), slots, flags)
    found_EM = drawn_E[:, None]
    most = max(map(len, level.children))
    if most > 1:
        without_EV = raw_EV.at[jnp.arange(R * W), drawn_E].set(-jnp.inf)
        others_EM = jax.lax.top_k(without_EV, most - 1)[1].astype(jnp.int32)
        found_EM = jnp.concatenate([found_EM, others_EM], axis=1)
    found_RWM = found_EM.reshape(R, W, most)
    for w, nodes in enumerate(level.children):
        token_RN = token_RN.at[:, np.array(nodes)].set(found_RWM[:, w, : len(nodes)])
    return token_RN


class _Walk:
    """Where the nodes of one tree lie while its drafts are made, static but for the rows."""

    def __init__(self, told: Told, parents: Parents, dims: StepDims, reads_next: bool) -> None:
        self.told, self.parents, self.dims = told, parents, dims
        self.depth = trees.depths(parents)
        self.is_chain = parents == trees.chain(len(parents))
        # The newest token has an entry before the base where its successor is not waited for.
        self.base_R = told.len_R + (0 if reads_next else 1)
        inner = [n for n in range(len(self.depth)) if n in parents]
        self.rank = {n: i - 1 for i, n in enumerate(inner)}
        """Place of each inner node, counted from the base; the root's is -1."""
        self.live_R = (told.n_ok_R > 0) & (self.base_R + len(inner) <= dims.M * dims.Z)

    def view(self, nodes: tuple[int, ...], token_RN: jax.Array) -> StepView:
        """The pass over ``nodes`` of one depth: R decode rows of so many tokens."""
        old, dims = self.told.view, self.dims
        R, W = self.live_R.shape[0], len(nodes)
        live_R, first = self.live_R, self.rank[nodes[0]]
        start_R = self.base_R + first
        place_RW = start_R[:, None] + jnp.arange(W, dtype=jnp.int32)
        pos_R1 = (self.base_R + self.depth[nodes[0]] - 1)[:, None]
        page_RW = jnp.take_along_axis(
            old.page_table_RM, jnp.clip(place_RW // dims.Z, 0, dims.M - 1), axis=1
        )
        row_R = jnp.arange(R, dtype=jnp.int32)

        def each(x_RW: jax.Array, dead: int) -> jax.Array:
            x_RW = jnp.broadcast_to(x_RW, (R, W))
            return jnp.where(live_R[:, None], x_RW, dead).reshape(-1)

        return old.replace(  # type: ignore[attr-defined]
            tok_T=each(token_RN[:, np.array(nodes)], 0),
            row_T=each(row_R[:, None], R),
            pos_T=each(pos_R1, -1),
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
            tree=None if self.is_chain else self._mask(nodes),
        )

    def _mask(self, nodes: tuple[int, ...]) -> DraftMask | None:
        """What ``nodes`` see of the inner nodes up to them; None for the root."""
        if nodes == (0,):
            return None
        upto = [n for n, i in self.rank.items() if 0 <= i <= self.rank[nodes[-1]]]
        path = trees.paths(self.parents)
        sees = tuple(tuple(x in path[n] for x in upto) for n in nodes)
        return DraftMask(sees, tuple(self.depth[x] - 1 for x in upto))

    def draws(self, nodes: tuple[int, ...], token_RN: jax.Array) -> Draws:
        """How the first child of each of ``nodes`` is drawn."""
        view, W = self.told.view, len(nodes)
        depth = self.depth[nodes[0]]
        paths = [trees.paths(self.parents)[n] for n in nodes]
        prefix_RWJ = token_RN[:, np.array(paths, np.int32).reshape(W, depth)]
        rows = {
            c.name.replace("_R", "_E"): jnp.repeat(getattr(view, c.name), W, axis=0)
            for c in SAMPLING
        }
        slot_R = jnp.where(view.count_R > 0, view.slot_R, 0)
        n_prefix_E = jnp.full(slot_R.shape[0] * W, depth, jnp.int32)
        return Draws(
            slot_E=jnp.repeat(slot_R, W),
            pos_E=jnp.repeat(self.told.len_R + 1 + depth, W),
            prefix_EJ=prefix_RWJ.reshape(slot_R.shape[0] * W, depth),
            n_prefix_E=n_prefix_E,
            **rows,
        )
