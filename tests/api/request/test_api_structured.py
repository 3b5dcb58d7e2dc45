"""Structured output, tool calls and thoughts over HTTP: through the real engine with a fake device,
and with scripted texts; the real openai SDK as the client."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import InprocClient
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from tests.api.fake import CHATML
from tests.api.talk import FORMATS, TIME, WEATHER, Script, talking
from tests.grammar.kit import CITY, guides, limits, tokenizer

USER = [{"role": "user", "content": "hi"}]
LIMITS = limits(n_pages=600, max_model_len=900)


@asynccontextmanager
async def served(engine, template: str = FORMATS["hermes"], **options):
    """An SDK client of a live server over ``engine``."""
    async with (
        talking(engine, template, **options) as srv,
        openai.AsyncOpenAI(base_url=srv.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield client.chat.completions


@asynccontextmanager
async def fake_device(**options):
    """An SDK client of the real engine over the fake device.

    It draws evenly among what is allowed, so where it may think it would think for ever: thoughts
    are off unless the template begins one.
    """
    if "<think>\n" not in options.get("template", ""):
        options["reasoning_parser"] = "none"
    async with real_engine() as face, served(face, **options) as client:
        yield client


@asynccontextmanager
async def real_engine():
    """The real scheduler, guides and async engine over the fake device."""

    def build(config, progress):
        config = EngineConfig.of(max_num_batched_tokens=64, max_num_seqs=8)
        scheduler = Scheduler(LIMITS, config, guides=guides())
        return Engine(scheduler, FakeRunner(LIMITS)), {}

    face = AsyncEngine(lambda: InprocClient(EngineConfig(), build))
    await face.start()
    try:
        yield face
    finally:
        await face.close()


async def streamed(client, **fields):
    """(content, reasoning, [(name, arguments)], finish reason) of a stream."""
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    finish = None
    async for chunk in await client.create(model="tiny", messages=USER, stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning", None) or ""
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            for call in delta.tool_calls or []:
                if call.id:
                    assert call.type == "function"
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments or ""
            finish = choice.finish_reason or finish
    return content, reasoning, [tuple(c) for c in calls.values()], finish


async def whole(client, **fields):
    answer = await client.create(model="tiny", messages=USER, **fields)
    choice = answer.choices[0]
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning", None) or ""
    return choice.message.content or "", reasoning, calls, choice.finish_reason


def json_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


async def test_formats_of_openai_and_vllm_through_the_engine():
    async with fake_device() as client:
        for seed in range(4):
            args = {"seed": seed, "max_tokens": 400}
            content, _, _, finish = await whole(
                client, response_format=json_schema(CITY.json), **args
            )
            assert finish == "stop"
            jsonschema.validate(json.loads(content), CITY.json)
            extra = {"structured_outputs": {"json": CITY.json}}
            assert (await whole(client, extra_body=extra, **args))[0] == content
            assert (await streamed(client, extra_body=extra, **args))[0] == content
            extra = {"structured_outputs": {"choice": ["red", "blue car"]}}
            assert (await whole(client, extra_body=extra, **args))[0] in ("red", "blue car")


async def test_names_of_other_engines_say_the_same():
    async with fake_device() as client:
        for name, value, same in (
            ("regex", "[ab]{3}", {"regex": "[ab]{3}"}),
            ("ebnf", 'root ::= "red" | "blue"', {"choice": ["red", "blue"]}),
            ("grammar", 'root ::= "red" | "blue"', {"choice": ["red", "blue"]}),
            ("json_schema", json.dumps(CITY.json), {"json": CITY.json}),
        ):
            args = {"seed": 3, "max_tokens": 400}
            content, *_, finish = await whole(client, extra_body={name: value}, **args)
            assert finish == "stop"
            extra = {"structured_outputs": same}
            assert (await whole(client, extra_body=extra, **args))[0] == content, name


async def test_the_sdk_parses_a_pydantic_answer():
    class Place(BaseModel):
        n: int = Field(ge=0, le=99)
        kind: bool

    async with fake_device() as client:
        answer = await client.parse(
            model="tiny", messages=USER, response_format=Place, max_tokens=80, seed=3
        )
        assert isinstance(answer.choices[0].message.parsed, Place)


@pytest.mark.parametrize("kind", FORMATS)
async def test_forced_calls_are_valid_in_every_format(kind):
    async with fake_device(template=FORMATS[kind]) as client:
        for seed in range(3):
            args = {"seed": seed, "max_tokens": 400, "temperature": 1.0}
            for choice in (
                "required",
                {"type": "function", "function": {"name": "get_weather"}},
            ):
                fields = {"tools": [WEATHER, TIME], "tool_choice": choice, **args}
                if seed == 2:
                    fields["parallel_tool_calls"] = False
                answer = await whole(client, **fields)
                assert await streamed(client, **fields) == answer
                content, _, calls, finish = answer
                assert content == ""
                assert finish == "tool_calls"
                assert calls
                assert len(calls) == 1 or seed != 2
                for name, arguments in calls:
                    tool = {"get_weather": WEATHER, "time": TIME}[name]
                    value = json.loads(arguments)
                    jsonschema.validate(value, tool["function"]["parameters"])
                    assert choice == "required" or name == "get_weather"


async def test_auto_with_a_strict_tool_says_words_or_a_valid_call():
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with fake_device() as client:
        content, _, calls, _ = await whole(client, tools=[strict], seed=1, max_tokens=60)
        assert content or calls


async def test_auto_beside_a_schema_is_one_of_both():
    seen = set()
    async with fake_device() as client:
        for seed in range(6):
            content, _, calls, finish = await whole(
                client,
                tools=[WEATHER],
                response_format=json_schema(CITY.json),
                seed=seed,
                max_tokens=150,
            )
            seen.add(finish)
            if finish == "stop":
                jsonschema.validate(json.loads(content), CITY.json)
            elif finish == "tool_calls":
                jsonschema.validate(json.loads(calls[0][1]), WEATHER["function"]["parameters"])
    assert seen & {"stop", "tool_calls"}, "no answer came to its end, so nothing was judged"


TEXTS = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "time", "parameters": {}}'
    ),
    "mistral": (
        'Let me see.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "time", "arguments": {}}]'
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("thought", ["", "<think>\nThe sky,\n\n1 < 2.\n</think>\n\n"])
async def test_parallel_calls_streamed_and_whole(kind, chunk, thought):
    script = Script((thought + TEXTS[kind],))
    script.chunk = chunk
    async with served(script, FORMATS[kind]) as client:
        got = await streamed(client, tools=[WEATHER, TIME])
        assert got == await whole(client, tools=[WEATHER, TIME])
        content, reasoning, calls, finish = got
        assert content == ("" if kind == "llama3" else "Let me see.")
        assert reasoning == ("The sky,\n\n1 < 2." if thought else "")
        assert calls == [("get_weather", '{"city": "Paris"}'), ("time", "{}")]
        assert finish == "tool_calls"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chunk", [1, 100])
async def test_a_call_begins_with_its_id_and_name_and_its_arguments_follow(kind, chunk):
    """As OpenAI's own streams: (index, id, type, name, "") and then (index, arguments)."""
    script = Script((TEXTS[kind],))
    script.chunk = chunk
    asked = {"messages": USER, "tools": [WEATHER, TIME], "logprobs": True, "return_token_ids": True}
    async with talking(script, FORMATS[kind]) as srv:
        events = await srv.events("/v1/chat/completions", asked)
        _, whole, _ = await srv.post("/v1/chat/completions", asked)
    choices = [e["choices"][0] for e in events[:-1]]
    steps = [step for c in choices for step in c["delta"].get("tool_calls", [])]
    assert all(len(c["delta"].get("tool_calls", [None])) == 1 for c in choices)
    begun = [step for step in steps if "id" in step]
    assert [step["index"] for step in begun] == [0, 1]
    assert len({step["id"] for step in begun}) == 2
    for step in begun:
        assert set(step) == {"index", "id", "type", "function"}
        assert step["type"] == "function"
        assert step["function"]["arguments"] == ""
    seen = -1
    for step in steps:
        if "id" in step:
            seen = step["index"]
        else:
            assert set(step) == {"index", "function"}
            assert step["index"] == seen, "arguments before their call"
            assert set(step["function"]) == {"arguments"}
    for name in ("token_ids", "logprobs"):
        told = [c[name] for c in choices if c.get(name)]
        told = [t["content"] for t in told] if name == "logprobs" else told
        expected = whole["choices"][0][name]
        expected = expected["content"] if name == "logprobs" else expected
        assert [t for part in told for t in part] == expected


