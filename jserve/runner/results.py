"""Converts ``StepOut`` to ``StepResult``: numpy results in the order of the plan's rows.

It owns which arrays go to the host, and where the rows of a plan are in those of its bucket: the way back of
``runner.batch``.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jserve.model.feature import by_token
from jserve.model.feature_logits import fault_of
from jserve.model.features import SCORE
from jserve.model.step import StepOut
from jserve.model.view import LOGPROBS, Bucket
from jserve.runner.batch import StepBatch
from jserve.types import StepPlan, StepResult


def wanted(plan: StepPlan, batch: StepBatch, out: StepOut) -> list[jax.Array]:
    """The arrays that ``result_of`` will read."""
    asked = (out.top_ids_RJL, out.top_logprobs_RJL, out.rank_RJ, out.picked_RJK)
    chosen = jax.tree.leaves(asked) if batch.flags & LOGPROBS else []
    prompt = [out.prompt[name] for name in {n for row in plan.rows for n in row.prompt_features}]
    given = [out.extra[feature.name] for feature in batch.features]
    return [out.packed_RX, *chosen, *jax.tree.leaves(given), *prompt]


def result_of(plan: StepPlan, batch: StepBatch, out: StepOut, device_us: float) -> StepResult:
    """Wait for the arrays and give the rows in plan order."""
    rows = _plan_rows(batch, len(plan.rows))
    at = rows.tolist()
    picked_RX, J = np.asarray(out.packed_RX)[rows], batch.bucket.J
    has_top = bool(batch.flags & LOGPROBS)

    given = {
        feature.name: feature.unpack(
            jax.tree.map(np.asarray, out.extra[feature.name]), plan.rows, at
        )
        for feature in batch.features
    }

    def of_chosen(x: jax.Array | None) -> np.ndarray | None:
        return np.asarray(x)[rows] if has_top and x is not None else None

    return StepResult(
        n_ok_R=picked_RX[:, 0],
        finite_R=picked_RX[:, 1] > 0,
        faults=_faults(batch.bucket, picked_RX[:, 1]),
        tokens_RJ=picked_RX[:, 2 : 2 + J],
        logprob_RJ=np.ascontiguousarray(picked_RX[:, 2 + J :]).view(np.float32),
        top_ids_RJL=of_chosen(out.top_ids_RJL),
        top_logprobs_RJL=of_chosen(out.top_logprobs_RJL),
        rank_RJ=of_chosen(out.rank_RJ),
        picked_RJK=of_chosen(out.picked_RJK),
        prompt=given.pop(SCORE.name, {}),
        extra={name: values for name, values in given.items() if values},
        prompt_extra=_of_prompts(plan, out),
        device_us=device_us,
    )


def _faults(bucket: Bucket, code_R: np.ndarray) -> dict[int, tuple[str, str]]:
    """The features that left nothing to draw, and what they did, by row."""
    return {int(r): fault_of(bucket.features, int(code_R[r])) for r in np.flatnonzero(code_R < 0)}


def _of_prompts(plan: StepPlan, out: StepOut) -> dict[str, dict[int, list[Any]]]:
    """The values that step features give prompt tokens, by name and row."""
    found: dict[str, dict[int, list[Any]]] = {}
    first = 0
    for i, row in enumerate(plan.rows):
        for name in row.prompt_features:
            part = np.asarray(out.prompt[name])[first : first + row.count]
            found.setdefault(name, {})[i] = by_token(part)
        first += 0 if row.from_slot else row.count
    return found


def _plan_rows(batch: StepBatch, n: int) -> np.ndarray:
    """The places of the plan's ``n`` rows in the bucket."""
    rows = np.arange(n)
    rows[batch.n_decode :] += batch.bucket.D - batch.n_decode
    return rows
