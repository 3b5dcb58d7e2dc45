"""Hostile and mistaken requests: each gets its status, OpenAI's body and the field's name."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import zlib

import pytest

from jserve.errors import Overloaded
from tests.api.fake import FakeEngine, chat_body, live

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
BIG = 10**400


def check_error(body: dict, headers) -> dict:
    """The shape every error has."""
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 300
    assert "Traceback" not in error["message"]
    assert headers["x-request-id"]
    assert headers["Content-Type"].startswith("application/json")
    return error


def json_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def nested(n: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(n):
        schema = {"items": schema}
    return schema


BOTH = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10000}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 2**63}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1e30}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 100000}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
    ({"stop_token_ids": list(range(16))}, "stop_token_ids"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 400: 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["nine chars and more"]}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"priority": 2**63}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"best_of": 4}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"response_format": 3}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": json_schema({"type": "array", "uniqueItems": True})},
        "response_format.json_schema.schema",
    ),
    ({"response_format": json_schema({"$ref": "#"})}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": json.dumps(nested(70))}}, "structured_outputs.json"),
    (
        {"response_format": json_schema({"enum": ["x" * 70_000]})},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag", "structures": 3}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": 3}}, "response_format"),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "token", "token": 3}}},
        "response_format",
    ),
    ({"structured_outputs": "a"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"guided_anything_new": 1}, "guided_anything_new"),
    ({"regex": "(a"}, "regex"),
    ({"grammar": "a"}, "grammar"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"json_schema": {}, "structured_outputs": {"regex": "a"}}, "json_schema"),
    ({"json_schema": {}, "response_format": {"type": "json_object"}}, "json_schema"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"audio": {"parser": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"functions": []}, "functions"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"verbosity": "low"}, "verbosity"),
]


TEXT_PATH = "/v1/completions"
# Path, fields, and the value that the message has to name: the first bad one.
NAMED = [
    (TEXT_PATH, {"prompt": "a", "logit_bias": {"1": 1, "2049": 1, "2050": 1}}, "'2049'"),
    (TEXT_PATH, {"prompt": "a", "logit_bias": {"-1": 1}}, "'-1'"),
    (TEXT_PATH, {"prompt": [1, 2050, 2049]}, "prompt[1] is 2050"),
    (TEXT_PATH, {"prompt": [[1], [2, 3, -4]]}, "prompt[1][2] is -4"),
    (TEXT_PATH, {"prompt": [[1, True]]}, "prompt[1] is 'True'"),
    (TEXT_PATH, {"prompt": "a", "allowed_token_ids": [3, 2051]}, "allowed_token_ids[1] is 2051"),
    (TEXT_PATH, {"prompt": "a", "stop_token_ids": [9999]}, "stop_token_ids[0] is 9999"),
    (
        TEXT_PATH,
        {"prompt": "a", "logprobs": 1, "logprob_token_ids": [5, -7]},
        "logprob_token_ids[1] is -7",
    ),
    (
        "/v1/score",
        {"query": "a", "items": ["b"], "label_token_ids": [7, 8888]},
        "label_token_ids[1] is 8888",
    ),
    ("/v1/score", {"query": [1, 8888], "items": ["b"]}, "query[1] is 8888"),
    ("/v1/score", {"query": "a", "items": [[1], [7777]]}, "items[1][0] is 7777"),
    ("/detokenize", {"tokens": [1, 6666]}, "tokens[1] is 6666"),
]


@pytest.mark.parametrize(("path", "fields", "words"), NAMED)
async def test_the_first_bad_value_is_named(shared, path, fields, words):
    status, body, _ = await shared.post(path, fields)
    assert status == 400
    assert words in body["error"]["message"]
    field = words.partition("[")[0]
    assert body["error"]["param"] == ("logit_bias" if field.startswith("'") else field)


@pytest.fixture
async def shared():
    async with live() as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, COMP])
async def test_bad_fields(shared, path):
    """One server for the whole table: a bad request leaves nothing behind."""
    base = chat_body() if path == CHAT else {"prompt": "hi"}
    for fields, param in BOTH:
        status, body, headers = await shared.post(path, base | fields)
        error = check_error(body, headers)
        assert (status, error["param"]) == (400, param), (fields, body)
        assert error["type"] == "invalid_request_error"
        assert error["code"] in (
            "invalid_value",
            "unsupported_parameter",
            "context_length_exceeded",
            "invalid_schema",
            "grammar_too_large",
        )
    assert shared.engine.records == []
    assert (await shared.post(path, base))[0] == 200


def parts(*content) -> dict:
    return {"messages": [{"role": "user", "content": list(content)}]}


CHAT_ONLY = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (parts("x"), "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": "", "function_call": {}}]},
        "messages[0].function_call",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0]",
    ),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 511}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": []}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f"}}] * 129}, "tools"),
    (
        {"tools": [{"function": {"name": "f", "parameters": [1]}}]},
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "function"}},
        "tool_choice.function.name",
    ),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": 3}, "tool_choice"),
    (
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice.type",
    ),
    ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"include_reasoning": 3}, "include_reasoning"),
    (
        {"tools": [{"function": {"name": "f"}}], "parallel_tool_calls": False},
        "parallel_tool_calls",
    ),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"nonsense": 1}}, "chat_template_kwargs.nonsense"),
    ({"chat_template_kwargs": {"enable_thinking": []}}, "chat_template_kwargs.enable_thinking"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


async def test_bad_chat_fields(shared):
    for fields, param in CHAT_ONLY:
        status, body, headers = await shared.post(CHAT, chat_body() | fields)
        error = check_error(body, headers)
        assert (status, error["param"]) == (400, param), (fields, body)
    assert shared.engine.records == []


PROMPTS = [
    None,
    "",
    [],
    5,
    {},
    [[]],
    [-1],
    [259],
    [2**63],
    [1, True],
    [1.0],
    [1, "a"],
    ["a", 1],
    ["a", [1]],
    [[1], "a"],
    [[[1]]],
    ["a"] * 129,
    [[1]] * 20000,
    [1] * 512,
    "x" * 512,
    "x" * 100000,
]


async def test_too_many_bad_words_are_counted_as_the_device_holds_them(shared):
    """A word is kept with and without a blank in front, so 16 words fit."""
    for n, expected in ((16, 200), (17, 400)):
        body = chat_body(bad_words=[f"w{i}" for i in range(n)])
        status, answer, _ = await shared.post("/v1/chat/completions", body)
        assert status == expected, answer
    assert answer["error"]["param"] == "bad_words"
    assert "32" in answer["error"]["message"]
    assert "34" in answer["error"]["message"]


async def test_bad_prompts(shared):
    for prompt in PROMPTS:
        status, body, headers = await shared.post(COMP, {"prompt": prompt, "max_tokens": 1})
        error = check_error(body, headers)
        assert (status, error["param"]) == (400, "prompt"), (str(prompt)[:50], body)
    assert shared.engine.records == []


async def test_context_errors_give_both_numbers(shared):
    _, body, _ = await shared.post(COMP, {"prompt": "x" * 600})
    assert body["error"]["code"] == "context_length_exceeded"
    assert "600" in body["error"]["message"]
    assert "512" in body["error"]["message"]
    _, body, _ = await shared.post(COMP, {"prompt": "x" * 100, "max_tokens": 413})
    assert body["error"]["code"] == "context_length_exceeded"
    assert (await shared.post(COMP, {"prompt": "x" * 100, "max_tokens": 412}))[0] == 200


async def test_completion_refusals(shared):
    for fields, param in [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"tools": [{}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"n": 2, "prompt": ["a"] * 65}, "n"),
    ]:
        status, body, _ = await shared.post(COMP, {"prompt": "a"} | fields)
        assert (status, body["error"]["param"]) == (400, param), fields


async def test_unknown_model(shared):
    status, body, headers = await shared.post(CHAT, chat_body(model="gpt-" + "9" * 500))
    error = check_error(body, headers)
    assert status == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert len(error["message"]) < 150
    status, body, _ = await shared.get("/v1/models/nope")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


BODIES = [
    (b"", 400),
    (b"{", 400),
    (b"null", 400),
    (b"[]", 400),
    (b'"x"', 400),
    (b"1", 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": "x", "temperature": Infinity}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "x", "seed": ' + str(BIG).encode() + b"}", 400),
    (b'{"prompt": "x", "top_k": 123456789012345678901234567890}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "\xed\xa0\x80"}', 400),
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'\xef\xbb\xbf{"prompt": "x"}', 400),
    (b"[" * 100000, 400),
    (b'{"a":' * 100000, 400),
    (b'{"a":' * 100 + b"1" + b"}" * 100, 400),
    (b'{"prompt": "x", "what": ' + b"[" * 64 + b"]" * 64 + b"}", 400),
    (b'{"prompt": "x", "what": ' + b"[" * 63 + b"]" * 63 + b"}", 200),
    (b'{"prompt": "a\\u0000b"}', 200),
    (b'{"prompt": "x", "what": {"a": {"b": 1}}}', 200),
]


async def test_bad_bodies(shared):
    for raw, expected in BODIES:
        async with shared.http.post(
            shared.url + COMP, data=raw, headers={"Content-Type": "application/json"}
        ) as r:
            body = await r.json()
            assert r.status == expected, (raw[:60], body)
            if expected != 200:
                check_error(body, r.headers)
    assert len(shared.engine.records) == 3


HEADERS = [
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": "application/json; charset=utf-7"}, 415),
    ({"Content-Type": "application/json; charset=bogus"}, 415),
    ({"Content-Type": "application/json; charset=UTF-8"}, 200),
    ({"Content-Type": "application/vnd.api+json"}, 200),
    ({"Content-Type": "application/json", "Content-Encoding": "deflate"}, 400),
    ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 400),
    ({"Content-Type": "application/json", "Content-Encoding": "rot13"}, 415),
    ({"Content-Type": "application/json", "Content-Encoding": "br"}, 415),
    ({"Content-Type": "application/json", "Content-Encoding": "zstd"}, 415),
    ({"Content-Type": "application/json", "Expect": "a-miracle"}, 417),
    ({"Content-Type": "application/json", "Expect": "100-continue"}, 200),
]


async def test_bad_headers(shared):
    for sent, expected in HEADERS:
        async with shared.http.post(shared.url + COMP, data=b'{"prompt":"x"}', headers=sent) as r:
            body = await r.json()
            assert r.status == expected, (sent, body)
            if expected != 200:
                check_error(body, r.headers)


async def test_who_asks_first_is_not_told_to_send_what_is_refused():
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    async with live(max_body_mb=0.1) as srv:
        answer = await raw_exchange(srv, head % 200_000)
        assert answer.startswith(b"HTTP/1.1 413")
        answer = await raw_exchange(srv, head % 14 + b'{"prompt":"x"}')
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


async def test_head_is_get_without_its_body(shared):
    for path, status in (("/health", 200), ("/ready", 200), ("/v1/models", 200), (COMP, 405)):
        ask = f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await raw_exchange(shared, ask.encode())
        assert answer.startswith(b"HTTP/1.1 %d" % status), answer
        assert answer.endswith(b"\r\n\r\n")


ACCEPTS = [
    ("", "text/plain"),
    ("text/plain", "text/plain"),
    ("text/plain; version=x", "text/plain"),
    ("*/*;q=zzz,,;;=", "text/plain"),
    ("application/openmetrics-text", "application/openmetrics-text"),
    ("application/openmetrics-text; version=\xff;q=zzz", "application/openmetrics-text"),
    ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
    (
        "application/openmetrics-text; version=99.canary; escaping=no",
        "application/openmetrics-text",
    ),
    ("application/openmetrics-text; version=" + "9." * 900, "application/openmetrics-text"),
]


async def test_metrics_whatever_is_accepted(shared):
    for accept, kind in ACCEPTS:
        async with shared.http.get(shared.url + "/metrics", headers={"Accept": accept}) as r:
            assert r.status == 200, accept
            assert r.headers["Content-Type"].startswith(kind)
            assert "canary" not in str(r.headers)
            assert "jserve:http_requests" in await r.text()


async def test_compressed_bodies(shared):
    raw = b'{"prompt": "x"}'
    for encoding, data in (("gzip", gzip.compress(raw)), ("deflate", zlib.compress(raw))):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        async with shared.http.post(shared.url + COMP, data=data, headers=headers) as r:
            assert r.status == 200, await r.text()


async def test_size_limits():
    async with live(max_body_mb=0.1) as srv:
        body = {"prompt": "x" * 200_000}
        status, answer, headers = await srv.post(COMP, body)
        assert status == 413
        assert check_error(answer, headers)["code"] == "body_too_large"
        bomb = gzip.compress(b" " * 5_000_000)
        sent = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with srv.http.post(srv.url + COMP, data=bomb, headers=sent) as r:
            assert r.status == 413
            check_error(await r.json(), r.headers)

        async def chunks():
            for _ in range(40):
                yield b" " * 10_000

        sent = {"Content-Type": "application/json"}
        async with srv.http.post(srv.url + COMP, data=chunks(), headers=sent) as r:
            assert r.status == 413
        assert (await srv.post(COMP, {"prompt": "x"}))[0] == 200


async def raw_exchange(srv, data: bytes, seconds: float = 2.0) -> bytes:
    port = int(srv.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    finally:
        writer.close()


async def test_announced_size_is_refused_at_once():
    async with live() as srv:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10000000000\r\n\r\n"
        )
        answer = await raw_exchange(srv, head)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


RAW = [
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 20000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nA\x00B: 1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\nabcde",
]


async def test_parser_errors_are_json(shared):
    for data in RAW:
        answer = await raw_exchange(shared, data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:200]
        assert set(json.loads(body)) == {"error"}
        assert b"x-request-id" in head.lower()
        assert answer.count(b"HTTP/1.") == 1, "the second request must not be answered"


async def test_paths_and_methods(shared):
    for method, path, expected in [
        ("GET", "/nope", 404),
        ("GET", "/v1/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", CHAT, 405),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/v1/models/" + "x" * 5000, 404),
    ]:
        async with shared.http.request(method, shared.url + path) as r:
            assert r.status == expected, path
            check_error(await r.json(), r.headers)
            if expected == 405:
                assert r.headers["Allow"]


async def test_slow_headers_and_bodies_are_cut_off():
    from jserve.api.http.front import Limits

    limits = Limits(header_timeout_s=0.3, body_timeout_s=0.3)
    async with live(limits=limits) as srv:
        assert await raw_exchange(srv, b"") == b""
        assert await raw_exchange(srv, b"POST /v1/comp") == b""
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 50\r\n\r\n{"prompt"'
        )
        answer = await raw_exchange(srv, head)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer
        # a second, unfinished request on a connection that was good before
        reader, writer = await asyncio.open_connection("127.0.0.1", int(srv.url.rsplit(":", 1)[1]))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read(1000)).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /hea")
        assert await asyncio.wait_for(reader.read(), 2.0) == b""
        writer.close()
        # the timer of the header must not hit a long answer
        srv.engine.first_delay = 0.8
        assert (await srv.post(COMP, {"prompt": "x"}))[0] == 200


async def test_connection_cap():
    from jserve.api.http.front import Limits

    async with live(limits=Limits(max_connections=2)) as srv:
        port = int(srv.url.rsplit(":", 1)[1])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.05)
        answer = await raw_exchange(srv, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too many connections" in answer
        for _, writer in held:
            writer.close()


async def test_pipelined_requests_are_answered_in_order(shared):
    body = b'{"prompt":"x","max_tokens":1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"x-request-id: r%d\r\nContent-Length: %d\r\n\r\n"
    )
    last = b"GET /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await raw_exchange(shared, head % (1, len(body)) + body + head % (2, 2) + b"{}" + last)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400", b"404"]
    assert answer.index(b"x-request-id: r1") < answer.index(b"x-request-id: r2")


async def test_keep_alive_after_an_error(shared):
    connections = shared.http.connector
    for _ in range(3):
        await shared.post(COMP, {"prompt": []})
    assert (await shared.post(COMP, {"prompt": "x"}))[0] == 200
    assert len(connections._conns) <= 1


async def test_engine_refusals_keep_their_status():
    engine = FakeEngine()
    async with live(engine) as srv:
        engine.refuse = Overloaded("the queue is full", retry_after=3)
        for stream in (False, True):
            status, body, headers = await srv.post(COMP, {"prompt": "x", "stream": stream})
            assert status == 503
            assert check_error(body, headers)["code"] == "overloaded"
            assert headers["Retry-After"] == "3"
        engine.refuse = None
        engine.fail_at = 0
        for code, expected in [
            ("overloaded", 503),
            ("invalid_value", 400),
            ("context_length_exceeded", 400),
            ("engine_step_failed", 500),
            ("unschedulable", 500),
            ("engine_dead", 503),
            ("draining", 503),
            (None, 500),
        ]:
            engine.failure = {"error": "words", "error_code": code}
            for stream in (False, True):
                status, body, headers = await srv.post(COMP, {"prompt": "x", "stream": stream})
                assert status == expected, code
                check_error(body, headers)
                assert headers.get("x-should-retry") == ("false" if status == 500 else None)


async def test_an_unknown_fault_says_and_logs_nothing_of_the_prompt(caplog):
    engine = FakeEngine()
    engine.raise_at = (0, ValueError("secret prompt words"))
    with caplog.at_level(logging.DEBUG):
        async with live(engine, api_key=("sk-very-secret",)) as srv:
            status, body, headers = await srv.post(
                COMP,
                {"prompt": "secret prompt words"},
                headers={"Authorization": "Bearer sk-very-secret"},
            )
            await srv.post(COMP, {"prompt": 5}, headers={"x-api-key": "sk-other-secret"})
    assert status == 500
    assert check_error(body, headers)["code"] == "internal_error"
    assert "secret" not in json.dumps(body)
    assert "ValueError at" in caplog.text
    assert "secret" not in caplog.text


async def test_request_id_rules(shared):
    for given, kept in [
        ("abc-DEF_1.2", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("a b", False),
        ("ä", False),
        ("<script>", False),
    ]:
        for path in ("/health", "/nope"):
            async with shared.http.get(shared.url + path, headers={"x-request-id": given}) as r:
                got = r.headers["x-request-id"]
                assert (got == given) is kept
                assert len(got) <= 64