async def test_usage_in_chunks_counts_the_thought_so_far():
    options = {"include_usage": True, "continuous_usage_stats": True}
    script = Script(("<think>\nred car\n</think>\n\nred",))
    async with talking(script) as srv:
        asked = {"messages": USER, "stream_options": options}
        events = await srv.events("/v1/chat/completions", asked)
    counts = [
        (u["completion_tokens"], u["completion_tokens_details"]["reasoning_tokens"])
        for u in (e["usage"] for e in events[:-1])
    ]
    assert counts[0] == (0, 0)  # the role alone
    assert counts == sorted(counts)
    assert counts[-1][1] == len(tokenizer().encode("\nred car\n"))


async def test_a_model_that_thinks_says_null_in_chunks_without_a_thought():
    script = Script(("<think>\nred car\n</think>\n\nred",))
    async with talking(script) as srv:
        events = await srv.events("/v1/chat/completions", {"messages": USER})
        deltas = [c["delta"] for e in events[:-1] for c in e["choices"]]
        parsed = [d for d in deltas if "content" in d]
        assert len(parsed) > 1
        assert all(d["reasoning"] is d["reasoning_content"] is None for d in parsed)
        hidden = await srv.events(
            "/v1/chat/completions", {"messages": USER, "include_reasoning": False}
        )
        assert not any("reasoning" in c["delta"] for e in hidden[:-1] for c in e["choices"])


