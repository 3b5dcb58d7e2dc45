"""The openai SDK against a live server: what users do, and the errors they see."""

from __future__ import annotations

import asyncio
import inspect

import anthropic
import openai
import pytest
import pytest_asyncio

from jserve.api.anthropic.fields import CountBody, MessagesBody
from jserve.api.openai.fields import ChatBody, CompletionBody
from jserve.api.responses.fields import ResponseBody
from tests.api.fake import FakeEngine, live

TEXT = "Hello, wörld! 🙂"
USER = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def client(srv):
    async with openai.AsyncOpenAI(base_url=srv.url + "/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.mark.slow
def test_every_argument_of_the_sdks_is_a_field_that_is_declared():
    """Slow only because it fails when an SDK learns something new: then somebody must decide."""
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    headers = {"user_profile_id", "workspace_id"}  # and no fields, of Anthropic's
    oai, ant = openai.OpenAI(api_key="x"), anthropic.Anthropic(api_key="x")
    for create, body in (
        (oai.chat.completions.create, ChatBody),
        (oai.completions.create, CompletionBody),
        (oai.responses.create, ResponseBody),
        (ant.messages.create, MessagesBody),
        (ant.beta.messages.create, MessagesBody),
        (ant.messages.count_tokens, CountBody),
        (ant.beta.messages.count_tokens, CountBody),
    ):
        arguments = set(inspect.signature(create).parameters) - own - headers
        assert arguments <= set(body.model_fields), (body, arguments - set(body.model_fields))


async def test_chat(client):
    answer = await client.chat.completions.create(model="tiny", messages=USER, seed=11)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].seed == 11
    assert answer._request_id


async def test_chat_stream(client):
    stream = await client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}, n=2
    )
    texts, usage = ["", ""], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [TEXT, TEXT]
    assert usage.completion_tokens == 2 * (len(TEXT.encode()) + 1)


async def test_stream_helper(client):
    async with client.chat.completions.stream(model="tiny", messages=USER) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


async def test_completions_and_logprobs(client):
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=2, echo=True
    )
    assert [c.text for c in answer.choices] == ["aHel", "bHel"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    chat = await client.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=2
    )
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_models(client):
    assert [m.id async for m in client.models.list()] == ["tiny", "tiny-alias"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors(client, srv):
    with pytest.raises(openai.NotFoundError) as e:
        await client.chat.completions.create(model="nope", messages=USER)
    assert (e.value.code, e.value.param) == ("model_not_found", "model")
    assert e.value.request_id
    with pytest.raises(openai.BadRequestError) as e:
        await client.chat.completions.create(model="tiny", messages=USER, temperature=9)
    assert (e.value.type, e.value.param) == ("invalid_request_error", "temperature")
    srv.engine.fail_at = 2
    stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="the engine failed"):
        async for _ in stream:
            pass


async def test_overload_is_retried():
    engine = FakeEngine()
    async with live(engine) as srv:
        engine.fail_at, engine.failure = 0, {"error": "full", "error_code": "overloaded"}
        async with openai.AsyncOpenAI(base_url=srv.url + "/v1", api_key="x") as client:
            task = asyncio.create_task(client.chat.completions.create(model="tiny", messages=USER))
            while not any(record.failed for record in engine.records):
                await asyncio.sleep(0.01)
            engine.fail_at = None
            assert (await task).choices[0].message.content == TEXT
    assert len(engine.records) == 2


async def test_keys():
    async with live(api_key=("sk-good",)) as srv:
        async with openai.AsyncOpenAI(base_url=srv.url + "/v1", api_key="sk-bad") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=srv.url + "/v1", api_key="sk-good") as client:
            assert (await client.models.list()).data


def use_blocking_client(url: str) -> str:
    with openai.OpenAI(base_url=url + "/v1", api_key="x") as client:
        stream = client.chat.completions.create(model="tiny", messages=USER, stream=True)
        streamed = "".join(c.choices[0].delta.content or "" for c in stream)
        extra = {"ignore_eos": True, "min_tokens": 2, "top_k": 4}
        whole = client.chat.completions.create(
            model="tiny", messages=USER, max_completion_tokens=3, extra_body=extra
        )
        assert whole.choices[0].finish_reason == "length"
        return streamed


async def test_blocking_client(srv):
    assert await asyncio.to_thread(use_blocking_client, srv.url) == TEXT


async def test_closing_a_stream_early_cancels():
    engine = FakeEngine(("x" * 400,))
    engine.delay = 0.01
    async with live(engine) as srv:
        async with openai.AsyncOpenAI(base_url=srv.url + "/v1", api_key="x") as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=USER, stream=True, max_tokens=400
            )
            async for _ in stream:
                break
            await stream.close()
            for _ in range(100):
                if engine.records[0].cancelled_at is not None:
                    break
                await asyncio.sleep(0.01)
        assert engine.records[0].cancelled_at is not None
        assert not engine.records[0].finished
