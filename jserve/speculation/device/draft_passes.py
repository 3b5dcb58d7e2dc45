"""Runs the drafter's passes over decoded rows and draws drafts from its logits.

It owns where the drafter's own entries lie while it drafts, and the views of its passes. A draft is the argmax of
the drafter's logits, over the row's temperature and with the noise that the target adds at that position
(``noise``). Filters, penalties and biases are the target's alone: a draft that they rule out is rejected.

Places while it drafts (``base`` = what it has seen)::

    chain        | seen ...           | d1 | d2 | ...        each at its position
    tree         | seen ...           | nodes with children, in order        each at its depth

A row whose drafts would leave the context gets none. Where its pages end, drafts are computed on
the scratch page and are merely bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jserve.model.attention import LayerKV
from jserve.model.draft_tree import DraftMask
from jserve.model.noise import gumbel
from jserve.model.sample import argmax, is_greedy
from jserve.model.shard import Axes
from jserve.model.slots import SlotState
from jserve.model.view import RANDOM, StepDims, StepView
from jserve.speculation.drafters.drafter import Drafter, Seen, Target


class DraftContext(NamedTuple):
    """The drafter of an engine and what it works with, on this shard."""

    drafter: Drafter
    target: Target
    params: Any
    dims: StepDims
    axes: Axes
    loops: bool
    """Draft in a loop: less to compile, but a GPU would launch its passes from the host."""

    def observe(self, seen: Seen, kv: list[LayerKV]) -> tuple[jax.Array, list[LayerKV]]:
        assert self.drafter.observe is not None, "not asked of a drafter that copies"
        return self.drafter.observe(self.target, self.params, seen, kv, self.axes)

    def advance(
        self, carry_EX: jax.Array, view: StepView, kv: list[LayerKV]
    ) -> tuple[jax.Array, list[LayerKV]]:
        assert self.drafter.advance is not None, "not asked of a drafter without passes"
        return self.drafter.advance(self.target, self.params, carry_EX, view, kv, self.axes)

    def logits(self, carry_EX: jax.Array, depth: Any) -> jax.Array:
        assert self.drafter.logits is not None, "not asked of a drafter that copies"
        return self.drafter.logits(self.target, self.params, carry_EX, depth, self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The results of a step that drafters and step features read, for chains."""

    view: StepView
    token_RJ: jax.Array
    """int32: what was drawn after each token of a row."""
    n_ok_R: jax.Array
    len_R: jax.Array
    """int32: position of the newest token of each row."""
    x_TD: jax.Array
    taps: list[jax.Array]
    read: list[jax.Array] = field(default_factory=list)
    """float32[T, ...] at each point that the step feature at hand reads."""

    @property
    def newest_R(self) -> jax.Array:
        last_R1 = jnp.maximum(self.n_ok_R - 1, 0)[:, None]
        return jnp.take_along_axis(self.token_RJ, last_R1, axis=1)[:, 0]


class DraftPasses:
    """The rows that drafts are made for.

    Args:
        n_places: entries that the drafter makes of its own at most, the newest token's among them.
    """

    def __init__(
        self, outcome: StepOutcome, slots: SlotState, draft_ctx: DraftContext, n_places: int
    ) -> None:
        self.outcome, self.slots, self.draft_ctx = outcome, slots, draft_ctx
        self.R = outcome.len_R.shape[0]
        # The newest token has an entry before the base where its successor is not waited for.
        self.base_R = outcome.len_R + (0 if draft_ctx.drafter.reads_next else 1)
        fits_R = self.base_R + n_places <= draft_ctx.dims.M * draft_ctx.dims.Z
        self.live_R = (outcome.n_ok_R > 0) & fits_R

    def view(self, first: Any, depth: Any, tok_RW: jax.Array, tree: DraftMask | None) -> StepView:
        """The pass over some nodes of one depth: R decode rows of W tokens from place ``first``."""
        old, dims, live_R = self.outcome.view, self.draft_ctx.dims, self.live_R
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

        return replace(
            old,
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

    def likeliest(self, raw_EV: jax.Array, depth: Any, n: int) -> jax.Array:
        """int32[E, n]: what follows nodes of one depth most likely, given the noise of its position."""
        W = raw_EV.shape[0] // self.R

        def best(scores_EV: jax.Array) -> jax.Array:
            if n == 1:
                return argmax(scores_EV)[:, None]
            return jax.lax.top_k(scores_EV, n)[1].astype(jnp.int32)

        def noisy(raw_EV: jax.Array) -> jax.Array:
            view, V = self.outcome.view, raw_EV.shape[1]
            heat_R, pos_R = view.temperature_R, self.outcome.len_R + 1 + depth
            greedy_E1 = jnp.repeat(is_greedy(heat_R), W)[:, None]
            seed_E2 = jnp.repeat(view.seed_R2, W, axis=0)
            noise_EV = gumbel(seed_E2, jnp.repeat(pos_R, W), V)
            heat_E1 = jnp.repeat(heat_R, W)[:, None]
            return best(jnp.where(greedy_E1, raw_EV, raw_EV / heat_E1 + noise_EV))

        return jax.lax.cond(self.outcome.view.flags & RANDOM, noisy, best, raw_EV)
