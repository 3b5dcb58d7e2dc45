"""A request goes on in another engine exactly as it would have in the one that died, wherever that was."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.engine.streams import Stream
from jserve.errors import JserveError
from jserve.outputs import PartialOutput, RequestOutput
from jserve.sampling import SamplingParams, StructuredOutputs
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.types import Finish, Output, Request
from tests.grammar import kit
from tests.sched.sched_drive import wants_prompt

SPECS = [
    None,
    kit.CITY,
    StructuredOutputs(regex=r"[a-c]{3}-(red|blue)-\d{2}"),
    StructuredOutputs(choice=("red house", "red car", "Paris")),
]
GUIDES = kit.guides()
FREE = {
    "temperature": [0.0, 0.7, 1.0],
    "top_p": [1.0, 0.9],
    "top_k": [0, 5],
    "min_p": [0.0, 0.1],
    "seed": [None, 7, -3],
    "repetition_penalty": [1.0, 1.2],
    "presence_penalty": [0.0, 0.5],
    "frequency_penalty": [0.0, -0.5],
    "max_tokens": [7, 9, 14],
    "min_tokens": [0, 7],
    "stop": [(), ("a",), ("e", "r")],
    "stop_token_ids": [(), tuple(range(40, 46))],
    "ignore_eos": [False, True],
    "include_stop_str_in_output": [False, True],
    "skip_special_tokens": [True, False],
    "prompt_logprobs": [None, 2],
    "logit_bias": [{}, {50: 5.0, 51: -100.0}],
    "bad_token_ids": [(), ((60,), (61, 62))],
    "n": [1, 2, 3],
    "extra_args": [{}, {"echo": 1}, {"echo": "prompt"}],
    "thinking_token_budget": [None, 3, -1],
}
"""Values of each field of a request; log-probabilities and structures exclude others."""
ELSEWHERE = {
    "logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "structured_outputs",
    "bad_words",
}


def any_request(rng: random.Random, id: str) -> Request:
    params: dict[str, Any] = {name: rng.choice(values) for name, values in FREE.items()}
    spec = rng.choice(SPECS)
    shown = rng.choice([{}, {"logprobs": 2}, {"logprob_token_ids": (5, 6)}])
    if spec is None:
        params["allowed_token_ids"] = rng.choice([None, tuple(range(30, 62))])
    else:
        params |= {"stop_token_ids": (), "logit_bias": {}, "bad_token_ids": (), "max_tokens": 30}
    inside = rng.random() < 0.5
    asked = kit.request(
        id,
        spec,
        prompt=rng.choice(["the red car", "the red house in the city of Paris", "x"]),
        thinking=kit.thinking(inside=inside) if rng.random() < 0.5 else None,
        **params,
        **shown,
    )
    words = ("bad",) if asked.params.bad_token_ids else ()
    return dataclasses.replace(asked, params=dataclasses.replace(asked.params, bad_words=words))


class Front:
    """What clients were told, and the streams by which another engine goes on."""

    def __init__(self, requests: list[Request]) -> None:
        self.streams = {r.id: Stream(r, clock=lambda: 0.0) for r in requests}
        self.jobs = {r.id: PartialOutput(r, None, kit.tokenizer()) for r in requests}

    def hear(self, engine: Engine, outputs: list[Output]) -> None:
        for out in outputs:
            stream = self.streams[out.request_id]
            if stream.put(out) and self._take(out):
                engine.cancel(out.request_id, out.index)
                stream.end(Finish.ABORT, index=out.index)

    def _take(self, out: Output) -> bool:
        """Whether a stop string ends the choice now. An error is an end like another, with its words."""
        output = self.jobs[out.request_id].output
        try:
            return self.jobs[out.request_id].take(out) is not None
        except JserveError as error:
            end = f"{error.code} {error.field}: {error.message}"
            output.outputs[out.index].finish_reason = end
            output.finished = all(c.finish_reason is not None for c in output.outputs)
            return False

    def told(self) -> dict[str, RequestOutput]:
        return {id: _comparable(job.output) for id, job in self.jobs.items()}


def _comparable(output: RequestOutput) -> RequestOutput:
    """Without what depends on who else ran."""
    return dataclasses.replace(output, num_cached_tokens=0, metrics=None)


def play(requests: list[Request], *cuts: int, **options: Any) -> tuple[dict, int]:
    """(what the clients were told, steps in all); the engine is lost after each of ``cuts`` steps."""
    front, n = Front(requests), 0
    engine = made = _engine(**options)
    for r in requests:
        engine.submit(r)
    while engine.busy:
        front.hear(engine, engine.step())
        n += 1
        if n in cuts:
            engine = _engine(**options)
            for stream in front.streams.values():
                if stream.open:
                    engine.submit(stream.next_attempt())
    engine.scheduler.resources.check()
    assert not any(stream.open for stream in front.streams.values())
    assert made is engine or cuts
    return front.told(), n


def _engine(**options: Any) -> Engine:
    asked = {"features": {"echo": str}, "prompt_features": {"echo": wants_prompt}}
    return kit.engine(all_guides=GUIDES, picks=4, **asked, **options)


def check_every_cut(seed: int, **options: Any) -> None:
    rng = random.Random(seed)
    requests = [any_request(rng, f"r{i}") for i in range(4)]
    whole, n_steps = play(requests, **options)
    for cut in range(1, n_steps):
        assert play(requests, cut, **options)[0] == whole, f"lost after step {cut}"
    for _ in range(3):
        cuts = sorted(rng.sample(range(1, 2 * n_steps), 3))
        assert play(requests, *cuts, **options)[0] == whole, f"lost after steps {cuts}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_told_does_not_depend_on_where_an_engine_is_lost(seed, overlap):
    check_every_cut(seed, overlap=overlap)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_what_is_told_does_not_depend_on_where_an_engine_is_lost_at_length(seed):
    check_every_cut(seed, overlap=seed % 3, fast_forward=seed % 2 > 0)


def test_no_field_of_a_request_is_left_out_of_the_trace():
    assert {f.name for f in dataclasses.fields(SamplingParams)} == {*FREE, *ELSEWHERE}


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_structure_goes_on_behind_every_token(fast_forward):
    """Engines are lost between messages, and a message may hold many tokens; here any token is a cut."""
    asked = kit.request("a", kit.CITY, temperature=1.0, seed=4)
    said = kit.tokens(kit.run(asked), "a")
    for n in range(len(said)):
        again = dataclasses.replace(asked, attempt=1, said=(tuple(said[:n]),))
        outputs = kit.run(again, fast_forward=fast_forward)
        assert [*said[:n], *kit.tokens(outputs, "a")] == said
        assert {out.attempt for out in outputs} == {1}


@pytest.mark.parametrize("n", range(12))
def test_a_thought_keeps_to_its_budget(n):
    asked = kit.request("a", None, thinking=kit.thinking(inside=True), thinking_token_budget=8)
    said = kit.tokens(kit.run(asked), "a")
    again = dataclasses.replace(asked, attempt=1, said=(tuple(said[:n]),))
    assert [*said[:n], *kit.tokens(kit.run(again), "a")] == said


def test_what_does_not_follow_its_structure_is_refused():
    asked = kit.request("a", kit.CITY)
    wrong = dataclasses.replace(asked, attempt=1, said=(kit.ids("no object"),))
    (out,) = kit.run(wrong)
    assert (out.finish, out.error_code) == (Finish.ERROR, "engine_step_failed")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (((1,),), "2 entries"),
        (((1,), (kit.VOCAB,)), "token id"),
        (((1,), (1,) * 120), "no token to be drawn"),
    ],
)
def test_what_cannot_have_been_said_is_refused(said, why):
    asked = dataclasses.replace(kit.request("a", n=2), attempt=1, said=said)
    outputs = kit.run(asked)
    assert {out.error_field for out in outputs} == {"said"}
    assert all(why in (out.error or "") for out in outputs)
    assert [out.index for out in outputs] == list(asked.open_choices)


def test_a_choice_that_is_over_is_not_generated():
    asked = kit.request("a", n=3, max_tokens=6, temperature=1.0, seed=1)
    whole = kit.run(asked)
    again = dataclasses.replace(
        asked, attempt=2, said=(None, (), tuple(kit.tokens(whole, "a", 2)[:4]))
    )
    outputs = kit.run(again)
    assert {out.index for out in outputs} == {1, 2}
    assert kit.tokens(outputs, "a", 1) == kit.tokens(whole, "a", 1)
    assert kit.tokens(outputs, "a", 2) == kit.tokens(whole, "a", 2)[4:]
    assert [out.seed for out in outputs if out.seed is not None] == [2], (
        "the others were told theirs"
    )


def test_a_journal_with_resumed_requests_replays(tmp_path):
    path = tmp_path / "journal"
    asked = kit.request("a", kit.CITY, n=2, temperature=1.0, seed=4)
    said = kit.tokens(kit.run(asked), "a", 1)
    again = dataclasses.replace(asked, attempt=1, said=(None, tuple(said[:5])))
    with path.open("wb") as file:
        engine = kit.engine(journal=JournalFile(file))
        engine.submit(again)
        outputs = engine.drain()
    config = EngineConfig.of(max_num_batched_tokens=64, max_num_seqs=kit.limits().n_slots)
    assert replay(path, kit.limits(), config).outputs == outputs
