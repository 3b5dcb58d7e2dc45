"""Every member that /v1/support lists, of every endpoint: a bad value is refused by name, none is forgotten.

The members are those that the server itself declares, met where a request holds them; one that is
added fails here until it has an entry and a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jserve.api.http.routes import PUBLIC
from jserve.api.ops.support import endpoints
from jserve.api.request import declared, fields
from jserve.api.request.declared import Holds, held
from tests.api.request.test_api_members import (
    BLOCKS,
    FLAT,
    INPUTS,
    SAMPLES,
    SCHEMA,
    TOOLS,
    TURNS,
    USER,
)
from tests.api.talk import Script, talking

TEXT: list[Any] = [5, True, [], {}]
FLAG: list[Any] = [1, "true", [], {}]
NOT_A_NUMBER: list[Any] = ["1", True, [], {}]
OBJECT: list[Any] = [5, "x", True, []]
SOME = "any value at all"

# Path -> values that are refused wherever it stands; (endpoint, path) where one differs.
BAD: dict[Any, Any] = {
    "messages[].role": [None, "wizard", *TEXT],
    "messages[].content": [5, True, {}, [1], [{}]],
    "messages[].content[].type": ["image_url", "", *TEXT],
    "messages[].content[].text": [None, *TEXT],
    "messages[].content[].refusal": [None, *TEXT],
    "messages[].tool_calls": [5, True, "x", {"a": 1}, [1], [{}]],
    "messages[].tool_calls[].id": TEXT,
    "messages[].tool_calls[].type": ["custom", *TEXT],
    "messages[].tool_calls[].function": [None, *OBJECT, {}],
    "messages[].tool_calls[].function.name": [None, *TEXT],
    "messages[].tool_calls[].function.arguments": [5, True, []],
    "messages[].tool_call_id": TEXT,
    "messages[].name": TEXT,
    "messages[].reasoning_content": TEXT,
    "messages[].thinking": TEXT,
    "messages[].reasoning": TEXT,
    "messages[].refusal": TEXT,
    "messages[].content[].id": [None, *TEXT],
    "messages[].content[].name": [None, *TEXT],
    "messages[].content[].input": OBJECT,
    "messages[].content[].tool_use_id": [None, *TEXT],
    "messages[].content[].content": [5, True, {}, [1], [{}]],
    "messages[].content[].content[].type": ["image", "", *TEXT],
    "messages[].content[].content[].text": [None, *TEXT],
    "messages[].content[].is_error": FLAG,
    "messages[].content[].thinking": [None, *TEXT],
    "system[].type": ["image", "", *TEXT],
    "system[].text": [None, *TEXT],
    "response_format.type": [None, "yaml", *TEXT],
    "response_format.json_schema": [None, *OBJECT, {}],
    "response_format.json_schema.schema": [None, *OBJECT, {"not": {}}],
    "response_format.structures": [None, 5, "x", [], {}, [1]],
    "response_format.structures[].begin": [None, *TEXT],
    "response_format.structures[].schema": [5, "x", [], {"not": {}}],
    "response_format.structures[].end": [None, *TEXT],
    "response_format.format": [5, "x", [], {}, {"type": "token"}],
    "response_format.triggers": [None, 5, "x", {}, [], [1], ["no tag begins so"]],
    "retain[].start": [-1, 2**31, *NOT_A_NUMBER],
    "retain[].end": [0, *NOT_A_NUMBER],
    "retain[].priority": [-1, 101, *NOT_A_NUMBER],
    "retain[].seconds": [-1, 86401, *NOT_A_NUMBER],
    "stream_options.include_usage": FLAG,
    "stream_options.continuous_usage_stats": FLAG,
    "structured_outputs.json": [5, True, [], "{", {"not": {}}],
    "structured_outputs.regex": [*TEXT, "(a"],
    "structured_outputs.choice": [5, "x", {}, [], [1], [""]],
    "structured_outputs.grammar": [*TEXT, "start: ("],
    "structured_outputs.json_object": FLAG,
    "structured_outputs.structural_tag": [5, True, [], {}, "{"],
    "structured_outputs.whitespace_pattern": [*TEXT, "(a"],
    "structured_outputs.disable_any_whitespace": FLAG,
    "structured_outputs.disable_additional_properties": FLAG,
    "tool_choice.type": ["allowed_tools", *TEXT],
    "tool_choice.function": [None, *OBJECT, {}],
    "tool_choice.function.name": [None, "g", *TEXT],
    "tool_choice.name": ["g", *TEXT],
    "tool_choice.disable_parallel_tool_use": FLAG,
    "tools[].type": ["retrieval", *TEXT],
    "tools[].function": [None, *OBJECT, {}],
    "tools[].function.name": [None, "", *TEXT],
    "tools[].function.description": TEXT,
    "tools[].function.parameters": OBJECT,
    "tools[].function.return": OBJECT,
    "tools[].function.strict": FLAG,
    "tools[].name": [None, "", *TEXT],
    "tools[].description": TEXT,
    "tools[].parameters": OBJECT,
    "tools[].input_schema": OBJECT,
    "tools[].strict": FLAG,
    "input[].type": ["item_reference", *TEXT],
    "input[].role": [None, "wizard", *TEXT],
    "input[].content": [5, True, {}, [1], [{}]],
    "input[].content[].type": ["input_image", "", *TEXT],
    "input[].content[].text": [None, *TEXT],
    "input[].content[].refusal": [None, *TEXT],
    "input[].call_id": [None, *TEXT],
    "input[].name": [None, *TEXT],
    "input[].arguments": [None, *TEXT],
    "input[].output": [None, 5, True, {}, [1], [{}]],
    "input[].output[].type": ["input_file", "", *TEXT],
    "input[].output[].text": [None, *TEXT],
    "input[].output[].refusal": [None, *TEXT],
    "input[].summary": [5, True, "x", [1], [{}]],
    "input[].summary[].type": ["input_text", "", *TEXT],
    "input[].summary[].text": [None, *TEXT],
    "input[].summary[].refusal": [None, *TEXT],
    "reasoning.effort": [*TEXT, "enormous"],
    "text.format": [5, "x", True, [], {}],
    "text.format.type": [None, "yaml", *TEXT],
    "text.format.schema": [None, *OBJECT, {"not": {}}],
    "thinking.type": [None, "x", *TEXT],
    "thinking.budget_tokens": [0, -1, 1.5, "5", True, [], {}],
    "output_config.format": [5, "x", True, [], {}],
    "output_config.format.type": [None, "yaml", *TEXT],
    "output_config.format.schema": [None, *OBJECT, {"not": {}}],
    # To count tokens nothing is compiled.
    ("/v1/messages/count_tokens", "output_config.format.schema"): [None, *OBJECT],
}

NAMED = {"type": "function", "function": {"name": "f"}}
JSON = {"type": "json_schema", "schema": SCHEMA}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
CONTENT = [{"type": "text", "text": "hi"}]
REFUSAL = [{"type": "refusal", "refusal": "no"}]
HINT = [{"start": 0, "end": 2, "priority": 3, "seconds": 4.0}]
OPEN = {"type": "message", "role": "user"}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 90},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/score": {"query": "hi", "items": ["a"]},
    "/v1/caches": {"name": "c", "messages": [USER]},
    "/tokenize": {"messages": [USER]},
}
STRUCTURES: list[dict[str, Any]] = [
    {"structured_outputs": structure}
    for structure in (
        {"json": SCHEMA, "whitespace_pattern": " ?", "disable_any_whitespace": False},
        {"regex": "a+"},
        {"choice": ["a"]},
        {"grammar": 'start: "a"'},
        {"json_object": True, "disable_additional_properties": False},
        {"structural_tag": TAGS},
    )
]
THOUGHT = {"role": "assistant", "content": None, "thinking": "hm"}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "structural_tag", **TAGS}},
    {"response_format": {"type": "json_object"}},
]
MORE: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        *({"retain": HINT}, {"stream": True, "stream_options": {"include_usage": True}}),
        *(*FORMATS, *STRUCTURES),
        {"messages": [USER, THOUGHT, {"role": "user", "name": "n", "content": CONTENT}]},
    ],
    "/v1/completions": [
        *({"retain": HINT}, {"stream": True, "stream_options": {"include_usage": True}}),
        *(*FORMATS, *STRUCTURES),
    ],
    "/v1/responses": [
        *({"retain": HINT}, {"stream": True, "stream_options": {}}, *STRUCTURES),
        {"reasoning": {"effort": None}},
        {"text": {"format": JSON}},
        {"tools": FLAT, "tool_choice": {"type": "function", "name": "f"}},
        {"input": [OPEN | {"content": CONTENT}, OPEN | {"content": REFUSAL}]},
        {
            "input": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
                {"type": "reasoning", "summary": REFUSAL},
                {"type": "reasoning", "content": REFUSAL},
                {"type": "function_call_output", "call_id": "c", "output": REFUSAL},
            ]
        },
    ],
    "/v1/messages": [
        *({"retain": HINT}, {"output_config": {"format": JSON}}, {"system": CONTENT}),
        {"metadata": {}},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"tools": INPUTS, "tool_choice": {"type": "tool", "name": "f"}},
        {"messages": BLOCKS},
    ],
    "/v1/messages/count_tokens": [
        *({"output_config": {"format": JSON}}, {"system": CONTENT}),
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"tools": INPUTS, "tool_choice": {"type": "tool", "name": "f"}},
        {"messages": BLOCKS},
    ],
    "/v1/score": [{"retain": HINT}],
    "/v1/caches": [{"messages": TURNS, "tools": TOOLS}],
    "/tokenize": [{"messages": TURNS, "tools": TOOLS, "tool_choice": NAMED}],
}
CASES = [(path, ASKS[path] | more) for path, cases in MORE.items() for more in cases] + SAMPLES

ALONE = "structured_outputs"
"""Its members exclude each other: a value is put only where the sample has one."""
Objects = dict[str, Mapping[str, Any]]
"""Path of an object in a request -> its declared members."""


@pytest.fixture
def met(monkeypatch) -> Objects:
    """The objects of the last requests, as the server met them."""
    found: Objects = {}
    members, unapplied = declared._members, fields._unapplied

    def in_schema(value, schema, at):
        if at not in found:
            found[at] = schema["properties"]
        return members(value, schema, at)

    def in_body(body, at=""):
        if at:
            found[at.rstrip(".")] = {
                name: fields.declaration(field) for name, field in type(body).model_fields.items()
            }
        return unapplied(body, at)

    monkeypatch.setattr(declared, "_members", in_schema)
    monkeypatch.setattr(fields, "_unapplied", in_body)
    return found


def generic(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)


def changed(value: Any, at: str, name: str, bad: Any) -> Any:
    """``value`` with member ``name`` of the object at ``at`` replaced."""
    if not at:
        return value | {name: bad}
    head, rest = re.match(r"\.?([^.\[]+|\[\d+\])(.*)", at).groups()
    if head.startswith("["):
        i = int(head[1:-1])
        return [*value[:i], changed(value[i], rest, name, bad), *value[i + 1 :]]
    return value | {head: changed(value[head], rest, name, bad)}


def names(param: str, at: str, name: str) -> bool:
    """Whether an error names the member, something inside it, or the object it makes no sense in."""
    if ".structures" in at or at == "response_format":  # compiled in one piece
        return param.startswith("response_format")
    return param == at or param.startswith(f"{at}.{name}")


def bad_values(path: str, at: str) -> list[Any]:
    return BAD[path, at] if (path, at) in BAD else BAD[at]


def test_every_applied_member_has_an_entry():
    listed = {
        (path.partition(" ")[2], at)
        for path, rows in endpoints(PUBLIC).items()
        for row in rows.values()
        for at, member in row.get("members", {}).items()
        if member["holds"] == Holds.APPLIED
    }
    assert len(listed) > 200
    missing = {at for path, at in listed if at not in BAD and (path, at) not in BAD}
    assert not missing, "these members have no bad values"
    assert not {key for key in BAD if key not in listed and key not in {at for _, at in listed}}


async def post(srv, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with srv.http.post(srv.url + path, json=body) as r:
        return r.status, {} if r.status == 200 else await r.json()


@pytest.mark.parametrize("path", MORE)
async def test_bad_members_are_refused_by_name(path, met):
    expected = {
        at for row in endpoints(PUBLIC)[f"POST {path}"].values() for at in row.get("members", {})
    }
    seen: set[str] = set()
    async with talking(Script(('{"a": 1}',))) as srv:
        for where, body in CASES:
            if where != path:
                continue
            met.clear()
            status, answer = await post(srv, path, body)
            assert status == 200, (body, answer)
            objects = dict(met)
            for at, members in objects.items():
                seen |= {generic(f"{at}.{name}") for name in members}
            for at, name, bad in wrong(path, body, objects):
                status, answer = await post(srv, path, changed(body, at, name, bad))
                parsed = (path, f"{at}.{name}", bad, answer)
                assert status == 400, parsed
                assert names(answer["error"]["param"], at, name), parsed
    assert seen >= expected, expected - seen


def wrong(path: str, body: dict[str, Any], objects: Objects) -> Iterator[tuple[str, str, Any]]:
    for at, members in objects.items():
        for name, member in members.items():
            if held(member) is Holds.APPLIED and (at != ALONE or name in body[at]):
                for bad in bad_values(path, generic(f"{at}.{name}")):
                    yield at, name, bad
