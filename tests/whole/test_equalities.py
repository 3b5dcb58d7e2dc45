"""Design.md section 10 on the real engine: however requests are run, each gets what it gets alone."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from jserve.model.mesh import group_meshes
from jserve.sampling import SamplingParams
from jserve.sharding import Sharding
from jserve.types import Request
from tests.whole import equal

slow = pytest.mark.slow
TOLERANCE = 2e-4
"""Of log-probabilities; tokens and finish reasons must be equal."""


def compare(got, wanted) -> None:
    assert got.keys() == wanted.keys()
    for key, (tokens, end, logprobs, scores) in wanted.items():
        assert got[key][:2] == (tokens, end), f"{key}: {got[key][:2]} is not {(tokens, end)}"
        np.testing.assert_allclose(got[key][2], logprobs, atol=TOLERANCE)
        if scores is not None:
            ids, values = zip(*scores[1:], strict=True) if len(scores) > 1 else ((), ())
            got_ids, got_values = (
                zip(*got[key][3][1:], strict=True) if len(scores) > 1 else ((), ())
            )
            assert got_ids == ids
            np.testing.assert_allclose(got_values, values, atol=2e-3)


def check_workload(runner, seed: int, other=None, *, any_bucket: bool = True) -> None:
    """``any_bucket``: steps take any that fits of ``equal.BUCKETS``, all of which the runner has; else the least of
    those that it has."""
    rng = random.Random(seed)
    requests = equal.draw_requests(rng, f"w{seed}")
    alone = equal.alone(runner, requests)
    truth = {key: answer[0] for key, answer in alone.items()}
    way = equal.Way.draw(rng)
    way = way if any_bucket else dataclasses.replace(way, random_buckets=False)
    compare(equal.run(other or runner, requests, way, rng, truth), alone)


def test_draws_are_not_what_greedy_rows_say(runner) -> None:
    """Where one token has all the probability, the equalities here would say nothing of sampling."""

    def said(tag: str, temperature: float) -> list[equal.Answer]:
        asked = SamplingParams(temperature=temperature, seed=7, max_tokens=24, logprobs=0)
        prompts = [tuple(range(i, i + 9)) for i in range(4)]
        requests = [
            Request(id=f"{tag}{i}", prompt_ids=ids, params=asked) for i, ids in enumerate(prompts)
        ]
        return list(equal.alone(runner, requests).values())

    for drawn, greedy in zip(said("drawn", 1.0), said("greedy", 0.0), strict=True):
        assert drawn[0] != greedy[0]
        assert np.median(drawn[2]) < -0.5
        assert len(set(greedy[0])) > 1


@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", range(20))
def test_any_way_of_running_equals_alone(runner, seed: int) -> None:
    check_workload(runner, seed)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=slow) for n in range(5, 60))])
def test_what_was_said_goes_on_as_it_would_have(runner, seed: int) -> None:
    """Every choice is cut anywhere, and the rest is run as another attempt, in any way of running."""
    rng = random.Random(seed)
    requests = equal.draw_requests(rng, f"s{seed}")
    alone = equal.alone(runner, requests)
    again, rest = [], {}
    for r in requests:
        cuts = {i: rng.randrange(len(alone[r.id, i][0])) for i in range(r.params.n)}
        said = tuple(tuple(alone[r.id, i][0][:n]) for i, n in cuts.items())
        again.append(dataclasses.replace(r, attempt=1, said=said))
        for i, n in cuts.items():
            tokens, end, logprobs, scores = alone[r.id, i]
            rest[r.id, i] = tokens[n:], end, logprobs[n:], None if n else scores
    compare(
        equal.run(runner, again, equal.Way.draw(rng), rng, {k: v[0] for k, v in alone.items()}),
        rest,
    )


@pytest.fixture(scope="module")
def runner_of_8_bits():
    return equal.make_runner(kv_cache_dtype="fp8_e4m3")


@pytest.mark.slow
def test_any_way_of_running_equals_alone_in_8_bits(runner_of_8_bits) -> None:
    """KV of a token is rounded once, whoever computes it and whenever. (``tests/kv/test_real_reuse``
    has what is quick of this.)"""
    for seed in range(2000, 2050):
        check_workload(runner_of_8_bits, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_any_way_of_running_equals_alone_many(runner, block: int) -> None:
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        check_workload(runner, seed)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_equals_one_device(runner, tp: int) -> None:
    sharded = equal.make_runner(tp)
    for seed in range(50, 52):
        check_workload(runner, seed, sharded)


XY = {"x": 2, "y": 2}
BOTH = {"kv_heads": ["x", "y"], "ffn": ["x", "y"], "vocab": ["x", "y"]}
SHARDINGS = {
    "heads on x, ffn on y": {"mesh": XY, "rules": {"kv_heads": "x", "ffn": "y", "vocab": "y"}},
    "both axes": {"mesh": XY, "rules": {key: ["y", "x"] for key in ("kv_heads", "ffn", "vocab")}},
    "kv heads repeated": {
        "mesh": {"x": 2, "y": 4},
        "rules": {"kv_heads": ["x", "y"], "ffn": "y"},
    },
    "vocabulary alone": {"mesh": {"x": 4}, "rules": {"vocab": "x"}},
    "split logits": {"mesh": XY, "rules": BOTH, "logits": "split"},
    "split residual": {"mesh": XY, "rules": BOTH, "residual": "split"},
    "sums of weights": {"mesh": XY, "rules": BOTH, "sums": "weights"},
    "all three": {
        "mesh": {"tp": 4},
        "logits": "split",
        "residual": "split",
        "sums": "weights",
    },
    "2D, width": {
        "mesh": XY,
        "rules": {"embed": "x", "kv_heads": "y", "ffn": "y", "vocab": "y"},
    },
    "groups of devices": {"mesh": {"dp": 2, **XY}, "rules": BOTH, "logits": "split"},
    "auto": {"mesh": XY, "mode": "auto", "rules": {"kv_heads": "x", "ffn": ["x", "y"]}},
    "auto, 2D": {
        "mesh": XY,
        "mode": "auto",
        "rules": {"embed": "x", "kv_heads": "y", "ffn": "y", "vocab": "y"},
    },
    "auto, by path": {
        "mesh": XY,
        "mode": "auto",
        "params": {"layers/0/down": [None, ["x", "y"]], "layers/1/qkv": [None, None, None, "x"]},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDINGS)
def test_any_sharding_equals_one_device(runner, name: str) -> None:
    sharding = Sharding.of(SHARDINGS[name])
    sharded = [
        equal.make_runner(sharding=sharding.group, mesh=mesh) for mesh in group_meshes(sharding)
    ]
    for seed in range(60, 62):
        check_workload(runner, seed, sharded)


@pytest.mark.slow
def test_nothing_compiles_after_ready(runner) -> None:
    """500 requests of every kind in one run, in every bucket."""
    before = runner.programs.late_compiles
    rng = random.Random(7)
    requests = [r for i in range(100) for r in equal.draw_requests(rng, f"c{i}")][:500]
    way = dataclasses.replace(equal.PLAIN, overlap=1, prefix_caching=True, random_buckets=True)
    answers = equal.run(runner, requests, way, rng)
    assert len({request for request, _ in answers}) == 500
    assert runner.programs.late_compiles == before
