"""/v1/responses with the real openai SDK: what users do, and the errors they see."""

from __future__ import annotations

from contextlib import asynccontextmanager

import openai
import pytest
from pydantic import BaseModel

from jserve.types import Finish
from tests.api.fake import FakeEngine, live
from tests.api.talk import WEATHER, Script, talking
from tests.grammar.kit import tokenizer

TEXT = "Hello, wörld! 🙂"
TOOL = {"type": "function", **WEATHER["function"]}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)
THOUGHT = "<think>\nSo.\n</think>\n\n"
PATH = "/v1/responses"


@asynccontextmanager
async def client_of(srv):
    url = srv.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client.responses


async def test_create(srv):
    srv.engine.n_cached = 2
    async with client_of(srv) as client:
        answer = await client.create(
            model="tiny",
            input="hi",
            instructions="Be kind.",
            max_output_tokens=50,
            temperature=0.5,
            metadata={"a": "b"},
            store=True,
        )
    assert answer.output_text == TEXT
    assert (answer.status, answer.object, answer.error) == ("completed", "response", None)
    assert (answer.metadata, answer.store, answer.temperature) == ({"a": "b"}, False, 0.5)
    assert answer.instructions == "Be kind."
    request = srv.engine.records[-1].request
    assert answer.usage.input_tokens == len(request.prompt_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens == len(TEXT.encode()) + 1
    assert request.params.max_tokens == 50
    assert "Be kind." in bytes(i for i in request.prompt_ids if i < 256).decode()


async def test_stream_helper_with_thought_text_and_calls():
    script = Script((THOUGHT + "Look: " + CALL + CALL,))
    fields = {"model": "tiny", "input": "hi", "tools": [TOOL]}
    async with talking(script) as srv, client_of(srv) as client:
        async with client.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        whole = await client.create(**fields)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    for response in (final, whole):
        thought, text, first, second = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "So.")
        assert (text.type, text.content[0].text) == ("message", "Look:")
        assert (first.type, first.name) == ("function_call", "get_weather")
        assert first.arguments == second.arguments == '{"city": "Paris", "days": 2}'
        assert first.call_id != second.call_id
    n_thought = len(tokenizer().encode(THOUGHT.rstrip())) - 2  # the tags
    assert whole.usage.output_tokens_details.reasoning_tokens == n_thought


async def test_a_conversation_comes_back_as_items():
    script = Script((THOUGHT + "Look: " + CALL, "ok"))
    async with talking(script) as srv, client_of(srv) as client:
        first = await client.create(model="tiny", input="hi", tools=[TOOL])
        items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        call_id = first.output[-1].call_id
        items.append({"type": "function_call_output", "call_id": call_id, "output": "rain"})
        second = await client.create(model="tiny", input=items, tools=[TOOL])
    assert second.output_text == "ok"
    prompt = tokenizer().decode(script.records[-1].prompt_ids, skip_special_tokens=False)
    places = [prompt.index(word) for word in ("user\nhi", "Look:", "Paris", "tool\nrain")]
    assert places == sorted(places)
    assert prompt.count("assistant\n") == 2, "what was said in one turn is one message"


async def test_parse_and_forced_tools_are_constraints():
    class Place(BaseModel):
        city: str

    script = Script(('{"city": "Oslo"}', CALL))
    async with talking(script) as srv, client_of(srv) as client:
        answer = await client.parse(model="tiny", input="hi", text_format=Place)
        assert answer.output_parsed == Place(city="Oslo")
        assert script.records[-1].params.structured_outputs.json["required"] == ["city"]
        for choice in ("required", {"type": "function", "name": "get_weather"}):
            await client.create(model="tiny", input="hi", tools=[TOOL], tool_choice=choice)
            assert script.records[-1].params.structured_outputs is not None


async def test_an_answer_cut_short_is_incomplete():
    script = Script(("the red car",))
    script.end = Finish.LENGTH
    async with talking(script) as srv, client_of(srv) as client:
        whole = await client.create(model="tiny", input="hi")
        assert whole.status == "incomplete"
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.output[0].status == "incomplete"
        stream = await client.create(model="tiny", input="hi", stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_logprobs_are_those_of_the_text(chunk):
    script = Script((THOUGHT + "the réd car",))
    script.chunk = chunk
    fields = {"model": "tiny", "input": "hi", "top_logprobs": 2}
    async with talking(script) as srv, client_of(srv) as client:
        whole = await client.create(**fields)
        told = []
        async for event in await client.create(**fields, stream=True):
            if event.type == "response.output_text.delta":
                told += event.logprobs
            elif event.type == "response.output_text.done":
                done = event.logprobs
        (part,) = whole.output[-1].content
        n_behind = len(tokenizer().encode(THOUGHT + "the réd car")) + 1
        n_behind -= len(tokenizer().encode(THOUGHT.rstrip()))
        assert len(part.logprobs) == n_behind
        assert [p.token for p in part.logprobs] == [p.token for p in done]
        assert [p.token for p in told] == [p.token for p in done[: len(told)]]
        assert len(done) - len(told) <= 1, "only the end token has no text to go with"
        assert len(part.logprobs[0].top_logprobs) == 2
        with pytest.raises(openai.BadRequestError, match="with tools"):
            await client.create(**fields, tools=[TOOL])


async def test_errors():
    engine = FakeEngine(("x" * 20,))
    async with live(engine) as srv, client_of(srv) as client:
        with pytest.raises(openai.BadRequestError) as e:
            await client.create(model="tiny", input="hi", previous_response_id="resp_1")
        assert (e.value.param, e.value.code) == ("previous_response_id", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError):
            await client.create(model="nope", input="hi")
        engine.fail_at = 3
        seen: list = []

        async def hear() -> None:
            async for event in await client.create(model="tiny", input="hi", stream=True):
                seen.append(event)

        with pytest.raises(openai.APIError, match="the engine failed"):
            await hear()
        kinds = [event.type for event in seen]
        assert kinds[-1] == "response.failed"
        assert seen[-1].response.status == "failed"
        assert seen[-1].response.error.message
        assert "response.completed" not in kinds


async def test_thoughts_are_in_the_clear_so_that_nothing_need_be_included():
    body = {"input": "hi", "include": ["reasoning.encrypted_content"]}
    for strict in (False, True):
        async with talking(Script(("<think>\nhm\n</think>\n\nyes",)), strict_params=strict) as srv:
            status, answer, headers = await srv.post("/v1/responses", body)
            if strict:
                assert (status, answer["error"]["param"]) == (400, "include[0]")
                continue
            assert headers["x-jserve-ignored-params"] == "include[0]"
            thought = answer["output"][0]
            assert thought["content"][0]["text"] == "hm"
            back = {"input": [*answer["output"], {"role": "user", "content": "so?"}]}
            assert (await srv.post("/v1/responses", body | back))[0] == 200
