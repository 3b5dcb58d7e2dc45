"""/v1/messages with the real anthropic SDK: what users do, and the errors they see."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from jserve.errors import Overloaded
from jserve.types import Finish
from tests.api.fake import FakeEngine, live
from tests.api.talk import FORMATS, WEATHER, Script, talking
from tests.grammar.kit import tokenizer

anthropic = pytest.importorskip("anthropic")

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)
PATH = "/v1/messages"


@asynccontextmanager
async def client_of(srv, **options):
    made = anthropic.AsyncAnthropic(base_url=srv.url, api_key="x", **{"max_retries": 0} | options)
    async with made as client:
        yield client


async def test_create(srv):
    srv.engine.n_cached = 2
    async with client_of(srv) as client:
        answer = await client.messages.create(
            model="tiny",
            max_tokens=50,
            messages=USER,
            system="Be kind.",
            extra_body={"temperature": 0.5, "top_k": 3},
        )
    assert answer.content[0].text == "Hello, wörld! 🙂"
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    request = srv.engine.records[-1].request
    n_prompt = len(request.prompt_ids)
    assert answer.usage.input_tokens == n_prompt - 2
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.output_tokens == len(answer.content[0].text.encode()) + 1
    assert (request.params.temperature, request.params.max_tokens) == (0.5, 50)
    assert "Be kind." in bytes(i for i in request.prompt_ids if i < 256).decode()
    assert answer._request_id


async def test_stream_helper():
    script = Script(("<think>\nSo.\n</think>\n\nLook: " + CALL,))
    async with talking(script) as srv, client_of(srv) as client:
        async with client.messages.stream(
            model="tiny", max_tokens=200, messages=USER, tools=[TOOL]
        ) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        whole = await client.messages.create(
            model="tiny", max_tokens=200, messages=USER, tools=[TOOL]
        )
    assert "".join(texts) == "Look:"
    thought, text, call = final.content
    assert (thought.type, thought.thinking) == ("thinking", "So.")
    assert thought.signature
    assert whole.content[0].signature == thought.signature
    assert (text.type, text.text) == ("text", "Look:")
    assert (call.type, call.name, call.input) == (
        "tool_use",
        "get_weather",
        {"city": "Paris", "days": 2},
    )
    assert call.id
    assert final.stop_reason == "tool_use"
    assert [b.type for b in whole.content] == ["thinking", "text", "tool_use"]
    assert final.usage.output_tokens == whole.usage.output_tokens
    n_thought = len(tokenizer().encode("\nSo.\n"))
    assert whole.usage.output_tokens_details.thinking_tokens == n_thought


async def test_a_thought_ends_with_its_signature_and_comes_back():
    script = Script(("<think>\nSo.\n</think>\n\nLook",))
    async with talking(script) as srv:
        asked = {"messages": USER, "max_tokens": 50, "stream": True}
        events = await srv.events("/v1/messages", asked)
        kinds = [e.get("delta", e).get("type") for e in events if e.get("index") == 0]
        assert kinds[-2:] == ["signature_delta", "content_block_stop"]
        assert kinds.count("signature_delta") == 1
        assert not any("signature" in str(e) for e in events if e.get("index") == 1)
        _, body, _ = await srv.post("/v1/messages", {**asked, "stream": False})
        block = body["content"][0]
        signatures = [e["delta"]["signature"] for e in events if "signature" in e.get("delta", {})]
        assert signatures == [block["signature"]]
        turns = [*USER, {"role": "assistant", "content": body["content"]}, *USER]
        status, *_ = await srv.post("/v1/messages", {"messages": turns, "max_tokens": 50})
        assert status == 200
        signed = await srv.post("/v1/messages", {"messages": turns, "max_tokens": 50})
        assert "x-jserve-ignored-params" not in signed[2]


async def test_a_conversation_with_tools_reaches_the_template():
    script = Script(("ok",))
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I ask.", "signature": ""},
                {"type": "text", "text": "Wait."},
                {
                    "type": "tool_use",
                    "id": "call_1",
                    "name": "get_weather",
                    "input": {"city": "Oslo"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And now?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "rain"}],
                    "is_error": True,
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
    ]
    system = [{"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}]
    async with talking(script) as srv, client_of(srv) as client:
        await client.messages.create(
            model="tiny", max_tokens=9, messages=turns, system=system, tools=[TOOL]
        )
        counted = await client.messages.count_tokens(
            model="tiny", messages=turns, system=system, tools=[TOOL]
        )
    (request,) = script.records
    assert counted.input_tokens == len(request.prompt_ids)
    prompt = tokenizer().decode(request.prompt_ids, skip_special_tokens=False)
    places = [
        prompt.index(word) for word in ("Rules.", "weather?", "Wait.", "Oslo", "rain", "And now?")
    ]
    assert places == sorted(places)
    assert "<|im_start|>tool\nError: rain<|im_end|>" in prompt


async def test_the_answer_goes_on_where_the_last_message_ends(srv):
    async with client_of(srv) as client:
        messages = [*USER, {"role": "assistant", "content": "Well, "}]
        await client.messages.create(model="tiny", max_tokens=9, messages=messages)
    prompt = bytes(i for i in srv.engine.records[-1].request.prompt_ids if i < 256).decode()
    assert prompt.endswith(("assistant\nWell,", "assistant\nWell, "))


@pytest.mark.parametrize(
    ("fields", "end", "reason", "sequence"),
    [
        ({}, Finish.STOP, "end_turn", None),
        ({}, Finish.LENGTH, "max_tokens", None),
        ({"stop_sequences": ["car"]}, Finish.STOP, "stop_sequence", "car"),
    ],
)
async def test_stop_reasons(fields, end, reason, sequence):
    script = Script(("the red car",))
    script.end = end
    async with talking(script) as srv, client_of(srv) as client:
        whole = await client.messages.create(model="tiny", max_tokens=99, messages=USER, **fields)
        assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)
        async with client.messages.stream(
            model="tiny", max_tokens=99, messages=USER, **fields
        ) as stream:
            final = await stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == (reason, sequence)
        assert [b.text for b in final.content] == [b.text for b in whole.content]


async def test_tool_choice_and_schemas_are_constraints():
    script = Script((CALL,))
    async with talking(script) as srv, client_of(srv) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            await client.messages.create(
                model="tiny", max_tokens=99, messages=USER, tools=[TOOL], tool_choice=choice
            )
            assert script.records[-1].params.structured_outputs is not None
        await client.messages.create(model="tiny", max_tokens=99, messages=USER, tools=[TOOL])
        assert script.records[-1].params.structured_outputs is None
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await client.messages.create(
            model="tiny",
            max_tokens=99,
            messages=USER,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
        assert script.records[-1].params.structured_outputs.json == schema


async def test_thinking_budgets():
    script = Script(("<think>\nSo.\n</think>\n\nred",))
    template = FORMATS["hermes"]
    async with talking(script, template) as srv, client_of(srv) as client:
        enabled = {"type": "enabled", "budget_tokens": 64}
        await client.messages.create(model="tiny", max_tokens=99, messages=USER, thinking=enabled)
        assert script.records[-1].params.thinking_token_budget == 64
        await client.messages.create(
            model="tiny", max_tokens=99, messages=USER, thinking={"type": "disabled"}
        )
        prompt = tokenizer().decode(script.records[-1].prompt_ids, skip_special_tokens=False)
        assert prompt.endswith("<think></think>")
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
            await client.messages.create(
                model="tiny", max_tokens=64, messages=USER, thinking=enabled
            )


async def test_errors_are_anthropics():
    engine = FakeEngine(("x" * 20,))
    async with live(engine) as srv, client_of(srv) as client:
        with pytest.raises(anthropic.NotFoundError) as e:
            await client.messages.create(model="nope", max_tokens=5, messages=USER)
        assert e.value.body["type"] == "error"
        assert e.value.body["error"]["type"] == "not_found_error"
        assert e.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="top_p"):
            await client.messages.create(
                model="tiny", max_tokens=5, messages=USER, extra_body={"top_p": 7}
            )
        engine.refuse = Overloaded("full", retry_after=3)
        with pytest.raises(anthropic.APIStatusError) as e:
            await client.messages.create(model="tiny", max_tokens=5, messages=USER)
        assert e.value.body["error"]["type"] == "overloaded_error"
        assert e.value.response.headers["retry-after"] == "3"
        engine.refuse, engine.fail_at = None, 3
        with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
            async with client.messages.stream(model="tiny", max_tokens=20, messages=USER) as stream:
                await stream.get_final_message()
        events = await srv.events(PATH, {"model": "tiny", "max_tokens": 20, "messages": USER})
        assert events[-1]["type"] == "error"
        assert "message_stop" not in [event["type"] for event in events]


async def test_a_key_may_come_as_x_api_key():
    async with live(api_key=("sk-1",)) as srv:
        async with anthropic.AsyncAnthropic(base_url=srv.url, api_key="sk-1") as client:
            assert await client.messages.create(model="tiny", max_tokens=5, messages=USER)
        async with anthropic.AsyncAnthropic(base_url=srv.url, api_key="sk-2") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="tiny", max_tokens=5, messages=USER)
