"""Grows a draft tree per row from the drafter's probabilities (EAGLE-2).

A node's score is the sum of the drafter's log-probabilities down to it, where a first child, which the noise
chooses, counts as the likeliest token would. Each level's ``width`` best nodes get ``width`` children each; in the
end the ``n`` best of all candidates are kept, level by level, with their parents as data::

    level 1        a  b  c          scores of all candidates, those with children in brackets:
                  /|\\                [a -0.1] [b -2.5] c -4.0 | [aa -0.4] ab -1.9  ba -2.8 ...
    level 2     aa ab ba ...        n = 4: a aa ab b; numbered 1 a, 2 b, 3 aa, 4 ab; parents 0 0 1 1

A child never scores above its parent and comes after it, so what is kept is a tree. Whatever it is, it
only proposes: any tree gives the target's own tokens.

Source: EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jserve.model.attention import LayerKV
from jserve.model.draft_tree import RowMasks
from jserve.speculation.device.draft_passes import DraftPasses
from jserve.types import Grown


@dataclass(frozen=True, slots=True)
class _Front:
    """Nodes of one level that get children: W of each row, at places of their own."""

    token_RW: jax.Array
    score_RW: jax.Array
    number_RW: jax.Array
    """int32: among all candidates; 0 is the root."""
    carry_RWX: jax.Array
    """Of each node's parent; after a pass, its own."""
    sees_RWX: jax.Array
    """bool: places from the base that each node sees, its own the last W."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    token_RC: jax.Array
    score_RC: jax.Array
    parent_RC: jax.Array
    """int32: number of the parent among all candidates."""


def grown(
    passes: DraftPasses, shape: Grown, carry_RX: jax.Array, kv: list[LayerKV]
) -> tuple[jax.Array, jax.Array, list[LayerKV]]:
    """(int32[R, n] drafts, int32[R, n] their parents as ``jserve.model.draft_tree`` numbers them, the new
    KV)."""
    drafter, front, levels = passes.draft_ctx.drafter, _root(passes, carry_RX), []
    for depth in range(shape.depth):
        carry_EX = front.carry_RWX.reshape(-1, front.carry_RWX.shape[2])
        if drafter.advance is not None and (depth or not drafter.reads_next):
            carry_EX, kv = _passed(passes, front, depth, carry_EX, kv)
        found = _children(passes, front, carry_EX, depth, shape.width)
        if depth + 1 < shape.depth:
            first = 1 + sum(level.token_RC.shape[1] for level in levels)
            front = _best(front, found, carry_EX, first, shape.width)
        levels.append(found)
    every = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *map(_parts, levels))
    draft_RN, parent_RN = _kept(_Candidates(*every), shape.n)
    return draft_RN, parent_RN, kv


def _parts(level: _Candidates) -> tuple[jax.Array, jax.Array, jax.Array]:
    return level.token_RC, level.score_RC, level.parent_RC


def _root(passes: DraftPasses, carry_RX: jax.Array) -> _Front:
    R = passes.R
    return _Front(
        token_RW=passes.outcome.newest_R[:, None],
        score_RW=jnp.zeros((R, 1)),
        number_RW=jnp.zeros((R, 1), jnp.int32),
        carry_RWX=carry_RX[:, None],
        sees_RWX=jnp.zeros((R, 1, 0), bool),
    )


def _passed(
    passes: DraftPasses, front: _Front, depth: int, carry_EX: jax.Array, kv: list[LayerKV]
) -> tuple[jax.Array, list[LayerKV]]:
    """The carry of the front's own nodes. The root's place is the one before the base."""
    R, W, X = front.sees_RWX.shape
    masks = None
    if depth:
        level_X = jnp.repeat(jnp.arange(depth, dtype=jnp.int32), W)
        masks = RowMasks(front.sees_RWX, jnp.broadcast_to(level_X, (R, X)))
    view = passes.view(X - W, depth, front.token_RW, masks)
    return passes.draft_ctx.advance(carry_EX, view, kv)


def _children(
    passes: DraftPasses, front: _Front, carry_EX: jax.Array, depth: int, width: int
) -> _Candidates:
    """``width`` of each node."""
    R, W = front.token_RW.shape
    raw_EV = passes.draft_ctx.logits(carry_EX, depth)
    token_EK = passes.likeliest(raw_EV, depth, width)
    logit_EK = jnp.take_along_axis(raw_EV, token_EK, axis=1)
    logit_EK = logit_EK.at[:, 0].set(jnp.max(raw_EV, axis=1))
    chance_EK = logit_EK - jax.nn.logsumexp(raw_EV, axis=1, keepdims=True)
    score_RWK = front.score_RW[:, :, None] + chance_EK.reshape(R, W, width)
    score_RC = score_RWK.reshape(R, W * width)
    return _Candidates(
        token_RC=token_EK.reshape(R, W * width),
        score_RC=jnp.where(jnp.isnan(score_RC), -jnp.inf, score_RC),
        parent_RC=jnp.repeat(front.number_RW, width, axis=1),
    )


def _best(front: _Front, found: _Candidates, carry_EX: jax.Array, first: int, width: int) -> _Front:
    """The next level's nodes with children; ``first`` is the number of the first candidate found."""
    R, W, _ = front.sees_RWX.shape
    score_RW, at_RW = jax.lax.top_k(found.score_RC, width)
    token_RW = jnp.take_along_axis(found.token_RC, at_RW, axis=1)
    above_RW = at_RW // width

    def of_parent(x_RWX: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_RWX, above_RW[:, :, None], axis=1)

    own_RWW = jnp.broadcast_to(jnp.eye(width, dtype=bool), (R, width, width))
    return _Front(
        token_RW=token_RW,
        score_RW=score_RW,
        number_RW=first + at_RW,
        carry_RWX=of_parent(carry_EX.reshape(R, W, -1)),
        sees_RWX=jnp.concatenate([of_parent(front.sees_RWX), own_RWW], axis=2),
    )


def _kept(every: _Candidates, n: int) -> tuple[jax.Array, jax.Array]:
    """(int32[R, n] tokens, int32[R, n] parents) of the best, in the order of their numbers. Of equal
    scores the lower number goes first, which is the parent's."""
    at_RN = jnp.sort(jax.lax.top_k(every.score_RC, n)[1], axis=1)
    token_RN, above_RN = (
        jnp.take_along_axis(x, at_RN, axis=1) for x in (every.token_RC, every.parent_RC)
    )
    older_RNN = 1 + at_RN[:, None] <= above_RN[:, :, None]  # candidates are numbered from 1
    parent_RN = jnp.sum(older_RNN, axis=2, dtype=jnp.int32)
    return token_RN, jnp.minimum(parent_RN, jnp.arange(n, dtype=jnp.int32))
