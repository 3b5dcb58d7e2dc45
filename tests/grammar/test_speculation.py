"""Drafts under a grammar: at every reject position the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jserve.grammar.guide import TokenGuide
from jserve.grammar.thought import Thought
from jserve.sampling import StructuredOutputs
from jserve.testing import FakeProposer
from jserve.types import Sequence
from tests.grammar.kit import (
    CITY,
    EOS,
    VOCAB,
    compiler,
    engine,
    finish,
    guides,
    ids,
    request,
    run,
    thinking,
    tokens,
)

OBJECT = StructuredOutputs(json_object=True)
LIST = StructuredOutputs(regex=r"(red|blue|city)(, (red|blue|city))*")


class Oracle(FakeProposer):
    """Drafts that are right for ``right`` tokens and then wrong, or past the end."""

    def __init__(self, answers: dict[str, list[int]], right: int) -> None:
        self.answers, self.right = answers, right
        self.n_asked = 0

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        self.n_asked += 1
        answer = self.answers[seq.request.id]
        at = seq.n_output + seq.in_flight
        true = answer[at : at + self.right]
        wrong = [(t + 1) % VOCAB for t in answer[at + self.right : at + most]]
        return (*true, *wrong)[:most]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize("spec", [CITY, OBJECT, LIST])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_every_reject_position_gives_the_same_tokens(spec, right, fast_forward):
    asked = [request(f"r{i}", spec, temperature=1.0, seed=i, max_tokens=60) for i in range(3)]
    asked.append(request("free", temperature=1.0, seed=9, max_tokens=40))
    plain = run(*asked)
    answers = {r.id: tokens(plain, r.id) for r in asked}
    oracle = Oracle(answers, right)
    drafted = run(*asked, proposer=oracle, max_drafts=4, fast_forward=fast_forward)
    for r in asked:
        assert tokens(drafted, r.id) == answers[r.id]
        assert finish(drafted, r.id) == finish(plain, r.id)
    assert oracle.n_asked


def test_good_drafts_save_steps_under_a_grammar():
    asked = request("a", CITY, temperature=1.0, seed=4, max_tokens=60)
    answers = {"a": tokens(run(asked), "a")}
    plain = engine(fast_forward=False)
    quick = engine(fast_forward=False, proposer=Oracle(answers, 4), max_drafts=4)
    for made in (plain, quick):
        made.submit(asked)
        made.drain()
    assert quick.n_steps < 0.5 * plain.n_steps


def drained(made, *asked):
    for each in asked:
        made.submit(each)
    return made.drain()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [CITY, OBJECT])
def test_forced_tokens_are_drafts_that_stand(spec, most, overlap):
    """Where they are not put in for nothing, since their log-probabilities are wanted. The token that
    ends the output is forced too and no draft: nothing follows it."""
    asked = [
        request(f"r{i}", spec, temperature=1.0, seed=i, max_tokens=60, logprobs=1) for i in range(3)
    ]
    plain, quick = engine(overlap=overlap), engine(overlap=overlap, max_drafts=most)
    wanted, got = drained(plain, *asked), drained(quick, *asked)
    for r in asked:
        assert tokens(got, r.id) == tokens(wanted, r.id)
        assert finish(got, r.id) == finish(wanted, r.id)
    counters = quick.scheduler.counters()
    name = "spec_decode_num_{}_tokens_total{{proposer=grammar,lane=standard}}"
    if spec is CITY:
        assert counters[name.format("draft")] == counters[name.format("accepted")] > 0
        # Rows, not steps: how many rows share a step depends on whose masks are ready in time.
        assert sum(bool(p.token_ids) for p in got) < sum(bool(p.token_ids) for p in wanted)
        assert all(len(p.token_ids) == len(p.logprobs) for p in got if p.token_ids)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_drafter_on_the_device_leaves_guided_rows_alone(overlap):
    """Their masks follow the drafts, which only the device knows; others have theirs."""
    asked = [request(f"r{i}", CITY, temperature=1.0, seed=i, max_tokens=60) for i in range(2)]
    asked.append(request("free", temperature=1.0, seed=9, max_tokens=80))
    plain = run(*asked)
    made = engine(overlap=overlap, max_drafts=4, device_drafts=4)
    got = drained(made, *asked)
    for r in asked:
        assert tokens(got, r.id) == tokens(plain, r.id)
    by_id = {r.id: sum(out.n_accepted for out in got if out.request_id == r.id) for r in asked}
    assert by_id["free"] > 0
    assert by_id["r0"] == by_id["r1"] == 0


@pytest.mark.parametrize("budget", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("right", [0, 2, 4])
def test_drafts_across_the_end_of_a_thought(budget, right):
    asked = request(
        "a",
        CITY,
        thinking=thinking(inside=True),
        thinking_token_budget=budget,
        temperature=1.0,
        seed=6,
    )
    plain = run(asked)
    answers = {"a": tokens(plain, "a")}
    drafted = run(asked, proposer=Oracle(answers, right), max_drafts=4)
    assert tokens(drafted, "a") == answers["a"]
    end = ids("</think>\n\n")
    assert answers["a"][budget : budget + len(end)] == list(end)


def guide(spec: StructuredOutputs, *, fast: bool = False) -> TokenGuide:
    return guides().guide(request("a", spec, logprobs=None if fast else 0), 120)  # type: ignore[return-value]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(0, 30), st.data())
def test_masks_with_drafts_are_the_masks_one_step_at_a_time(drafts, n_steps, data):
    walked = guide(CITY)
    for _ in range(n_steps):
        allowed = _allowed(walked)
        if allowed == [EOS]:
            return
        walked.take([data.draw(st.sampled_from([t for t in allowed if t != EOS]))])
    # Half of the drafts follow the grammar, so that the walk gets somewhere.
    path = guide(CITY)
    path = _copy(walked)
    good: list[int] = []
    for draft in drafts:
        options = [t for t in _allowed(path) if t != EOS]
        if not options:
            break
        good.append(options[draft % len(options)])
        path.take([good[-1]])
    before = _allowed(walked)
    kept = list(walked.trim([*good, *drafts]))
    assert kept[: len(good)] == good
    masks = walked.mask(kept)
    assert masks is not None
    assert masks.shape[0] == 1 + len(kept)
    assert _allowed(walked) == before, "looking ahead moved the guide"
    single = _copy(walked)
    for j, token in enumerate([*kept, None]):
        one = single.mask(())
        assert one is not None
        np.testing.assert_array_equal(masks[j], one[0])
        if token is not None:
            single.take([token])


def _copy(walked: TokenGuide) -> TokenGuide:
    made = TokenGuide(walked.kit, compiler().compile(CITY), Thought(tags=None), fast=False)
    assert made.grammar is not None
    assert walked.grammar is not None
    for token in walked.grammar._taken:
        made.grammar.accept(token)
    made.mask_W = None
    return made


def _allowed(walked: TokenGuide) -> list[int]:
    mask = walked.mask(())
    assert mask is not None
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_the_compiler_is_shared_by_copies_only():
    compiled = compiler().compile(CITY)
    first = compiled.mask_W.copy()
    for _ in range(3):
        guide(CITY).take(
            [int(np.flatnonzero(np.unpackbits(first.view(np.uint8), bitorder="little"))[0])]
        )
    np.testing.assert_array_equal(compiler().compile(CITY).mask_W, first)
