"""Thoughts: budgets that end them cleanly, and structures that begin after them."""

from __future__ import annotations

import json

import jsonschema
import pytest

from jserve.grammar.thought import Phase, Thought
from jserve.grammar.vocab import Vocabulary, blanks, vocabulary
from jserve.text.parsers.reasoning import State, ThoughtParser
from tests.grammar.kit import (
    CITY,
    EOS,
    VOCAB,
    engine,
    finish,
    guides,
    ids,
    request,
    run,
    text,
    thinking,
    tokenizer,
    tokens,
)

END = list(ids("\n</think>\n\n"))


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_budget_ends_the_thought_there_and_the_answer_goes_on(budget, overlap):
    free = request("a", thinking=thinking(inside=True), max_tokens=50)
    limited = request(
        "a", thinking=thinking(inside=True), thinking_token_budget=budget, max_tokens=50
    )
    before = tokens(run(free), "a")
    after = run(limited, overlap=overlap)
    drawn = tokens(after, "a")
    assert drawn[:budget] == before[:budget]
    if budget:
        assert drawn[budget : budget + len(END)] == END
    else:  # the end is there before anything is drawn: the model draws it under its mask
        assert drawn[: len(END)] == END
    assert len(drawn) == 50
    assert finish(after, "a") == "length"
    slow = run(limited, fast_forward=False, overlap=overlap)
    assert tokens(slow, "a") == drawn


@pytest.mark.parametrize("budget", [0, 1, 2, 7])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("spec", [None, CITY])
def test_a_thought_that_may_still_begin_has_its_budget_too(budget, overlap, spec):
    """With none left there is still the token to draw that begins it, or does not: to wait for
    anything else was to wait for ever."""
    for seed in range(6):
        asked = request(
            "a",
            spec,
            thinking=thinking(),
            thinking_token_budget=budget,
            temperature=1.0,
            seed=seed,
            max_tokens=60,
            logit_bias={thinking().open_id: 8.0 if seed % 2 else -100.0},
        )
        made = engine(overlap=overlap)
        made.submit(asked)
        outputs = []
        for _ in range(200):
            outputs += made.step()
        assert finish(outputs, "a") in ("length", "stop")
        drawn = tokens(outputs, "a")
        if drawn[0] == thinking().open_id:
            (close,) = ids("</think>")
            assert drawn.index(close) <= 1 + budget + END.index(close)
        slow = run(asked, fast_forward=False, overlap=overlap)
        assert tokens(slow, "a") == drawn


LEADS = ["", "\n", " ", "\n \n", " \t"]


@pytest.mark.parametrize("lead", LEADS)
def test_white_space_before_the_thought_is_its_own(lead):
    """What the parser of the API calls a thought has the budget, whatever blanks stand before it."""
    said = lead + "<think>the red car and the red house</think>in the city"
    parser = ThoughtParser("<think>", "</think>")
    parser.feed(lead + "<think>")
    assert parser.state is State.THOUGHT
    asked = request("a", thinking=thinking(), thinking_token_budget=3)
    guide = guides().guide(asked)
    assert guide is not None
    drawn = list(ids(said))
    begins = drawn.index(thinking().open_id)
    for token in drawn[: begins + 4]:
        assert guide.room(0) > 0
        verdict = guide.take([token])
        assert not verdict.error
    assert list(verdict.forced) == END
    assert verdict.free


def test_white_space_before_an_answer_leaves_it_free():
    asked = request("a", thinking=thinking(), thinking_token_budget=3)
    guide = guides().guide(asked)
    assert guide is not None
    assert not guide.take(ids("\n ")).free, "a thought may still begin"
    assert guide.take(ids("red")).free
    assert guide.take([thinking().open_id]).free, "the text of an answer"


def test_drafts_of_white_space_and_a_thought_are_cut_at_its_end():
    asked = request("a", thinking=thinking(), thinking_token_budget=2)
    guide = guides().guide(asked)
    assert guide is not None
    drafts = ids("\n<think>the red car")
    n_stand = drafts.index(thinking().open_id) + 3
    assert list(guide.trim(drafts)) == list(drafts[:n_stand])
    assert guide.take(drafts[:n_stand]).forced == tuple(END)


