"""Guided sequences through the real scheduler and engine, over the fake runner."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import Future

import jsonschema
import pytest

from jserve.config import EngineConfig
from jserve.engine import pending_compile
from jserve.sampling import StructuredOutputs
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from tests.grammar.kit import (
    CITY,
    EOS,
    VOCAB,
    engine,
    finish,
    gather,
    guides,
    ids,
    limits,
    reference,
    request,
    run,
    schema,
    text,
    thinking,
    tokens,
)

SPECS = {
    "city": CITY,
    "object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"[a-c]{3}-(red|blue)-\d{2}"),
    "choice": StructuredOutputs(choice=("red house", "red car", "Paris")),
    "lark": StructuredOutputs(grammar='start: "a" b* "c"\nb: "x" | "yy"'),
    "gbnf": StructuredOutputs(grammar='root ::= "yes" | "no" ("," " maybe")?'),
    "array": schema(
        properties={"xs": {"type": "array", "items": {"type": "number"}, "maxItems": 4}},
        required=["xs"],
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_draws_what_the_definition_says(name, temperature):
    asked = request("a", SPECS[name], temperature=temperature, seed=5)
    outputs = run(asked)
    assert tokens(outputs, "a") == reference(asked, SPECS[name], 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_fast_forward_chunks_and_overlap_change_no_token(name, overlap):
    asked = request("a", SPECS[name], temperature=1.0, seed=11)
    alone = tokens(run(asked), "a")
    assert tokens(run(asked, overlap=overlap, fast_forward=False), "a") == alone
    assert tokens(run(asked, overlap=overlap, max_prefill_tokens=3), "a") == alone
    others = [request(f"o{i}", max_tokens=30 + i) for i in range(5)]
    assert tokens(run(*others, asked, overlap=overlap), "a") == alone
    # With log-probabilities every token is drawn by the model, forced ones too.
    scored = run(request("a", SPECS[name], temperature=1.0, seed=11, logprobs=0), overlap=overlap)
    assert tokens(scored, "a") == alone
    entries = [e for o in gather(scored)["a", 0] for e in o.logprobs or ()]
    assert [e.token for e in entries] == alone


def test_a_finished_object_is_valid_and_ends_by_itself():
    outputs = run(*[request(f"r{i}", CITY, temperature=1.0, seed=i) for i in range(20)])
    for i in range(20):
        drawn = tokens(outputs, f"r{i}")
        assert finish(outputs, f"r{i}") == "stop"
        assert drawn[-1] == EOS
        jsonschema.validate(json.loads(text(drawn[:-1])), CITY.json)


def test_forced_tokens_take_no_model_step():
    asked = request("a", CITY)
    fast, slow = engine(), engine(fast_forward=False)
    for made in (fast, slow):
        made.submit(asked)
        made.drain()
    assert fast.n_steps < 0.6 * slow.n_steps


def test_the_end_comes_also_when_eos_is_ignored_or_too_early():
    spec = StructuredOutputs(choice=("red car",))
    assert finish(run(request("a", spec, ignore_eos=True)), "a") == "stop"
    assert finish(run(request("b", spec, min_tokens=50)), "b") == "stop"


def test_length_ends_it_and_is_said():
    outputs = run(request("a", CITY, max_tokens=5))
    assert finish(outputs, "a") == "length"
    assert len(tokens(outputs, "a")) == 5


def test_choices_of_one_request_differ_and_each_is_valid():
    outputs = run(request("a", CITY, n=4, temperature=1.0, seed=3, prompt="the red car " * 4))
    texts = {text(tokens(outputs, "a", i)) for i in range(4)}
    assert len(texts) > 1
    for said in texts:
        jsonschema.validate(json.loads(said), CITY.json)


def test_penalties_count_forced_tokens():
    asked = request("a", CITY, frequency_penalty=1.5, temperature=1.0, seed=2)
    slow = run(asked, fast_forward=False)
    assert tokens(run(asked), "a") == tokens(slow, "a")


def test_preemption_changes_no_token():
    asked = [
        request(f"r{i}", (CITY, SPECS["object"])[i % 2], temperature=1.0, seed=i, max_tokens=50)
        for i in range(8)
    ]
    roomy = run(*asked)
    made = engine(n_pages=13)
    for item in asked:
        made.submit(item)
    tight = made.drain()
    assert made.scheduler.stats().preemptions > 0
    for item in asked:
        assert tokens(tight, item.id) == tokens(roomy, item.id)


def test_a_grammar_and_a_bias_that_exclude_each_other_end_that_row_only():
    spec = StructuredOutputs(regex="[0-9]+")
    letters = tuple(range(50, 60))
    outputs = run(request("a", spec, allowed_token_ids=letters), request("b", max_tokens=9))
    last = gather(outputs)["a", 0][-1]
    assert (last.finish, last.error_code) == ("error", "nothing_allowed")
    assert last.error_field == "allowed_token_ids"
    assert "allowed_token_ids and structured_outputs together" in last.error
    assert finish(outputs, "b") == "length"


def test_logits_that_are_not_finite_are_not_the_structures_fault():
    """A row that fails under a mask which allows something is told to be ours."""
    made = engine()
    made.runner.nan.add(("a", 0))
    made.submit(request("a", CITY, allowed_token_ids=tuple(range(VOCAB))))
    (last,) = made.drain()
    assert (last.finish, last.error_code) == ("error", "nonfinite_logits")


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_dead_end_behind_some_text_is_found_where_it_is(fast_forward):
    spec = StructuredOutputs(regex="[xq]{2}[19]")
    asked = request("a", spec, allowed_token_ids=(*ids("x"), *ids("q")))
    *said, last = gather(run(asked, fast_forward=fast_forward))["a", 0]
    assert len(text([t for out in said for t in out.token_ids])) == 2
    assert (last.finish, last.error_code) == ("error", "nothing_allowed")


def test_a_structure_that_becomes_too_complex_is_the_clients():
    made = engine()
    made.submit(request("a", CITY))
    outputs = made.step()
    while not outputs:
        outputs = made.step()
    (seq,) = made.scheduler.resources.running
    made.scheduler.guides.wait_masks(None)
    seq.guide.matcher.consume_token(1)  # the matcher is in error, as behind a limit of its own
    seq.guide.compute()
    last = made.drain()[-1]
    assert (last.finish, last.error_code) == ("error", "invalid_schema")
    assert last.error_field == "structured_outputs"


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_matcher_error_in_mid_generation_ends_that_row_only(at):
    """The matcher is broken from outside after ``at`` steps, as a limit of llguidance would."""
    made = engine()
    made.submit(request("a", CITY, temperature=1.0, seed=1))
    made.submit(request("b", max_tokens=40))
    alone = tokens(run(request("b", max_tokens=40)), "b")
    outputs = []
    guided = None
    while guided is None or guided.n_output < at:
        outputs += made.step()
        running = made.scheduler.resources.running
        guided = next((s for s in running if s.guide is not None), guided)
    made.scheduler.guides.wait_masks(None)  # no thread looks at the matcher now
    guided.guide.matcher.consume_token(1)  # type: ignore[union-attr]
    outputs += made.drain()
    last = gather(outputs)["a", 0][-1]
    assert (last.finish, last.error_code) == ("error", "grammar_failed")
    assert tokens(outputs, "b") == alone


def test_refusals_come_as_outputs_and_name_the_keyword():
    bad = schema(properties={"a": {"type": "array", "uniqueItems": True}})
    (out,) = run(request("a", bad))
    assert out.finish == "error"
    assert out.error_code == "invalid_schema"
    assert "uniqueItems" in (out.error or "")


def test_a_server_without_guides_or_masks_refuses():
    made = engine()
    made.scheduler.guides = None
    made._anteroom._guides = None
    made.submit(request("a", CITY))
    (out,) = made.drain()
    assert "structured output is off" in (out.error or "")
    (out,) = run(request("b", CITY), masks=False)
    assert "switched off" in (out.error or "")


def test_a_request_whose_grammar_compiles_can_be_cancelled():
    class Never:
        def compile(self, request):
            return Future()

        def __getattr__(self, name):
            return lambda *a: None

    made = engine(all_guides=Never())
    made.submit(request("a", CITY, n=2))
    assert made.step() == []
    assert made.busy
    made.cancel("a")
    assert [o.finish for o in made.step()] == ["abort", "abort"]
    assert not made.busy


def test_a_grammar_that_never_compiles_ends_its_request_and_no_other():
    class Never:
        def compile(self, request):
            return Future() if request.params.guided else None

        def __getattr__(self, name):
            return lambda *a: None

    made, now = engine(all_guides=Never()), [0.0]
    made.clock = lambda: now[0]
    for id, n in (("a", 2), ("b", 1)):
        made.submit(request(id, CITY, n=n))
        made.step()
        now[0] += 1.0
    made.submit(request("free", max_tokens=3))
    now[0] = pending_compile.LIMIT_S
    outputs = made.step()
    assert [(o.request_id, o.finish, o.error_code) for o in outputs] == [
        ("a", "error", "engine_step_failed")
    ] * 2
    assert "not compiled within 60 s" in (outputs[0].error or "")
    now[0] += 1.0
    outputs = made.drain()
    assert finish_of(outputs, "b") == "error"
    assert finish_of(outputs, "free") == "length"


def test_unguided_rows_never_wait_for_masks():
    """While no mask comes, the others run at full speed, and the guided one waits."""
    slow, may_go_on = guides(), threading.Event()
    compute = slow._compute

    def late(moved):
        may_go_on.wait(5)
        compute(moved)

    slow._compute = late  # type: ignore[method-assign]
    made = engine(all_guides=slow)
    made.submit(request("a", CITY))
    outputs = []
    while not outputs:
        outputs += made.step()
    made.submit(request("b", max_tokens=60))
    while finish_of(outputs, "b") is None:
        outputs += made.step()
    # The first mask came with the grammar; the second one never did.
    assert len([o for o in outputs if o.request_id == "a"]) == 1
    assert made.n_steps < 66
    may_go_on.set()
    outputs += made.drain()
    assert finish(outputs, "a") == "stop"


@pytest.mark.parametrize("fast_forward", [True, False])
def test_pages_of_forced_tokens_are_shared_only_once_they_are_written(fast_forward):
    """The next turn starts with the whole answer: what it finds in the cache must be sound."""
    spec = StructuredOutputs(regex="red car(, the red house in the city of Paris){3} [a-z]")
    made = engine(fast_forward=fast_forward)
    first = request("a", spec)
    made.submit(first)
    # The follower comes while the first one still runs, and right behind it.
    answer = reference(first, spec, 0)
    for n in (9, 17, 25, len(answer)):
        turn = dataclasses.replace(
            request(f"b{n}", max_tokens=6), prompt_ids=(*first.prompt_ids, *answer[:n])
        )
        alone = tokens(run(turn), turn.id)
        outputs = made.step() + made.step()
        made.submit(turn)
        while finish_of(outputs, turn.id) is None:
            outputs += made.step()
        assert tokens(outputs, turn.id) == alone
    made.drain()


def finish_of(outputs, id):
    last = gather(outputs).get((id, 0))
    return None if last is None or last[-1].finish is None else last[-1].finish


def test_a_journal_replays_guided_sequences_without_their_grammars(tmp_path):
    path = tmp_path / "journal"
    asked = [request(f"r{i}", CITY, temperature=1.0, seed=i) for i in range(3)]
    asked.append(request("t", thinking=thinking(inside=True), thinking_token_budget=5))
    asked += [request("n", SPECS["object"], n=3, temperature=1.0), request("f", max_tokens=20)]
    spec = StructuredOutputs(regex="[0-9]+")
    asked.append(request("bad", spec, allowed_token_ids=(50, 51)))
    with path.open("wb", buffering=0) as file:
        outputs = run(*asked, journal=JournalFile(file))
    config = EngineConfig.of(max_num_batched_tokens=64, max_num_seqs=8)
    replayed = replay(path, limits(), config)
    refused = [o for o in replayed.outputs if o.error_code == "invalid_schema"]
    assert replayed.outputs == outputs
    assert not refused
