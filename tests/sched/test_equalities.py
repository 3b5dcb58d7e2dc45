"""I18-I28: tokens do not depend on batch, cache, chunks, pages, preemption or drafts."""

import random

import pytest

from jserve.sched.finalize import Finalizer
from jserve.sched.scheduler import Scheduler
from tests.sched.sched_drive import (
    VOCAB,
    Drive,
    MixedDrafts,
    RightDrafts,
    drafting,
    limits,
    request,
    tokens_of,
)

PAGE = 4


def others(seed: int, n: int = 7) -> list:
    """Random neighbours whose prompts overlap."""
    rng = random.Random(seed)
    made = []
    for i in range(n):
        prefix = rng.choice([[1, 2, 3, 4] * 2, [1, 2, 3, 4], []])
        prompt = [*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9)))]
        params = {"max_tokens": rng.randrange(1, 20), "temperature": rng.choice([0.0, 1.0])}
        made.append(request(f"o{i}", prompt, eos=(3,), **params))
    return made


def needles() -> list:
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    return [
        request("greedy", prompt, max_tokens=15),
        request("seeded", prompt, max_tokens=15, temperature=1.0, seed=5),
        request("penalised", prompt, max_tokens=15, frequency_penalty=0.5),
    ]


def needle_tokens(**kw) -> dict:
    return tokens_of(needles(), **kw)


ALONE = {(req.id, 0): tokens for req in needles() for tokens in tokens_of([req], depth=0).values()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_i18_alone_equals_batched(seed, depth):
    neighbours = others(seed)
    for at in (0, len(neighbours) // 2, len(neighbours)):
        mixed = [*neighbours[:at], *needles(), *neighbours[at:]]
        told = tokens_of(mixed, depth=depth, eos_rate=0)
        assert {key: told[key] for key in ALONE} == ALONE


@pytest.mark.parametrize("n_hit", [1, 3, 4, 5, 8, 11, 12, 13])
def test_i19_cache_on_equals_off_and_warm_equals_cold(n_hit):
    prompt = [1, 2, 3, 4] * 3 + [5]
    warm = request("warm", [*prompt[:n_hit], 9, 9], max_tokens=3)
    asked = request("asked", prompt, max_tokens=12)
    cold = tokens_of([asked], prefix_caching=False)["asked", 0]
    drive = Drive()
    for req in (warm, asked):
        drive.add(req)
        drive.run()
    assert drive.told["asked", 0].tokens == cold
    # The last page of the prompt may only be found up to its last but one token.
    assert drive.told["asked", 0].outputs[0].n_cached == min(n_hit, 12) // PAGE * PAGE


def test_i19_a_second_turn_finds_the_generated_tokens():
    drive = Drive()
    drive.add(request("turn1", [1, 2, 3, 4, 5], max_tokens=14))
    said = drive.run()["turn1", 0]
    prompt = [1, 2, 3, 4, 5, *said, 7, 7]
    drive.add(request("turn2", prompt, max_tokens=9))
    drive.run()
    assert drive.told["turn2", 0].outputs[0].n_cached == 16, "18 tokens had KV: four full pages"
    cold = tokens_of([request("turn2", prompt, max_tokens=9)])["turn2", 0]
    assert drive.told["turn2", 0].tokens == cold


@pytest.mark.one_in(3)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", range(1, 14))
def test_i20_preempted_at_any_step_equals_not(steps, depth):
    drive = Drive(depth=depth, max_prefill_chunk=4)
    for req in needles():
        drive.add(req)
    for _ in range(steps):
        drive.step()
    resources = drive.scheduler.resources
    for seq in list(resources.running):
        resources.preempt(seq)
        drive.check()
    told = drive.run()
    assert {key: told[key] for key in ALONE} == ALONE
    assert steps < 3 or resources.n_preemptions > 0


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, 9, 10, 0])
@pytest.mark.parametrize("budget", [4, 64])
def test_i21_chunk_size(chunk, budget):
    assert needle_tokens(max_prefill_chunk=chunk, max_num_batched_tokens=budget) == ALONE


