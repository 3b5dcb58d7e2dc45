"""longrope's factors by request: each text has those of transformers, in one batch, and KV of its own kind."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from jserve.engine.engine import Engine
from jserve.model.view import Bucket
from jserve.ports import InFlight
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.types import Output, Request, StepPlan
from tests.model.test_parity import CASES
from tests.whole import drafters, equal

CASE = CASES["phi3-longrope-beyond"]
ORIGINAL = 32
"""Tokens of its original context."""
RNG = random.Random(4)
PROMPT = tuple(RNG.choices(range(equal.V), k=24))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return equal.runner_of(*CASE, buckets=(equal.BUCKETS[0], equal.BUCKETS[3]))


@pytest.fixture(scope="module")
def oracle() -> Any:
    """Log-probabilities [S, V] of a whole text by transformers, which looks at its length."""
    from tests.model import hf  # every worker collects this file, one runs it

    size = {"vocab_size": equal.V, "max_position_embeddings": 256}
    model, _ = hf.tiny(CASE[0], **size | CASE[1])

    def logprobs(ids: list[int]) -> np.ndarray:
        with hf.torch.no_grad():
            logits = model(hf.torch.tensor([ids]), use_cache=False).logits[0]
        return hf.torch.log_softmax(logits, -1).numpy()

    return logprobs


def request(id: str, prompt: tuple[int, ...], most: int | None, **fields: Any) -> Request:
    n = fields.pop("n", 1)
    params = SamplingParams(
        temperature=0.0, max_tokens=most, ignore_eos=True, logprobs=0, n=n, seed=1
    )
    return Request(id=id, prompt_ids=prompt, params=params, **fields)


class Watched:
    """A runner that tells which kinds of rows its steps had."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.limits, self.kinds = runner, runner.limits, []

    def launch(self, plan: StepPlan) -> InFlight:
        self.kinds.append({row.choice.request.is_long for row in plan.rows})
        return self.runner.launch(plan)

    def collect(self, flight: InFlight) -> Any:
        return self.runner.collect(flight)


@pytest.fixture
def engine(runner: ModelRunner) -> Engine:
    config = equal.EngineConfig.of(**equal.OPTIONS | {"prefix_caching": True})
    return Engine(Scheduler(runner.limits, config), Watched(runner))  # type: ignore[arg-type]


def outputs(engine: Engine, *requests: Request) -> dict[str, list[Output]]:
    """Of each request of one choice."""
    for one in requests:
        engine.submit(one)
    found: dict[str, list[Output]] = {}
    for out in engine.drain():
        assert out.error is None, out.error
        found.setdefault(out.request_id, []).append(out)
    return found


def tokens(parts: list[Output]) -> list[int]:
    return [t for part in parts for t in part.token_ids]


@pytest.mark.slow
def test_both_kinds_in_one_batch_are_those_of_transformers(engine: Engine, oracle: Any) -> None:
    """A text that ends where the original context does, one whose prompt is longer, one that grows beyond it."""
    asked = [
        request("short", PROMPT, ORIGINAL - len(PROMPT)),
        request("long", tuple(RNG.choices(range(equal.V), k=39)), 24),
        request("grows", PROMPT[:20], ORIGINAL - 20 + 1 + 16),
    ]
    found = outputs(engine, *asked)
    assert {True, False} in engine.runner.kinds, "no step had rows of both kinds"
    for one in asked:
        drawn = tokens(found[one.id])
        text = [*one.prompt_ids, *drawn]
        assert (len(text) > ORIGINAL) == (one.id != "short")
        logprobs = oracle(text)[len(one.prompt_ids) - 1 : -1]
        assert logprobs.argmax(-1).tolist() == drawn, one.id
        told = [t.logprob for part in found[one.id] for t in part.logprobs or ()]
        want = logprobs[np.arange(len(drawn)), drawn]
        np.testing.assert_allclose(told, want, atol=1e-4, err_msg=one.id)


def test_neither_kind_reads_pages_of_the_other(engine: Engine) -> None:
    fits, open_ended = ORIGINAL - len(PROMPT), ORIGINAL - len(PROMPT) + 1

    def cached(id: str, most: int | None) -> tuple[int, list[int]]:
        parts = outputs(engine, request(id, PROMPT, most))[id]
        return max(part.n_cached for part in parts), tokens(parts)

    first, short = cached("s1", fits)
    second, long = cached("l1", open_ended)
    assert (first, second) == (0, 0)
    assert short != long[:fits], "the prompt tells nothing apart"
    whole_pages = (len(PROMPT) - 1) // 8 * 8
    assert cached("s2", fits) == (whole_pages, short)
    assert cached("l2", open_ended) == (whole_pages, long)
    n, drawn = cached("open", None)
    assert n == whole_pages, "without max_tokens it is long"
    assert drawn[:open_ended] == long


def kinds() -> list[Request]:
    return [
        request("short", PROMPT[:12], 14, n=2),
        request("long", PROMPT[:12], 40, n=2),
        request("longer", PROMPT, 60),
        request("fits", PROMPT, 8),
    ]


def test_a_request_keeps_its_kind_however_often_it_is_preempted(runner: ModelRunner) -> None:
    alone = equal.alone(runner, kinds())
    assert alone["short", 0][0] != alone["long", 0][0][:14]
    for seed in range(2):
        way = dataclasses.replace(equal.PLAIN, overlap=1, budget=32, prefix_caching=True)
        rng = random.Random(seed)
        got = equal.run(runner, kinds(), way, rng, preempts=True)
        assert {k: v[0] for k, v in got.items()} == {k: v[0] for k, v in alone.items()}


def test_who_goes_on_behind_what_was_told_keeps_its_kind(engine: Engine) -> None:
    whole = request("a", PROMPT[:12], 40)
    drawn = tokens(outputs(engine, whole)["a"])
    for n in (3, 30):
        resumed = dataclasses.replace(whole, id=f"a{n}", said=(tuple(drawn[:n]),))
        assert tokens(outputs(engine, resumed)[f"a{n}"]) == drawn[n:]


def test_a_named_cache_is_long_and_so_are_its_requests(engine: Engine) -> None:
    made = request("c", PROMPT, 0, cache="mine")
    engine.create(made, 60.0)
    engine.drain()
    parts = outputs(engine, request("u", (*PROMPT, 5), 40, cache="mine"))["u"]
    assert max(part.n_cached for part in parts) == len(PROMPT)


def itself(arch: Any, params: Any, mesh: Any) -> Any:
    """The target as its own draft model."""
    from jserve.model.families import family_for

    family = family_for({"architectures": [CASE[0]]})
    drafter = drafters.draft_model(family, arch, arch)
    return drafters.LoadedDrafter(drafter=drafter, params=params, n_draft=3)


@pytest.mark.slow
def test_a_draft_model_has_the_factors_of_each_row(runner: ModelRunner) -> None:
    """It drafts what the target draws, for rows of either kind."""
    wide = Bucket(D=8, P=64, F=8, J=4, n_draft=3)
    drafting = drafters.Watching(equal.runner_of(*CASE, itself, (wide,)))
    way, rng = dataclasses.replace(equal.PLAIN, budget=32), random.Random(1)
    got = equal.run(drafting, kinds(), way, rng)  # type: ignore[arg-type]
    alone = equal.alone(runner, kinds())
    assert {k: v[0] for k, v in got.items()} == {k: v[0] for k, v in alone.items()}
    assert drafting.drafted > 40
    assert drafting.stood > 0.9 * drafting.drafted