async def test_a_call_that_must_be_made_wins_over_a_format():
    async with fake_device() as client:
        for form in (json_schema(CITY.json), {"type": "json_object"}):
            for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
                fields = {"tools": [WEATHER], "tool_choice": choice, "response_format": form}
                content, _, calls, _ = await whole(client, seed=3, max_tokens=400, **fields)
                plain = await whole(
                    client, seed=3, max_tokens=400, tools=[WEATHER], tool_choice=choice
                )
                assert (content, calls) == (plain[0], plain[2])
                assert calls[0][0] == "get_weather"


async def test_structural_tags_of_today():
    format = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "red: "},
            {
                "type": "tag",
                "begin": "<",
                "content": {"type": "json_schema", "json_schema": CITY.json},
                "end": ">",
            },
        ],
    }
    async with fake_device() as client:
        asked = {"response_format": {"type": "structural_tag", "format": format}}
        content, *_ = await whole(client, seed=1, max_tokens=400, extra_body=asked)
        assert content.startswith("red: <")
        assert content.endswith(">")
        jsonschema.validate(json.loads(content[6:-1]), CITY.json)


async def test_white_space_before_an_answer_is_no_thought():
    async with served(Script(("\n red",))) as client:
        answer = await client.create(model="tiny", messages=USER)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_without_tools_or_with_none_the_text_is_content():
    async with served(Script((TEXTS["hermes"],))) as client:
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            got = await whole(client, **fields)
            assert got == (TEXTS["hermes"], "", [], "stop")
            assert await streamed(client, **fields) == got