def test_white_space_before_a_structured_answer_is_the_answer_s():
    """Its grammar says whether it may stand there, and nothing else may begin behind it."""
    thought = Thought(tags=thinking(), blank_ids=frozenset(ids("\n")))
    assert thought.take(*ids("\n"))
    assert thought.phase is Phase.ANSWER


def test_blanks_are_the_tokens_of_white_space_alone():
    made = vocabulary(tokenizer(), VOCAB, (EOS,))
    found = blanks(made)
    for text_of in (" ", "\n", "\t"):
        assert set(ids(text_of)) <= found
    assert {made.tokens[i].decode().strip() for i in found} == {""}
    assert found.isdisjoint(
        {EOS, *ids("<think>"), *ids("the"), *range(tokenizer().vocab_size, VOCAB)}
    )
    ideographic = Vocabulary(
        tokens=("\u3000".encode(), b"\xe3", b" \xe3", b"", b" "), special_ids=(4,), eos_ids=(4,)
    )
    assert blanks(ideographic) == {0}


def test_a_thought_with_a_budget_is_planned_ahead_until_near_its_end():
    """Under overlap 1 the thought itself loses no step; only its end waits once."""
    made = engine()
    made.submit(
        request("a", thinking=thinking(inside=True), thinking_token_budget=40, max_tokens=60)
    )
    made.drain()
    assert made.n_steps < 64


def test_penalties_count_a_forced_end():
    asked = request(
        "a",
        thinking=thinking(inside=True),
        thinking_token_budget=5,
        frequency_penalty=1.0,
        max_tokens=40,
    )
    assert tokens(run(asked), "a") == tokens(run(asked, fast_forward=False), "a")


@pytest.mark.parametrize("budget", [0, 3, 12])
def test_a_structure_begins_after_the_thought(budget):
    asked = request(
        "a",
        CITY,
        thinking=thinking(inside=True),
        thinking_token_budget=budget,
        temperature=1.0,
        seed=1,
        max_tokens=200,
    )
    outputs = run(asked)
    said = text(tokens(outputs, "a"))
    assert finish(outputs, "a") == "stop"
    _, _, answer = said.rpartition("</think>")
    assert answer.startswith("\n\n{")
    jsonschema.validate(json.loads(answer), CITY.json)
    assert tokens(run(asked, fast_forward=False), "a") == tokens(outputs, "a")


def test_an_unlimited_thought_cannot_end_the_output():
    asked = request("a", CITY, thinking=thinking(inside=True), max_tokens=80)
    outputs = run(asked)  # the fake draws EOS like any id; the mask bans it in a thought
    assert EOS not in tokens(outputs, "a")[:-1]


def test_a_model_that_does_not_think_answers_at_once():
    n_at_once = 0
    for seed in range(12):
        asked = request("a", CITY, thinking=thinking(), temperature=1.0, seed=seed)
        said = tokens(run(asked), "a")
        if said[0] != thinking().open_id:
            n_at_once += 1
            jsonschema.validate(json.loads(text(said)), CITY.json)
    assert n_at_once, "every seed thinks, so nothing was judged"


def test_phases():
    tags = thinking()
    thought = Thought(tags=tags, budget=2)
    assert thought.phase is Phase.BEFORE
    assert not thought.take(tags.open_id)
    assert thought.phase is Phase.INSIDE
    assert not thought.take(40)
    assert not thought.take(41)
    assert thought.phase is Phase.GAP
    assert list(thought.must) == END
    with pytest.raises(ValueError, match="had to come"):
        thought.take(99)
    for token in END:
        assert not thought.take(token)
    assert thought.phase is Phase.ANSWER
    assert thought.take(40)
    closed = Thought(tags=tags, structured=False)
    closed.take(tags.open_id)
    closed.take(tags.close_id)
    assert closed.phase is Phase.ANSWER
