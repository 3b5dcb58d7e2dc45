"""Speculation on the real engine, float32: every proposer of the host, crossed with all ways of running."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jserve import LLM, SamplingParams
from jserve.config import SpeculativeOptions
from jserve.errors import ConfigError
from jserve.request_options import RequestOptions
from jserve.sampling import StructuredOutputs
from jserve.speculation.host.methods import proposer_of
from jserve.timing.step_costs import MeasuredCosts
from tests.whole import equal
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_equalities import compare

KINDS = ("ngram", "suffix", "corpus")


def proposer(kind: str, rng: random.Random):
    corpus = [rng.randrange(equal.V) for _ in range(500)] if kind == "corpus" else []
    method = "ngram" if kind == "ngram" else "suffix"
    options = SpeculativeOptions(method=method, prompt_lookup_min=1, suffix_min_match=1)
    return proposer_of(options, equal.V, corpus)


def check(runner, kind: str, seed: int) -> None:
    """A workload with copying in it, alone without drafts and together with them."""
    rng = random.Random(seed)
    requests = equal.draw_requests(rng, f"s{seed}")
    few = tuple(rng.sample(range(equal.V), 2))
    params = dataclasses.replace(requests[0].params, allowed_token_ids=few, logprobs=2)
    requests.append(dataclasses.replace(requests[0], id=f"s{seed}-few", params=params))
    alone = equal.alone(runner, requests)
    way = dataclasses.replace(equal.Way.draw(rng), drafts=False)
    drafts = proposer(kind, rng)
    preempts = seed % 3 == 0
    got = equal.run(runner, requests, way, rng, proposer=drafts, preempts=preempts)
    compare(got, alone)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_the_host_change_nothing(runner, kind: str, seed: int) -> None:
    check(runner, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_the_host_change_nothing_many(runner, kind: str, block: int) -> None:
    for seed in range(2000 + 10 * block, 2010 + 10 * block):
        check(runner, kind, seed)


PROMPTS = ["the quick brown fox the quick brown fox the", "aaaa bbbb aaaa bbbb aaaa", "dog"]
ASKED = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=30, n=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, frequency_penalty=0.4, ignore_eos=True),
    SamplingParams(
        temperature=0,
        max_tokens=40,
        logprobs=0,
        structured_outputs=StructuredOutputs(regex="(fox jumps ){3}over the (lazy|quick) dog"),
    ),
]


@pytest.fixture(scope="module")
def llm(tiny_dir):
    """One engine; a request that wants no drafts is its own control."""
    yield from drafting(tiny_dir, structured_outputs=False)


@pytest.fixture(scope="module")
def masking(tiny_dir):
    """One with the programs of masks, too."""
    yield from drafting(tiny_dir)


def drafting(tiny_dir, **options):
    """Its drafts always pay: what this machine takes for a wide step, loaded as it may be, is no matter here."""
    with LLM(str(tiny_dir), **SMALL_OPTIONS, **options, speculative=SUFFIX) as made:
        made._engine.scheduler.speculation.costs = AnyWidthAlike()
        yield made


class AnyWidthAlike(MeasuredCosts):
    def seconds(self, *size: int) -> float:
        return 1.0


def off(llm, prompts, params):
    options = RequestOptions(speculative=False)
    return llm.generate(prompts, params, options=options, use_tqdm=False)


def on(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


SUFFIX = {"method": "suffix", "num_tokens": 3, "suffix_min_match": 1, "min_speed": 0.0}


@pytest.mark.slow
def test_the_doors_give_the_same_answers(masking) -> None:
    n_accepted = 0
    for params in ASKED:
        wanted = off(masking, PROMPTS, params)
        got = on(masking, PROMPTS, params)
        for a, b in zip(got, wanted, strict=True):
            assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
            assert [c.text for c in a.outputs] == [c.text for c in b.outputs]
            assert b.metrics.num_draft_tokens == 0
            assert a.metrics.num_accepted_tokens <= a.metrics.num_draft_tokens
            n_accepted += a.metrics.num_accepted_tokens
    assert n_accepted > 0


@pytest.mark.slow
def test_stop_strings_inside_an_accepted_block_cut_the_same(llm) -> None:
    whole = off(llm, PROMPTS[0], ASKED[0])[0].outputs[0]
    for at in range(2, 20, 3):
        stop = whole.text[at : at + 2]
        params = dataclasses.replace(ASKED[0], stop=(stop,))
        wanted = off(llm, PROMPTS[0], params)[0].outputs[0]
        got = on(llm, PROMPTS[0], params)[0]
        assert (got.outputs[0].text, got.outputs[0].token_ids) == (wanted.text, wanted.token_ids)
        assert got.metrics.num_accepted_tokens <= len(wanted.token_ids)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_lengths_and_stop_ids_hold_inside_an_accepted_block(llm, n: int) -> None:
    whole = off(llm, PROMPTS[1], ASKED[0])[0].outputs[0].token_ids
    for params in (
        dataclasses.replace(ASKED[0], max_tokens=n),
        dataclasses.replace(ASKED[0], stop_token_ids=(whole[n],)),
    ):
        wanted = off(llm, PROMPTS[1], params)[0].outputs[0]
        got = on(llm, PROMPTS[1], params)[0].outputs[0]
        assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)


def test_a_request_without_drafts_has_none(llm) -> None:
    got = off(llm, PROMPTS[0], ASKED[0])[0]
    assert on(llm, PROMPTS[0], ASKED[0])[0].metrics.num_draft_tokens > 0
    assert got.metrics.num_draft_tokens == 0


@pytest.mark.parametrize(
    ("speculative", "word"),
    [
        ({"method": "eagle3"}, "needs a model"),
        ({"method": "ngram", "corpus": "x"}, "speculative.corpus means nothing"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "exceeds prompt_lookup_max"),
        ({"method": "off", "prompt_lookup_max": 5}, "means nothing to method 'off'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tiny_dir, speculative, word) -> None:
    with pytest.raises(ConfigError, match=word):
        LLM(str(tiny_dir), **SMALL_OPTIONS, speculative=speculative)
