"""Members of the objects inside fields: each that is declared does what it says, others have no effect.

``SAMPLES`` hold an instance of every object that any declaration describes; one that is added fails
here until it has one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jserve.api.http.routes import PUBLIC
from jserve.api.request import declared
from jserve.api.request.declared import Holds, held
from jserve.api.request.fields import Fields
from jserve.api.request.formats import STRUCTURED
from jserve.sampling import StructuredOutputs
from tests.api.talk import Script, talking

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    USER,
]
NAMED = {"type": "function", "function": {"name": "f"}}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [{"type": "text", "text": "1"}],
            }
        ],
    },
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "1"}],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
]
FLAT = [{"type": "function", "name": "f", "parameters": SCHEMA}]
INPUTS = [{"name": "f", "input_schema": SCHEMA}]
JSON = {"type": "json_schema", "schema": SCHEMA}
MESSAGE: dict[str, Any] = {"messages": BLOCKS, "max_tokens": 9, "system": BLOCKS[0]["content"]}
SAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TURNS, "tools": TOOLS, "tool_choice": NAMED}),
    ("/v1/chat/completions", {"messages": TURNS, "response_format": {"type": "text"}}),
    ("/v1/chat/completions", {"messages": TURNS, "response_format": TAGS}),
    ("/v1/chat/completions", {"messages": TURNS, "stream": True, "stream_options": {}}),
    (
        "/v1/completions",
        {
            "prompt": "hi",
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/responses", {"input": ITEMS, "tools": FLAT, "reasoning": {}}),
    ("/v1/responses", {"input": ITEMS, "tools": FLAT, "tool_choice": FLAT[0] | {"parameters": None}}),
    ("/v1/responses", {"input": "hi", "text": {"format": JSON}}),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "text"}}}),
    ("/v1/responses", {"input": "hi", "stream": True, "stream_options": {}}),
    (
        "/v1/messages",
        MESSAGE | {"tools": INPUTS, "tool_choice": {"type": "auto"}, "metadata": {}},
    ),
    ("/v1/messages", MESSAGE | {"output_config": {"format": JSON}}),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "adaptive"}}),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "tools": INPUTS}),
    ("/v1/caches", {"name": "c", "messages": TURNS, "tools": TOOLS}),
    ("/tokenize", {"messages": TURNS, "tools": TOOLS, "tool_choice": NAMED}),
]  # fmt: skip
OPEN = {"parameters", "input_schema", "schema"}
"""Members that hold anything."""


@pytest.fixture(params=[False, True], ids=["lenient", "strict"])
async def srv(request):
    async with talking(Script(('{"a": 1}',)), strict_params=request.param) as running:
        yield running, request.param


def places(value: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, object) of every object inside a body."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, f"{at}[{i}]")
    elif isinstance(value, dict):
        if at:
            yield at, value
        for name, member in value.items():
            called = name == "input" and isinstance(member, dict)
            if name not in OPEN and not called:
                yield from places(member, f"{at}.{name}".lstrip("."))


def with_member(body: dict[str, Any], at: str, name: str, value: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(body))
    dict(places(found))[at][name] = value
    return found


async def answer(srv, path: str, body: dict[str, Any]) -> tuple[int, str, str | None]:
    async with srv.http.post(srv.url + path, json=body) as r:
        return r.status, await r.text(), r.headers.get("x-jserve-ignored-params")


@pytest.mark.parametrize(("path", "body"), SAMPLES)
async def test_an_unknown_member_anywhere_is_listed_or_refused_by_name(srv, path, body):
    server, strict = srv
    status, text, listed = await answer(server, path, body)
    assert (status, listed) == (200, None), text
    seen = set()
    for at, _ in places(body):
        seen.add(at)
        name = f"{at}.frobnicate"
        status, text, listed = await answer(server, path, with_member(body, at, "frobnicate", 1))
        if strict:
            assert status == 400, (name, text)
            assert f'"param":"{name}"' in text
        else:
            assert (status, listed) == (200, name), text
        status, text, listed = await answer(server, path, with_member(body, at, "frobnicate", None))
        assert (status, listed) == (200, None), (name, text)
    assert seen


def test_the_declared_members_of_structured_outputs_are_its_fields():
    assert set(STRUCTURED["properties"]) == {f.name for f in dataclasses.fields(StructuredOutputs)}


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of objects whose members are declared, inside ``schema``."""
    if isinstance(schema, list):
        for item in schema:
            yield from objects(item)
    elif isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema:
            yield schema
        for name, inner in schema.items():
            inner = list(inner.values()) if name == "properties" else inner
            yield from objects(inner)


