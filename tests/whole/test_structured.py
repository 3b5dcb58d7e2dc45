"""Structured output by the real engine: a tiny model with drawn weights can only say what is valid.

The slow tier makes a thousand generations over forty schemas, and has the shipped model call tools.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from jserve import LLM, SamplingParams, build
from jserve.api.http.app import make_app
from jserve.api.http.server import HttpServer
from jserve.api.request.parsed import ModelCard
from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import InprocClient
from jserve.errors import BadRequest
from jserve.model.features import MASK
from jserve.sampling import StructuredOutputs
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.schemas import FORMATS, SCHEMAS

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["sun", "rain", "snow and hail"]},
    },
    "required": ["city", "n", "kind"],
    "additionalProperties": False,
}


def structured(schema: dict[str, Any], seed: int, **params: Any) -> SamplingParams:
    values = {"temperature": 1.0, "max_tokens": 100, "seed": seed}
    return SamplingParams(**values | params, structured_outputs=StructuredOutputs(json=schema))


@pytest.fixture(scope="module")
def llm(tiny_dir: Path):
    with LLM(str(tiny_dir), **SMALL_OPTIONS) as made:
        yield made


def test_valid_json_beside_free_rows_that_do_not_change(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    alone = llm.generate("the quick brown", free, use_tqdm=False)[0].outputs[0].token_ids
    params = [*[structured(CITY, seed) for seed in range(10)], free]
    outputs = llm.generate(["the quick brown"] * 11, params, use_tqdm=False)
    assert outputs[-1].outputs[0].token_ids == alone
    said = [out.outputs[0] for out in outputs[:-1]]
    assert len({choice.text for choice in said}) > 1
    for choice in said:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), CITY)


def test_forced_tokens_are_those_the_model_would_draw_under_its_masks(llm: LLM) -> None:
    """With log-probabilities asked for, every token is drawn on the device; else many are not."""
    for params in (
        structured(CITY, 3),
        structured(CITY, 3, frequency_penalty=1.5, repetition_penalty=1.3),
        structured(CITY, 3, temperature=0.0, bad_words=("q",)),
    ):
        scored = dataclasses.replace(params, logprobs=0)
        fast, slow = (
            llm.generate("the lazy dog", p, use_tqdm=False)[0].outputs[0] for p in (params, scored)
        )
        assert fast.token_ids == slow.token_ids
        assert slow.logprobs is not None
        assert len(slow.logprobs) == len(slow.token_ids)


def test_choice_regex_and_grammar(llm: LLM) -> None:
    specs = [
        StructuredOutputs(choice=("red", "blue car")),
        StructuredOutputs(regex=r"\d{3}-[a-f]{2}"),
        StructuredOutputs(grammar='root ::= "yes" | "no"'),
    ]
    params = [SamplingParams(max_tokens=30, structured_outputs=spec) for spec in specs]
    color, code, word = (
        out.outputs[0].text for out in llm.generate(["fox"] * 3, params, use_tqdm=False)
    )
    assert color in ("red", "blue car")
    assert len(code) == 6
    assert word in ("yes", "no")


def test_a_schema_that_cannot_be_enforced_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="uniqueItems") as caught:
        llm.generate("x", structured({"type": "array", "uniqueItems": True}, 1), use_tqdm=False)
    assert caught.value.code == "invalid_schema"


def test_masks_run_in_buckets_of_their_own(llm: LLM) -> None:
    programs = llm._engine.runner.ladder.buckets  # type: ignore[attr-defined]
    assert any(MASK in bucket.features for bucket in programs)
    assert any(MASK not in bucket.features for bucket in programs)


def valid_share(llm: LLM, n_each: int, max_tokens: int) -> tuple[int, int]:
    """(finished, cut by length) over all schemas; every finished one must be valid."""
    jobs = [(schema, seed) for schema in SCHEMAS.values() for seed in range(n_each)]
    params = [structured(schema, seed, max_tokens=max_tokens) for schema, seed in jobs]
    finished = cut = 0
    for (schema, _), out in zip(
        jobs, llm.generate(["the fox"] * len(jobs), params, use_tqdm=False), strict=True
    ):
        choice = out.outputs[0]
        if choice.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(
                json.loads(choice.text)
            )
            finished += 1
        else:
            assert choice.finish_reason == "length"
            cut += 1
    return finished, cut


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_generations_over_forty_schemas_are_valid(llm: LLM, capsys) -> None:
    assert len(SCHEMAS) >= 40
    finished, cut = valid_share(llm, -(-1000 // len(SCHEMAS)), max_tokens=120)
    with capsys.disabled():
        print(f"\nstructured output: {finished} finished and valid, {cut} cut by length")
    assert finished + cut >= 1000
    assert finished > cut


SHIPPED = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "prompt_logprobs": False,
    "compile_cache": "",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shipped_model_says_valid_json(capsys) -> None:
    with LLM(str(build.shipped()), **SHIPPED) as made:
        finished, cut = valid_share(made, -(-1000 // len(SCHEMAS)), max_tokens=120)
        with capsys.disabled():
            print(f"\nshipped model: {finished} finished and valid, {cut} cut by length")
        assert finished > cut


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        },
    },
}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_shipped_model_calls_tools_through_the_sdk(capsys) -> None:
    config = EngineConfig.of(model=str(build.shipped()), port=0, **SHIPPED)
    side = build.text_side(config)
    face = AsyncEngine(lambda: InprocClient(config, build.engine))
    info = await face.start()
    card = ModelCard(
        name=side.name,
        max_model_len=info["max_model_len"],
        vocab_size=info["vocab_size"],
        eos_ids=side.eos_ids,
    )
    server = HttpServer(
        make_app(config, face, side.tokenizer, side.chat, card), config.server.host, 0
    )
    url = await server.start()
    asked: dict[str, Any] = {
        "model": side.name,
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [WEATHER],
        "max_tokens": 150,
    }
    try:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client:
            for choice in ("required", "auto"):
                for seed in range(4):
                    answer = await client.chat.completions.create(
                        **asked, tool_choice=choice, seed=seed
                    )
                    first = answer.choices[0]
                    calls = first.message.tool_calls or []
                    with capsys.disabled():
                        said = [(c.function.name, c.function.arguments) for c in calls]
                        print(
                            f"\n{choice}: {first.finish_reason} {said or first.message.content!r}"
                        )
                    if choice == "required" and first.finish_reason != "length":
                        assert first.finish_reason == "tool_calls"
                        for call in calls:
                            schema = WEATHER["function"]["parameters"]
                            jsonschema.validate(json.loads(call.function.arguments), schema)
            limited = await client.chat.completions.create(
                model=side.name,
                messages=[{"role": "user", "content": "What is 12 + 30?"}],
                extra_body={"thinking_token_budget": 4},
                max_tokens=60,
            )
            details = limited.usage.completion_tokens_details
            assert details.reasoning_tokens == 4
    finally:
        await server.stop(0.5)
        await face.close()
