"""The shipped model in float32 on two replicas, one of which is killed with -9 in mid-stream, over and over: whatever a
request asks for, its client is told what one engine tells.

The trace has every field of ``SamplingParams`` that the model knows. It is played until requests with each went on
elsewhere behind tokens that were told, and one behind the beginning of its stop string.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jserve import build
from jserve.config import EngineConfig
from jserve.engine.replica import Replica
from jserve.engine.streams import Stream
from jserve.errors import JserveError
from jserve.fleet.face import FleetEngine
from jserve.outputs import CompletionOutput, Logprobs, PartialOutput, RequestOutput
from jserve.prompts import Prompts
from jserve.sampling import SamplingParams, StructuredOutputs
from jserve.text.chat.speech import speech_of
from jserve.types import Request
from tests.fleet.processes import ProcessSource, pid_of
from tests.fleet.test_face import until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "compile_cache": "",  # that of the tests, which the engines of this one share too
}
N_REQUESTS, N_SPLIT, MOST_ROUNDS = 22, 2, 10
START_S, ANSWER_S = 240.0, 240.0
QUESTIONS = [
    "Hello! Who are you?",
    "What is 12 + 30?",
    "Mira lives in Oslo and has a red bicycle. Where does Mira live?",
    "Write a story about a fox and a dog.",
]
PLAIN: dict[str, list[Any]] = {
    "n": [1, 1, 2, 3],
    "temperature": [0.0, 0.7, 1.0],
    "top_p": [1.0, 0.9],
    "top_k": [0, 20],
    "min_p": [0.0, 0.05],
    "seed": [None, 7, -3],
    "repetition_penalty": [1.0, 1.2],
    "presence_penalty": [0.0, 0.5],
    "frequency_penalty": [0.0, -0.3],
    "max_tokens": [60, 90],
    "min_tokens": [0, 40],
    "stop": [(), (" and", "x")],
    "stop_token_ids": [(), (300, 301, 302)],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [False, True],
    "skip_special_tokens": [True, False],
    "prompt_logprobs": [None, None, 2],
    "logit_bias": [{}, {260: 4.0, 261: -100.0}],
    "bad_words": [(), ("the", "is a")],
    "bad_token_ids": [(), ((270,), (271, 272))],
    "allowed_token_ids": [None, None, tuple(range(256, 1400))],
    "thinking_token_budget": [None, 6, -1],
}
SHOWN = [{}, {"logprobs": 2}, {"logprob_token_ids": (300, 301)}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}},
    "required": ["city", "n"],
}
STRUCTURES = [
    None,
    None,
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex="(yes|no), [a-z ]{20,60}"),
    StructuredOutputs(grammar='start: "a " WORD+\nWORD: /[a-z]{2,9} /'),
    StructuredOutputs(json_object=True),
]
NOT_BESIDE_A_STRUCTURE = (
    "min_tokens",
    "stop_token_ids",
    "logit_bias",
    "bad_words",
    "bad_token_ids",
    "allowed_token_ids",
)
ELSEWHERE = {"logprobs", "logprob_token_ids", "structured_outputs", "extra_args"}
"""``extra_args`` are of step features, of which the shipped model has none."""
SPLIT = slice(12, 40)
"""The tokens of an answer that become its stop string."""
SPLIT_AT = 18
"""Tokens that were told of it when its replica is killed; some more may be on their way."""


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    config = EngineConfig.of(**OPTIONS)
    text = build.text_side(config)
    speech = speech_of(config.model, text.chat, text.tokenizer)
    return Prompts(text.tokenizer, text.chat, text.eos_ids, speech)


def test_no_field_is_left_out_of_the_trace() -> None:
    assert {f.name for f in dataclasses.fields(SamplingParams)} == {*PLAIN, *ELSEWHERE}


def any_fields(rng: random.Random) -> dict[str, Any]:
    fields = {name: rng.choice(values) for name, values in PLAIN.items()} | rng.choice(SHOWN)
    structure = rng.choice(STRUCTURES)
    if structure is not None:
        fields = {k: v for k, v in fields.items() if k not in NOT_BESIDE_A_STRUCTURE}
        fields["structured_outputs"] = structure
    return fields


def trace(prompts: Prompts, rng: random.Random) -> list[PartialOutput]:
    """Requests with any fields, and some whose answers are long and without a structure."""
    made = []
    for i in range(N_REQUESTS):
        dialogue = [{"role": "user", "content": rng.choice(QUESTIONS)}]
        params = SamplingParams(**any_fields(rng))
        made.append(prompts.request(prompts.dialogue(dialogue, {}), params, id=f"any-{i}"))
    return made


def plain(prompts: Prompts, i: int, **fields: Any) -> PartialOutput:
    dialogue = prompts.dialogue([{"role": "user", "content": QUESTIONS[3]}], {})
    params = SamplingParams(max_tokens=80, ignore_eos=True, seed=i, **fields)
    return prompts.request(dialogue, params, id=f"split-{i}-{len(fields)}")


def used(request: Request) -> set[str]:
    """The fields that ``request`` gives another value than the default, and its structure."""
    params, default = request.params, SamplingParams()
    names = {f.name for f in dataclasses.fields(params)}
    found = {name for name in names if getattr(params, name) != getattr(default, name)}
    structure = params.structured_outputs
    return found if structure is None else found | {structure.given[0]}


class Watched(FleetEngine):
    """Keeps what was told of each request whose replica was lost."""

    def __init__(self, source: ProcessSource) -> None:
        super().__init__(source)
        self.cut: dict[str, list[int]] = {}

    def lost(self, replica: Replica, streams: list[Stream], why: str) -> None:
        self.cut |= {each.request.id: [len(said) for said in each.said] for each in streams}
        super().lost(replica, streams, why)


async def told(fleet: FleetEngine, job: PartialOutput, after_s: float) -> RequestOutput:
    """All that a client makes of its answer, sent after ``after_s``."""
    await asyncio.sleep(after_s)
    job = PartialOutput(job.request, None, job._tokenizer)
    async for out in fleet.generate(job.request):
        try:
            if job.take(out) is not None:
                fleet.abort(job.request.id, out.index)
        except JserveError as error:  # an end like another, with its words
            job.output.outputs[out.index].finish_reason = f"{error.code}: {error.message}"
    return job.output


async def all_told(
    fleet: FleetEngine, jobs: list[PartialOutput], after_s: Callable[[PartialOutput], float]
) -> dict[str, RequestOutput]:
    found = await asyncio.gather(*(told(fleet, job, after_s(job)) for job in jobs))
    return {one.request_id: one for one in found}


def assert_same(found: RequestOutput, whole: RequestOutput) -> None:
    """Tokens, text, ends and seeds to the letter; log-probabilities to 1e-4, since prompts and answers are computed
    by different programs."""
    at = found.request_id
    for now, before in zip(found.outputs, whole.outputs, strict=True):
        assert _exact(now) == _exact(before), at
        for a, b in zip(now.logprobs or (), before.logprobs or (), strict=True):
            assert_near(a, b, at)
    for a, b in zip(found.prompt_logprobs or (), whole.prompt_logprobs or (), strict=True):
        if a is not None and b is not None:
            assert_near(a, b, at)


def _exact(one: CompletionOutput) -> tuple:
    return one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason, one.seed


def assert_near(now: Logprobs, before: Logprobs, at: str) -> None:
    assert [*now] == [*before], at
    assert [e.rank for e in now.values()] == [e.rank for e in before.values()], at
    likely = [entry.logprob for entry in before.values()]
    assert [entry.logprob for entry in now.values()] == pytest.approx(likely, abs=1e-4), at


async def killed_in_mid_stream(fleet: Watched, aim: str) -> None:
    """Kill the replica of request ``aim`` as soon as ``SPLIT_AT`` of its tokens were told."""

    def said() -> int:
        stream = fleet._streams.get(aim)
        return 0 if stream is None else len(stream.said[0])

    await until(lambda: said() >= SPLIT_AT, ANSWER_S)
    [member] = [one for one in fleet.members if aim in one.streams]
    os.kill(pid_of(member), signal.SIGKILL)


def split_ones(prompts: Prompts, whole: dict[str, RequestOutput]) -> Iterator[PartialOutput]:
    """The long requests again, each with a stop string in the middle of its answer that many tokens make."""
    for i in range(N_SPLIT):
        ids = whole[f"split-{i}-0"].outputs[0].token_ids
        stop = prompts._tokenizer.decode(ids[SPLIT])
        yield plain(prompts, i, stop=(stop,))


async def test_whatever_is_asked_for_is_told_as_by_one_engine(prompts: Prompts) -> None:
    rng = random.Random(3)
    config, jobs = EngineConfig.of(**OPTIONS), trace(prompts, rng)
    alone = FleetEngine(ProcessSource(1, config))
    began = time.monotonic()
    try:
        await asyncio.wait_for(alone.start(), START_S)
        first = [*jobs, *(plain(prompts, i) for i in range(N_SPLIT))]
        whole = await asyncio.wait_for(all_told(alone, first, lambda job: 0.0), ANSWER_S)
        split = [*split_ones(prompts, whole)]
        whole |= await asyncio.wait_for(all_told(alone, split, lambda job: 0.0), ANSWER_S)
    finally:
        await alone.close()
    for job in split:
        [one] = whole[job.request.id].outputs
        assert (one.finish_reason, one.stop_reason) == ("stop", job.request.params.stop[0])
    ends = [c.finish_reason for one in whole.values() for c in one.outputs]
    assert sum(end in ("stop", "length") for end in ends) >= 0.9 * len(ends), ends
    print(f"one engine: {time.monotonic() - began:.0f} s")

    jobs += split
    wanted = set().union(*(used(job.request) for job in jobs)) | {"split"}
    assert wanted >= {*PLAIN, "logprobs", "logprob_token_ids", "json", "regex", "grammar"}
    seen: set[str] = set()
    fleet = Watched(ProcessSource(2, config))
    try:
        await asyncio.wait_for(fleet.start(), START_S)
        for n in range(MOST_ROUNDS):
            await until(lambda: len(fleet.members) == 2, START_S)
            rng.shuffle(jobs)
            fleet.cut, aim, left = {}, split[n % N_SPLIT].request.id, wanted - seen

            def after_s(job: PartialOutput, aim=aim, left=left) -> float:
                """Those that were not cut yet run when the replica is killed, if it is theirs."""
                soon = job.request.id != aim and used(job.request) & left
                return rng.uniform(0.0, 0.1) if soon else rng.uniform(0.1, 0.8)

            running = asyncio.ensure_future(all_told(fleet, jobs, after_s))
            await killed_in_mid_stream(fleet, aim)
            found = await asyncio.wait_for(running, ANSWER_S)
            for id, one in found.items():
                assert_same(one, whole[id])
            behind = {id: n_said for id, n_said in fleet.cut.items() if any(n_said)}
            seen |= set().union(*(used(j.request) for j in jobs if j.request.id in behind))
            if any(SPLIT.start < n_said < SPLIT.stop for n_said in behind.get(aim, ())):
                seen.add("split")
            print(f"round {n}: {len(behind)} went on behind {behind}; left {wanted - seen}")
            if seen >= wanted:
                break
        assert not wanted - seen, "no request with these was cut"
        assert fleet.counters["resumed"] > 0
    finally:
        await fleet.close()