def shapes(body: type[Fields]) -> Iterator[dict[str, Any]]:
    for field in body.model_fields.values():
        for inner in Fields.__subclasses__():
            if inner.__name__ in str(field.annotation):
                yield from shapes(inner)
        if isinstance(field.json_schema_extra, dict):
            yield from objects(field.json_schema_extra)


async def test_the_samples_hold_every_declared_object_and_its_marks_hold(srv, monkeypatch):
    server, strict = srv
    visited: list[tuple[int, str]] = []
    members = declared._members

    def watched(value, schema, at):
        visited.append((id(schema), at))
        return members(value, schema, at)

    monkeypatch.setattr(declared, "_members", watched)
    missing = {id(s): s for route in PUBLIC if route.fields for s in shapes(route.fields)}
    known = dict(missing)
    assert len(known) > 25
    for path, body in SAMPLES:
        visited.clear()
        await answer(server, path, body)
        for schema, at in dict(visited).items():
            missing.pop(schema, None)
            for name, member in known[schema]["properties"].items():
                if held(member) is not Holds.APPLIED:
                    await check_mark(server, path, body, at, name, held(member), strict)
    assert not missing


async def check_mark(srv, path, body, at, name, does: Holds, strict: bool) -> None:
    status, text, listed = await answer(srv, path, with_member(body, at, name, {"x": 1}))
    refused = does is Holds.REFUSED or (strict and does is Holds.IGNORED)
    where = (path, f"{at}.{name}", text[:200])
    assert status == (400 if refused else 200), where
    if refused:
        assert f'"param":"{at}.{name}"' in text, where
    else:
        assert listed == (f"{at}.{name}" if does is Holds.IGNORED else None), where


async def test_of_a_list_the_first_one_is_named():
    turns = [dict(USER, mood=i) for i in range(30)]
    async with talking(Script(("hi",))) as srv:
        _, _, listed = await answer(srv, "/v1/chat/completions", {"messages": turns, "zeal": 1})
        assert listed == "zeal, messages[0].mood"
        many = {"messages": [USER | {f"m{i}": 1 for i in range(50)}]}
        _, _, listed = await answer(srv, "/v1/chat/completions", many)
        assert len(listed.split(", ")) == 20
        odd = {"messages": [USER | {"a b\n\r": 1}]}
        _, _, listed = await answer(srv, "/v1/chat/completions", odd)
        assert listed == "messages[0].a?b??"


async def test_a_refusal_sent_back_is_what_was_said():
    script = Script(("hi",))
    parsed = {"role": "assistant", "content": None, "refusal": "I will not"}
    async with talking(script) as srv:
        body = {"messages": [USER, parsed, USER]}
        _, text, _ = await answer(srv, "/tokenize", body | {"return_token_strs": True})
        assert "will" in re.sub(r'[",\s]', "", text)


async def test_what_a_function_does_not_declare_is_not_shown_to_the_model():
    async with talking(Script(("hi",))) as srv:
        counts = []
        for more in ({}, {"hint": "x" * 50}, {"description": "x" * 50}):
            tools = [{"type": "function", "function": TOOLS[0]["function"] | more}]
            _, text, _ = await answer(srv, "/tokenize", {"messages": [USER], "tools": tools})
            counts.append(re.search(r'"count":(\d+)', text)[1])
        assert counts[0] == counts[1] != counts[2]
