"""Thoughts: budgets that end them cleanly, and structures that begin after them."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from jserve.grammar.thought import Phase, Thought, default_budget
from jserve.grammar.vocab import Vocabulary, blanks, vocabulary
from jserve.sampling import StructuredOutputs
from jserve.sched import policy
from jserve.testing import FakeProposer
from jserve.text.chat.parsers.reasoning import State, ThoughtParser
from jserve.types import Request
from tests.grammar.kit import (
    CITY,
    EOS,
    VOCAB,
    engine,
    finish,
    first_free,
    gather,
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
(CLOSE,) = ids("</think>")


def cut(budget: int) -> tuple[int, list[int]]:
    """(tokens drawn, tokens forced) of a thought that runs out of its budget: the line break counts."""
    return (budget - 1, END) if budget else (0, END[1:])


def sampled(seed: int, spec: StructuredOutputs | None = None, id: str = "a", **params) -> Request:
    """A chat whose answer may begin with a thought."""
    values = {"temperature": 1.0, "seed": seed, "thinking": thinking()}
    return request(id, spec, **values | params)


THINKERS = [n for n in range(2500) if first_free(sampled(n)) == thinking().open_id]
"""Seeds with which the fake model begins a thought on its own."""


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
    n_drawn, end = cut(budget)
    assert drawn.index(CLOSE) == budget
    assert drawn[:n_drawn] == before[:n_drawn]
    assert drawn[n_drawn : n_drawn + len(end)] == end
    assert len(drawn) == 50
    assert finish(after, "a") == "length"
    slow = run(limited, fast_forward=False, overlap=overlap)
    assert tokens(slow, "a") == drawn


@pytest.mark.one_in(4)
@pytest.mark.parametrize("budget", [0, 1, 2, 7])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("spec", [None, CITY])
def test_a_thought_that_may_still_begin_has_its_budget_too(budget, overlap, spec):
    """With none left there is still the token to draw that begins it, or does not: to wait for
    anything else was to wait for ever."""
    limited = {"thinking_token_budget": budget, "max_tokens": 60}
    for seed in (0, 1, *THINKERS[:2]):
        asked = sampled(seed, spec, **limited)
        made = engine(overlap=overlap)
        made.submit(asked)
        outputs = []
        for _ in range(200):
            outputs += made.step()
        assert finish(outputs, "a") in ("length", "stop")
        drawn = tokens(outputs, "a")
        assert (drawn[0] == thinking().open_id) == (seed in THINKERS)
        if seed in THINKERS:
            assert drawn.index(CLOSE) == 1 + budget
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
    guide = guides().guide(asked, 120)
    assert guide is not None
    drawn = list(ids(said))
    begins = drawn.index(thinking().open_id)
    for token in drawn[: begins + 3]:
        assert guide.room(0) > 0
        verdict = guide.take([token])
        assert not verdict.error
    assert list(verdict.forced) == END
    assert verdict.free


def test_white_space_before_an_answer_leaves_it_free():
    asked = request("a", thinking=thinking(), thinking_token_budget=3)
    guide = guides().guide(asked, 120)
    assert guide is not None
    assert not guide.take(ids("\n ")).free, "a thought may still begin"
    assert guide.take(ids("red")).free
    assert guide.take([thinking().open_id]).free, "the text of an answer"


def test_drafts_of_white_space_and_a_thought_are_cut_at_its_end():
    asked = request("a", thinking=thinking(), thinking_token_budget=2)
    guide = guides().guide(asked, 120)
    assert guide is not None
    drafts = ids("\n<think>the red car")
    n_stand = drafts.index(thinking().open_id) + 2
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


STRUCTURES = [
    CITY,
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex="[a-z]{3,9}"),
    StructuredOutputs(choice=("red", "blue car")),
    StructuredOutputs(grammar='root ::= "yes" | "no"'),
    StructuredOutputs(
        structural_tag={
            "structures": [{"begin": "<tool_call>", "schema": CITY.json, "end": "</tool_call>"}],
            "triggers": ["<tool_call>"],
        }
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", STRUCTURES, ids=lambda spec: spec.given[0])
def test_no_structure_makes_a_model_think(spec):
    """A thought begins for the seeds that begin it without the structure, and for no others; up to its
    budget it has the same tokens."""
    assert 2 <= len(THINKERS) < 20, "all that is judged below depends on both kinds of seeds"
    seeds = [*range(12), *THINKERS]
    asked = [sampled(n, spec, f"s{n}", max_tokens=40) for n in seeds]
    free = run(*(sampled(n, None, f"s{n}", max_tokens=40) for n in seeds))
    for overlap in (0, 1, 2):
        outputs = run(*asked, overlap=overlap)
        for n in seeds:
            said, plain = tokens(outputs, f"s{n}"), tokens(free, f"s{n}")
            begins = said[0] == thinking().open_id
            assert begins == (n in THINKERS)
            if begins:
                n_same = said.index(CLOSE) - 1
                assert EOS not in said[:n_same]
                till_end = plain.index(EOS) if EOS in plain[:n_same] else n_same
                assert said[:till_end] == plain[:till_end]
                assert said.index(CLOSE) - 1 == default_budget(40, thinking())


def test_the_greedy_model_answers_at_once_too():
    """The fake draws one token for one prompt at temperature 0, and no prompt here has the tag."""
    for prompt in ("the red car", "the city", "house"):
        free = tokens(run(request("a", prompt=prompt, max_tokens=1)), "a")
        assert free != [thinking().open_id]
        said = tokens(run(request("a", CITY, prompt=prompt, thinking=thinking())), "a")
        jsonschema.validate(json.loads(text(said)), CITY.json)


@pytest.mark.parametrize("drafts", [0, 2, 4])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"n": 2}])
def test_drafts_choices_and_preemption_change_no_thought(drafts, extra):
    """Wrong drafts of the tag, and of what the tag would be followed by, included."""

    class Tags(FakeProposer):
        def propose(self, seq, most):
            return [thinking().open_id, *ids("the red"), CLOSE][: min(most, drafts)]

    asked = [sampled(n, CITY, f"s{n}", max_tokens=60, **extra) for n in (0, 1, *THINKERS[:3])]
    plain = run(*asked)
    made = engine(proposer=Tags() if drafts else None, max_drafts=drafts)
    for item in asked:
        made.submit(item)
    outputs, resources = [], made.scheduler.resources
    for i in range(400):
        outputs += made.step()
        able = [seq for seq in resources.running if not policy.protected(seq)]
        if able and i % 7 == 3:
            resources.preempt(able[i % len(able)])
    assert not made.busy
    for key in gather(plain):
        assert tokens(outputs, *key) == tokens(plain, *key), key


def test_what_the_device_is_asked_at_each_draw():
    """Only where a thought may begin or goes on is there a draw without the mask."""
    opens, close = thinking().open_id, ids("\n</think>\n\n")
    guide = guides().guide(sampled(0, CITY, thinking_token_budget=4), 120)
    assert guide is not None
    drafts = [opens, *ids("car")[:1] * 3, *close, *ids("{")]
    mask = guide.mask(drafts)
    redraw = list(guide.redraw(drafts))
    assert redraw == [opens, *[EOS] * 3, *[-1] * (len(drafts) - 3)]
    assert mask is not None
    assert len(mask) == len(redraw)
    assert guide.redraw(()) == [opens], "looking ahead moved the guide"
    guide.take(ids("{"))
    assert guide.redraw(()) == ()
    plain = guides().guide(request("a", CITY), 120)
    assert plain is not None
    assert plain.redraw(()) == ()


def test_a_tag_that_is_the_grammars_own_begins_no_thought_of_ours():
    spec = StructuredOutputs(regex="<think>[a-z]{3}</think>(yes|no)")
    for seed in range(3):
        said = text(tokens(run(sampled(seed, spec)), "a"))
        assert re.fullmatch(spec.regex or "", said)


@pytest.mark.parametrize("most", [1, 4, 8, 9, 40, 300])
@pytest.mark.parametrize("inside", [True, False])
def test_a_thought_leaves_a_structure_half_of_the_tokens(most, inside):
    asked = sampled(THINKERS[0], CITY, max_tokens=most, thinking=thinking(inside=inside))
    said = tokens(run(asked), "a")
    n_close = said.index(CLOSE) if CLOSE in said else len(said)
    n_thought = n_close + 1 + len(thinking().gap_ids)
    assert n_thought <= max(most // 2, len(ids("<think></think>\n\n")))
    if most == 300:
        jsonschema.validate(json.loads(text(said[n_thought - 1 :]).strip()), CITY.json)


def test_a_budget_that_is_asked_for_wins_and_minus_one_is_none():
    for budget, n in ((3, 3), (60, 60)):
        asked = sampled(THINKERS[0], CITY, max_tokens=90, thinking_token_budget=budget)
        assert tokens(run(asked), "a").index(CLOSE) == 1 + n
    free = sampled(THINKERS[0], CITY, max_tokens=90, thinking_token_budget=-1)
    assert CLOSE not in tokens(run(free), "a")


def test_phases():
    tags = thinking()
    thought = Thought(tags=tags, budget=2)
    assert thought.phase is Phase.BEFORE
    assert not thought.take(tags.open_id)
    assert thought.phase is Phase.INSIDE
    assert not thought.take(40)
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