@pytest.mark.parametrize("lead", ["", "\n", "\n \n"])
async def test_usage_counts_the_tokens_of_the_thought(lead):
    """Those between the tags: not the tags, nor what stands in front of them."""
    thought = "\nred car\n"
    script = Script((f"{lead}<think>{thought}</think>\n\nred",))
    async with served(script) as client:
        answer = await client.create(model="tiny", messages=USER)
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        assert counted == len(tokenizer().encode(thought))
        last = None
        options = {"include_usage": True}
        async for chunk in await client.create(
            model="tiny", messages=USER, stream=True, stream_options=options
        ):
            last = chunk
        assert last.usage.completion_tokens_details.reasoning_tokens == counted
        hidden = await client.create(
            model="tiny", messages=USER, extra_body={"include_reasoning": False}
        )
        assert hidden.choices[0].message.content == "red"
        assert hidden.choices[0].message.reasoning is None


@pytest.mark.parametrize("name", ["both", "reasoning", "reasoning_content"])
async def test_a_thought_goes_under_the_names_that_were_asked_for(name):
    expected = {"reasoning", "reasoning_content"} if name == "both" else {name}
    body = {"messages": USER}
    async with talking(Script(("<think>\nred\n</think>\n\ncar",)), reasoning_field=name) as srv:
        _, whole, _ = await srv.post("/v1/chat/completions", body)
        events = await srv.events("/v1/chat/completions", body)
    message = whole["choices"][0]["message"]
    assert {n for n in message if message[n] == "red"} == expected
    assert {n for n in message if n.startswith("reasoning")} == expected
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    assert {n for d in deltas for n in d if n.startswith("reasoning")} == expected


async def test_a_prompt_inside_or_past_a_thought_is_known():
    opened = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    if opened == CHATML:
        opened = CHATML + "<think>\n"
    async with served(Script(("red car\n</think>\n\nblue",)), opened) as client:
        assert (await whole(client))[:2] == ("blue", "red car")
    async with served(Script(("<think> is text",)), CHATML + "<think>\n\n</think>\n\n") as client:
        assert (await whole(client))[:2] == ("<think> is text", "")


async def test_a_thought_budget_reaches_the_engine_and_ends_the_thought():
    async with fake_device(template=CHATML + "<think>\n") as client:
        answer = await client.create(
            model="tiny",
            messages=USER,
            max_tokens=40,
            extra_body={"thinking_token_budget": 6},
            temperature=0,
        )
        details = answer.usage.completion_tokens_details
        assert details.reasoning_tokens == 6
        assert answer.choices[0].message.content is not None


async def test_structure_after_a_thought():
    async with fake_device(template=CHATML + "<think>\n") as client:
        content, reasoning, _, finish = await whole(
            client,
            response_format=json_schema(CITY.json),
            extra_body={"thinking_token_budget": 5},
            max_tokens=150,
            seed=2,
        )
        assert finish == "stop"
        assert reasoning
        jsonschema.validate(json.loads(content), CITY.json)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "tools": [WEATHER, {"function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": "required",
                "extra_body": {"structured_outputs": {"json": {}}},
            },
            "structured_outputs",
        ),
        (
            {
                "tools": [WEATHER],
                "response_format": {"type": "json_object"},
                "extra_body": {"llama": True},
            },
            "response_format",
        ),
        (
            {"tools": [WEATHER], "extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs",
        ),
        ({"response_format": json_schema({"not": {}})}, "response_format.json_schema.schema"),
    ],
)
async def test_refusals_name_the_field(fields, param):
    script = Script()
    bare = fields.get("extra_body", {}).get("llama")
    async with served(script, FORMATS["llama3" if bare else "hermes"]) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.create(model="tiny", messages=USER, **fields)
        assert caught.value.param == param
        assert len(caught.value.message) < 500
    assert script.records == []


async def test_a_parser_that_does_not_fit_is_a_config_error():
    with pytest.raises(ConfigError) as caught:
        async with served(Script(), reasoning_parser="mistral"):
            pass
    assert caught.value.field == "reasoning_parser"


async def test_parsers_can_be_switched_off():
    parsed = "<think>a</think>" + TEXTS["hermes"]
    off = {"reasoning_parser": "none", "tool_call_parser": "none"}
    async with served(Script((parsed,)), **off) as client:
        assert await whole(client, tools=[WEATHER]) == (parsed, "", [], "stop")
