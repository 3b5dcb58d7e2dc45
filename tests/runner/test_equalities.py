"""The equalities of the engine, on the real runner in float32: who else runs must not change what a
row draws."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from jserve.model.features import MASK, SCORE
from jserve.model.view import Bucket
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from tests.runner import whole
from tests.runner.harness import ARCH, SMALL, Job, Rig, jobs, make_runner, prompts, shared

BUCKETS = (
    Bucket(D=2, P=48, F=2),
    Bucket(D=6, P=48, F=6),
    Bucket(D=6, P=48, F=4, J=4),
    Bucket(D=3, P=50, F=3, features=(MASK, SCORE)),
)

MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.9, "logit_bias": {3: 5.0, 7: -100.0}, "bad_token_ids": ((3, 3), (5,))},
]


def runner() -> ModelRunner:
    return shared()


def mixed_jobs(seed: int) -> list[Job]:
    """One job per kind of sampling."""
    plain = jobs(len(MIXED), seed)
    return [
        replace(job, params=SamplingParams(max_tokens=64, **kw))
        for job, kw in zip(plain, MIXED, strict=True)
    ]


@lru_cache(maxsize=4)
def alone(seed: int) -> tuple[tuple[int, ...], ...]:
    """Each of ``mixed_jobs`` on its own, prompt whole."""
    return tuple(tuple(Rig(runner(), seed=seed).run([job])[0]) for job in mixed_jobs(seed))


def as_tuples(outputs: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(o) for o in outputs)


def test_greedy_tokens_are_those_of_the_whole_text_run_anew():
    params = runner().params
    for job in jobs(3, seed=9, temperature=0.0):
        assert Rig(runner()).run([job])[0] == whole.greedy(params, job.prompt, job.n)


@pytest.mark.parametrize("seed", [1, 2])
def test_batched_equals_alone(seed):
    assert as_tuples(Rig(runner(), seed=seed + 50).run(mixed_jobs(seed))) == alone(seed)


@pytest.mark.parametrize("chunk", [1, 7, 8, 9, -1])
def test_chunked_equals_whole(chunk):
    assert as_tuples(Rig(runner(), chunk=chunk).run(mixed_jobs(1))) == alone(1)


@pytest.mark.parametrize("depth", [1, 2])
def test_overlapped_equals_not(depth):
    rig = Rig(runner(), depth=depth, pick=0.7, chunk=-1, seed=4)
    assert as_tuples(rig.run(mixed_jobs(2))) == alone(2)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 44), marks=pytest.mark.slow)])
def test_random_traces_equal_alone(seeds):
    """Six workloads a seed."""
    for seed in seeds:
        rig = Rig(runner(), seed=seed, chunk=-1, depth=seed % 3, pick=0.6)
        assert as_tuples(rig.run(mixed_jobs(seed))) == alone(seed), seed


def test_cut_off_and_started_again_equals_uninterrupted():
    """Preemption by recompute: the output so far becomes part of what is given, in another slot and
    pages."""
    job = mixed_jobs(1)[3]
    want = alone(1)[3]
    for cut in (1, 3, 7):
        rig = Rig(runner(), seed=cut)
        (live,) = rig._admit([job])
        live.seq.tokens.extend(want[:cut])
        live.given = len(live.seq.tokens)
        rig._admit = lambda _, live=live: [live]  # type: ignore[method-assign]
        assert tuple(rig.run([job])[0]) == want


RIGHT_RANDOM_WRONG = ["right", "wrong", "random", "half"]


def speculating() -> ModelRunner:
    return shared(BUCKETS, max_drafts=3)


def drafter(kind: str, outputs: dict[str, tuple[int, ...]]):
    """Drafts that are right, wrong, random, or right and then wrong, given what will come out."""
    rng = np.random.default_rng(3)

    def propose(seq, most):
        coming = list(outputs[seq.request.id][seq.n_output : seq.n_output + most])
        if kind == "random":
            return rng.integers(0, ARCH.V, rng.integers(0, most + 1)).tolist()
        if kind == "wrong":
            return [(t + 1) % ARCH.V for t in coming]
        return coming[:1] + [(t + 1) % ARCH.V for t in coming[1:]] if kind == "half" else coming

    return propose


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", RIGHT_RANDOM_WRONG)
def test_speculative_equals_not(kind):
    want = alone(1)
    outputs = {str(i): o for i, o in enumerate(want)}
    rig = Rig(speculating(), drafter=drafter(kind, outputs), chunk=-1, seed=5)
    got = rig.run(mixed_jobs(1))
    assert as_tuples(got) == want
    mean = float(np.mean(rig.accepted))
    assert mean > 2 if kind == "right" else mean < 2.1
    if kind == "wrong":
        assert mean == 1


def test_every_bucket_gives_the_same_tokens():
    many = shared(BUCKETS, max_drafts=3)
    for bucket in BUCKETS:
        rig = Rig(many, bucket=lambda plan, b=bucket: b)
        for i in (0, 1, 3, 5):
            assert tuple(rig.run([mixed_jobs(1)[i]])[0]) == alone(1)[i], bucket


@pytest.mark.one_in(8)
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_tensor_parallel_equals_one_device(tp):
    sharded = make_runner(SMALL[1:], tp=tp)
    assert as_tuples(Rig(sharded, seed=3).run(mixed_jobs(1))) == alone(1)


def test_prompt_logprobs_are_those_of_the_whole_text():
    scoring = shared(BUCKETS, max_drafts=3)
    some = [
        Job(prompt=p, n=2, params=SamplingParams(temperature=0.0, prompt_logprobs=3))
        for p in prompts(3, seed=4, low=2)
    ]
    rig = Rig(scoring, chunk=9)
    rig.run(some)
    for live in rig.lives:
        tokens = list(live.job.prompt)
        x = whole.all_logits(scoring.params, tokens).astype(np.float64)
        x -= np.log(np.exp(x).sum(1, keepdims=True))
        want = [x[i, t] for i, t in enumerate(tokens[1:])]
        got = np.concatenate([s.logprob_n for s in live.prompt_scores])
        np.testing.assert_allclose(got, want, atol=1e-4)
        ranks = [1 + int((x[i] > x[i, t]).sum()) for i, t in enumerate(tokens[1:])]
        assert np.concatenate([s.rank_n for s in live.prompt_scores]).tolist() == ranks
        assert [s.start for s in live.prompt_scores] == list(range(0, len(tokens) - 1, 9))
        best = np.concatenate([s.top_ids_nL for s in live.prompt_scores])
        np.testing.assert_array_equal(best[:, 0], np.argmax(x[:-1], axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_named_ids_and_ranks_of_drawn_tokens(tp):
    """Beside rows that name other ids, none, or no log-probabilities; the vocabulary whole or sharded."""
    one = runner() if tp == 1 else make_runner(SMALL, tp=tp)
    hot = {"temperature": 2.0, "max_tokens": 64}
    asked = [
        {"logprob_token_ids": (7, 100, 7, 0)},
        {"logprobs": 0, "logit_bias": {9: 3.0}},
        {"logprob_token_ids": tuple(range(128))},
        {},
    ]
    some = [
        Job(prompt=p, n=6, params=SamplingParams(**hot, **fields), seed=i)
        for i, (p, fields) in enumerate(zip(prompts(4, seed=8, low=2), asked, strict=True))
    ]
    rig = Rig(one, seed=2)
    found = rig.run(some)
    seen = 0
    for job, live, tokens in zip(some, rig.lives, found, strict=True):
        x = whole.all_logits(one.params, [*job.prompt, *tokens]).astype(np.float64)
        logprobs = x - np.log(np.exp(x).sum(1, keepdims=True))
        drawn = [(result, r) for result, r in live.rows if result.n_ok_R[r]]
        for k, (result, r) in enumerate(drawn if job.params.shows_logprobs else []):
            at = len(job.prompt) - 1 + k
            assert result.rank_RJ is not None
            assert result.picked_RJK is not None
            # The reference has other rounding: a near tie may count or not.
            margin = np.sort(x[at] - x[at, tokens[k]])
            n_greater, n_close = int((margin > 1e-4).sum()), int((np.abs(margin) <= 1e-4).sum())
            assert 1 + n_greater <= result.rank_RJ[r, 0] <= n_greater + n_close
            seen += result.rank_RJ[r, 0] > 20
            ids = list(job.params.logprob_token_ids or ())
            got = result.picked_RJK[r, 0, : len(ids)]
            np.testing.assert_allclose(got, logprobs[at, ids], atol=1e-4)
    assert seen > 2, "no token was drawn outside the top 20"


@pytest.mark.slow
def test_without_picks_programs_are_those_of_an_engine_that_has_none():
    """The step of a server that refuses logprob_token_ids counts no ranks and gathers nothing."""
    off = make_runner(SMALL, max_logprob_token_ids=0)
    assert off.state.slots.pick_CK is None
    flight = Rig(off)
    flight.run([Job(prompt=[5, 6], n=2, params=SamplingParams(logprobs=2), seed=1)])
    result, _ = flight.lives[0].rows[-1]
    assert (result.rank_RJ, result.picked_RJK) == (None, None)
    assert result.top_ids_RJL is not None


def test_logprobs_of_drawn_tokens():
    params = SamplingParams(temperature=1.0, top_k=5, logprobs=4)
    rig = Rig(runner())
    (tokens,) = rig.run([Job(prompt=[5, 6, 7], n=4, params=params, seed=3)])
    text = [5, 6, 7, *tokens]
    x = whole.all_logits(runner().params, text).astype(np.float64)
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    for k, (result, r) in enumerate(rig.lives[0].rows):
        at = 2 + k
        assert result.logprob_RJ[r, 0] == pytest.approx(x[at, tokens[k]], abs=1e-4)
        assert result.top_ids_RJL is not None
        assert result.top_ids_RJL[r, 0, 0] == np.argmax(x[at])
