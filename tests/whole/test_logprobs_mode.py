"""Log-probabilities of what is drawn from, on the real engine."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jserve.sampling import SamplingParams
from jserve.types import Request
from tests.whole import equal
from tests.whole.test_equalities import check_workload

IDS = (10, 11, 12, 13, 14)


@pytest.fixture(scope="module")
def processed():
    return equal.make_runner(logprobs_mode="processed_logprobs")


def entries(runner, **fields):
    params = SamplingParams(max_tokens=8, seed=3, logprob_token_ids=IDS, **fields)
    request = Request(id="a", prompt_ids=(5, 6, 7), params=params)
    outputs = equal.outputs_of(runner, [request], equal.PLAIN, random.Random(0))
    return [entry for out in outputs for entry in out.logprobs or ()]


@pytest.mark.slow
@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_they_follow_from_the_raw_ones(runner, processed, heat) -> None:
    """Five ids are allowed: softmax of their raw values over the temperature, which a greedy request has not."""
    asked = {"temperature": heat, "allowed_token_ids": IDS, "logprobs": 0}
    raw, got = entries(runner, **asked), entries(processed, **asked)
    assert [e.token for e in raw] == [e.token for e in got]
    for a, b in zip(raw, got, strict=True):
        x = np.array(a.top_logprobs) / (heat or 1.0)
        want = x - np.log(np.exp(x).sum())
        np.testing.assert_allclose(b.top_logprobs, want, atol=1e-4)
        assert np.abs(want - a.top_logprobs).max() > 1e-3, "both are the raw ones"
        assert b.logprob == pytest.approx(want[IDS.index(b.token)], abs=1e-4)


@pytest.mark.slow
def test_any_way_of_running_equals_alone(processed) -> None:
    for seed in range(5000, 5012):
        check_workload(processed, seed)
