"""Features of a step: what a bucket that lists them has, and what one without them has not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jserve.model.feature import StepFeature
from jserve.model.features import FEATURES, MASK, SCORE
from jserve.model.features.score import Scores
from jserve.model.view import Bucket, StepDims, layout
from jserve.runner.programs import step_name
from jserve.sampling import SamplingParams
from jserve.types import Choice, Request, RowPlan

DIMS = StepDims(C=4, M=4, Z=8, V=70)
PLAIN = Bucket(D=2, P=12, F=3, J=2)
SUBSETS = [s for n in range(len(FEATURES) + 1) for s in itertools.combinations(FEATURES, n)]


def names(bucket: Bucket) -> list[str]:
    return [f.name for f in layout(bucket, DIMS, {})]


@pytest.mark.parametrize("features", SUBSETS, ids=str)
def test_a_buffer_has_the_fields_of_its_features_and_no_others(
    features: tuple[StepFeature, ...],
) -> None:
    bucket = PLAIN.with_also(*reversed(features))
    own = [f.name for feature in features for f in feature.fields(bucket, DIMS)]
    assert names(bucket) == [*names(PLAIN), *own]
    assert len(set(names(bucket))) == len(names(bucket))


def test_features_are_known_by_their_names() -> None:
    assert list(FEATURES) == sorted(FEATURES)
    assert PLAIN.with_also(SCORE).with_also(MASK, SCORE).features == (MASK, SCORE)
    assert repr(PLAIN.with_also(MASK).features) == "(mask,)"
    assert step_name(PLAIN.with_also(SCORE, MASK)) == "step_D2_P12_F3_J2_mask_score"


def row(*, tokens: int = 0, **rest: Any) -> RowPlan:
    request = Request(id="a", prompt_ids=(1,) * 9, params=SamplingParams())
    return RowPlan(
        choice=Choice(request=request, index=0, seed=0),
        slot=0,
        start=0,
        count=tokens or 1,
        from_slot=not tokens,
        tokens=(1,) * tokens,
        **rest,
    )


def test_scores_are_those_of_the_rows_own_tokens() -> None:
    rows = [row(), row(tokens=3), row(tokens=4, targets=(5, 6, 7)), row(tokens=2, targets=(8, 9))]
    assert SCORE.needed(rows)
    assert not SCORE.needed(rows[:2])
    at_P = np.arange(12)
    scores: Any = Scores(at_P + 0.5, at_P, at_P[:, None], at_P[:, None] + 0.5)
    found = SCORE.unpack(scores, rows, range(len(rows)))
    assert {i: list(s.rank_n) for i, s in found.items()} == {2: [3, 4, 5], 3: [7, 8]}
    assert list(found[2].top_logprobs_nL[:, 0]) == [3.5, 4.5, 5.5]


def test_targets_stand_at_their_rows_first_tokens() -> None:
    rows = [row(), row(tokens=4, targets=(5, 6, 7))]
    views = {"target_T": np.zeros(16, np.int32), "first_R": np.array([0, 2, 4, 8, 0])}
    SCORE.pack(views, rows, [0, 3], DIMS)
    assert views["target_T"].tolist() == [-1] * 8 + [5, 6, 7] + [-1] * 5
    with pytest.raises(ValueError, match="target out of range"):
        SCORE.pack(views, [row(tokens=1, targets=(70,))], [3], DIMS)