@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("ample", [True, False])
def test_i22_page_and_pool_size(page_size, ample):
    just_fits = -(-24 // page_size)  # one needle computes at most 10 + 15 - 1 tokens
    n_pages = 1 + (4 * just_fits if ample else just_fits)
    assert needle_tokens(lim=limits(page_size=page_size, n_pages=n_pages)) == ALONE


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("proposer", [RightDrafts, MixedDrafts])
@pytest.mark.parametrize("n_pages", [33, 8])
def test_i23_speculation_on_equals_off(proposer, depth, n_pages):
    drive = drafting(proposer(), limits(max_drafts=3, n_pages=n_pages), depth=depth)
    for req in needles():
        drive.add(req)
    assert drive.run() == ALONE


def test_i23_right_drafts_save_steps():
    drive = drafting(RightDrafts(), depth=0)
    drive.add(request("fast", [1, 2], max_tokens=17))
    drive.run()
    assert drive.n_steps <= 1 + 16 // 4 + 1, "four tokens a step"


@pytest.mark.parametrize("seed", range(8))
def test_i25_order_of_arrival(seed):
    reqs = [r for r in others(1, 9) if r.params.greedy]
    first = tokens_of(reqs)
    random.Random(seed).shuffle(reqs)
    assert tokens_of(reqs, lim=limits(n_pages=20)) == first


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("n_prompt", [1, 4, 5, 9])
def test_i28_choice_i_is_the_request_with_seed_plus_i(n_prompt, reuse):
    prompt = list(range(n_prompt))
    many = request("many", prompt, n=5, temperature=1.0, seed=40, max_tokens=6)
    told = tokens_of([many], prefix_caching=reuse)
    for i in range(5):
        single = request("one", prompt, temperature=1.0, seed=40 + i, max_tokens=6)
        assert told["many", i] == tokens_of([single])["one", 0]
    assert len({tuple(t) for t in told.values()}) > 1


def test_i28_choices_share_the_prompt():
    drive = Drive()
    drive.add(request("many", [1, 2, 3, 4] * 3 + [5], n=4, temperature=1.0))
    drive.run()
    cached = [drive.told["many", i].outputs[0].n_cached for i in range(4)]
    assert cached == [0, 12, 12, 12]


def run_step_by_step() -> list:
    """After every step: what was said so far, and how far each one's pages can be found."""
    drive = Drive(limits(n_pages=40), depth=1)
    for i, more in enumerate([{}, {"logprobs": 2}, {"stop_token_ids": (4,)}, {"seed": 5}]):
        prompt = [i, 2, 3, 4, 5][: i + 2]
        drive.add(request(f"r{i}", prompt, max_tokens=30, temperature=1.0, **more))
    seen = []
    while drive.step():
        told = [list(t.outputs) for t in drive.told.values()]
        running = drive.scheduler.resources.running
        seen.append((told, [(s.request.id, s.lease.n_published) for s in running]))
    drive.run()
    return seen


def test_the_short_way_of_a_token_is_the_long_one(monkeypatch):
    """What ``Finalizer.advance`` does at once for a plain token is what it does for any other, at the same
    step."""
    settle, sequence, n_long = Finalizer._settle, Scheduler._sequence, 0

    def counted(self, *row):
        nonlocal n_long
        n_long += 1
        return settle(self, *row)

    def never_plain(self, *request):
        seq = sequence(self, *request)
        seq.plain = False
        return seq

    monkeypatch.setattr(Finalizer, "_settle", counted)
    some, n_some = run_step_by_step(), n_long
    monkeypatch.setattr(Scheduler, "_sequence", never_plain)
    assert run_step_by_step() == some
    assert n_long - n_some > n_some + 20, "the test means nothing without plain tokens"
