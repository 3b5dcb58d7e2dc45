"""Drafters on the device under the real scheduler: however requests are run and whatever drafts for
them, each gets what it gets alone and undrafted. Pages are short, prefixes shared, chunks odd."""

from __future__ import annotations

import dataclasses
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from jserve import LLM, SamplingParams, build
from jserve.errors import ConfigError
from jserve.model.draft_model import draft_model
from jserve.model.eagle3 import eagle3
from jserve.model.families import family_for
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.ports import InFlight
from jserve.runner.drafts import Speculation
from jserve.runner.runner import ModelRunner
from jserve.types import StepPlan
from jserve.weights.dummy import draw_all
from tests.whole import equal
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_equalities import compare

TREE = (0, 0, 1)


def itself(arch: Any, params: Any, mesh: Any) -> Speculation:
    """The target as its own draft model."""
    drafter = draft_model(family_for(equal.TINY), arch, arch, mesh.shape["tp"])
    return Speculation(drafter=drafter, params=params, n_draft=3)


def head(arch: Any, params: Any, mesh: Any) -> Speculation:
    """An EAGLE-3 head of random weights: its trees are wrong but for a branch now and then."""
    own = dataclasses.replace(arch, L=1, V=arch.V)
    drafter = eagle3(own, arch, taps=(0, 1, 2), own_embed=False, mapped=False, tp=mesh.shape["tp"])
    weights = draw_all(drafter.specs(mesh.shape["tp"]), 5, mesh, ShardRules(), np.float32)
    return Speculation(drafter=drafter, params=weights, n_draft=len(TREE), tree=TREE)


@lru_cache
def drafting(kind: str, tp: int = 1) -> ModelRunner:
    make, tree = (itself, ()) if kind == "itself" else (head, TREE)
    wide = Bucket(D=8, P=64, F=8, J=4, n_draft=3, tree=tree, score=True)
    return equal.make_runner(tp, make, (wide,))


class Counting:
    """A runner that counts what became of its drafts."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.limits = runner, runner.limits
        self.drafted = self.stood = 0

    def launch(self, plan: StepPlan) -> InFlight:
        return self.runner.launch(plan)

    def collect(self, flight: InFlight) -> Any:
        result = self.runner.collect(flight)
        for row, n_ok in zip(flight.plan.rows, result.n_ok_R.tolist(), strict=True):
            self.drafted += len(row.drafts)
            self.stood += n_ok - 1 if row.drafts else 0
        return result


def check_workload(
    plain: ModelRunner, kind: str, seed: int, tp: int = 1, *, preempts: bool = False
) -> Counting:
    rng = random.Random(seed)
    requests = equal.draw_requests(rng, f"d{seed}")
    alone: dict = {}
    for request in requests:
        alone |= equal.run(plain, [request], equal.PLAIN, random.Random(0))
    way = dataclasses.replace(equal.Way.draw(rng), drafts=False, random_buckets=False)
    device: Any = Counting(drafting(kind, tp))
    compare(equal.run(device, requests, way, rng, preempts=preempts), alone)
    return device


@pytest.mark.parametrize("kind", ["itself", "head"])
def test_any_way_of_running_equals_alone(runner, kind: str) -> None:
    """Chunks, cache hits, preemption, overlap, penalties, logprobs, n, stops: six workloads."""
    stood = [check_workload(runner, kind, seed).stood for seed in range(300, 306)]
    assert sum(stood) > (100 if kind == "itself" else 0)


@pytest.mark.parametrize("kind", ["itself", "head"])
def test_preempted_at_every_step_equals_alone(runner, kind: str) -> None:
    for seed in (400, 401):
        check_workload(runner, kind, seed, preempts=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["itself", "head"])
def test_any_way_of_running_equals_alone_many(runner, kind: str) -> None:
    for seed in range(2000, 2060):
        check_workload(runner, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["itself", "head"])
def test_sharded_equals_one_device(runner, kind: str) -> None:
    for seed in range(60, 64):
        check_workload(runner, kind, seed, tp=2)


def test_cached_prefixes_hold_what_the_drafter_needs(runner) -> None:
    """Prompts whose KV is all but found in the cache draft as well as those that computed it."""
    rng = random.Random(1)
    (request,) = [r for r in equal.draw_requests(rng, "c") if r.params.n == 1][:1]
    params = dataclasses.replace(
        request.params,
        temperature=0.0,
        max_tokens=16,
        stop_token_ids=(),
        logprobs=None,
        prompt_logprobs=None,
        seed=1,
    )
    prompt = tuple(rng.randrange(equal.V) for _ in range(60))
    asked = [
        dataclasses.replace(request, id=f"c{i}", params=params, prompt_ids=prompt) for i in range(4)
    ]
    way = dataclasses.replace(equal.PLAIN, prefix_caching=True, budget=64)
    device: Any = Counting(drafting("itself"))
    equal.run(device, asked, way, rng)
    assert device.drafted > 30
    assert device.stood == device.drafted


# --- through the door


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(tiny_dir) -> None:
    options = {"method": "draft", "model": str(build.shipped("jserve-mini-draft"))}
    with pytest.raises(ConfigError, match="vocab_size is 2048, the target's is 320") as caught:
        LLM(str(tiny_dir), **SMALL_OPTIONS, speculative=options)
    assert caught.value.field == "speculative.model"


def test_a_draft_model_that_is_not_there_is_refused(tiny_dir) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_dir), **SMALL_OPTIONS, speculative={"method": "draft"})
    assert caught.value.field == "speculative.model"


@pytest.mark.slow
def test_the_shipped_pair_says_what_the_target_says_alone() -> None:
    """Greedy, seeded and penalised, all at once; the draft model is right more often than not."""
    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64,
               "max_model_len": 256, "compile_cache": "", "prompt_logprobs": False,
               "structured_outputs": False}  # fmt: skip
    asked = [
        "Hello! Who are you?",
        "What is 12 + 30?",
        "Tell me a story about a fox.",
        "Name a colour.",
    ]
    messages = [[{"role": "user", "content": text}] for text in asked]
    params = [
        SamplingParams(temperature=0, max_tokens=32),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32),
        SamplingParams(temperature=1.0, seed=4, max_tokens=48, repetition_penalty=1.1),
        SamplingParams(temperature=0, max_tokens=32, stop=["."]),
    ]
    drafter = {"method": "draft", "model": str(build.shipped("jserve-mini-draft")), "num_tokens": 3,
               "min_speed": 0.0}  # fmt: skip
    said = []
    for extra in ({}, {"speculative": drafter}):
        with LLM(**options, **extra) as llm:
            said.append([out.outputs[0].token_ids for out in llm.chat(messages, params)])
            counters = llm._engine.stats().values if extra else {}
    assert said[0] == said[1]
    drafted = sum(
        v for k, v in counters.items() if k.startswith("spec_decode_num_draft_tokens_total")
    )
    assert drafted > 0, counters
