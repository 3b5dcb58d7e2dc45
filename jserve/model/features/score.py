"""The score feature: log-probabilities of the prefill tokens themselves.

It owns the scoring, in blocks so that logits of few tokens exist at once, and the way of the targets down and of
the scores up::

    tokens    | decode rows |f0 f0 f0 f0 f1 f1 pad|
    target_T  | -1 ...      |f0 f0 f0 -1 f1 -1 -1 |      the prompt's next token, -1: none
    scores    |             | 0  1  2  3  4  5  6 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jserve.model.feature import StepFeature, in_range
from jserve.model.sample import logprobs, ranks
from jserve.model.view import LOGPROBS, Bucket, Field, StepDims
from jserve.model.vocab_part import VocabPart
from jserve.speculation.device.draft_passes import StepOutcome
from jserve.speculation.drafters.drafter import Target
from jserve.types import PromptLogprobs, RowPlan

_TARGETS = attrgetter("targets")
BLOCK = 32
"""Prefill tokens whose logits exist at once."""


@register_dataclass
@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the prefill tokens' successors, P of them (garbage where ``target_T`` is
    -1)."""

    logprob_P: jax.Array
    rank_P: jax.Array
    """int32: 1 for the most likely token."""
    top_ids_PL: jax.Array
    top_logprobs_PL: jax.Array


def fields(bucket: Bucket, dims: StepDims) -> tuple[Field, ...]:
    return (Field("target_T", (bucket.T,)),)


def after(target: Target, outcome: StepOutcome) -> Scores:
    view = outcome.view
    x_PD, target_P = outcome.x_TD[-view.P :], view.extra["target_T"][-view.P :]
    (P, D), part = x_PD.shape, VocabPart.of(target.axes, target.arch.V)
    pad = -P % BLOCK
    x_XBD = jnp.pad(x_PD, ((0, pad), (0, 0))).reshape(-1, BLOCK, D)
    target_XB = jnp.pad(jnp.maximum(target_P, 0), (0, pad)).reshape(-1, BLOCK)

    def block(item: tuple[jax.Array, jax.Array]) -> Scores:
        x_BD, target_B = item
        raw_BV = target.own_logits(x_BD)
        flags = jnp.int32(LOGPROBS)
        scored = logprobs(raw_BV, target_B, flags, n_top=target.scored, part=part)
        chosen_B = part.at(raw_BV, target_B[:, None])[:, 0]
        return Scores(
            logprob_P=scored.logprob_E,
            rank_P=ranks(raw_BV, chosen_B, part),
            top_ids_PL=scored.top_ids_EL,
            top_logprobs_PL=scored.top_logprobs_EL,
        )

    out = jax.lax.map(block, (x_XBD, target_XB))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:P], out)


def wanted(rows: Sequence[RowPlan]) -> bool:
    return any(map(_TARGETS, rows))


def pack(
    views: Mapping[str, np.ndarray], rows: Sequence[RowPlan], at: Sequence[int], dims: StepDims
) -> None:
    views["target_T"][...] = -1
    for r, row in zip(at, rows, strict=True):
        if row.targets:
            in_range("target", row.targets, 0, dims.V - 1)
            first = views["first_R"][r]
            views["target_T"][first : first + len(row.targets)] = row.targets


def unpack(scores: Scores, rows: Sequence[RowPlan], at: Sequence[int]) -> dict[int, PromptLogprobs]:
    found, first = {}, 0
    for i, row in enumerate(rows):
        if row.targets:
            part = slice(first, first + len(row.targets))
            found[i] = PromptLogprobs(
                start=row.start,
                logprob_n=np.asarray(scores.logprob_P)[part],
                rank_n=np.asarray(scores.rank_P)[part],
                top_ids_nL=np.asarray(scores.top_ids_PL)[part],
                top_logprobs_nL=np.asarray(scores.top_logprobs_PL)[part],
            )
        first += 0 if row.from_slot else row.count
    return found


SCORE = StepFeature(
    name="score", fields=fields, wanted=wanted, pack=pack, after=after, unpack=unpack
)
