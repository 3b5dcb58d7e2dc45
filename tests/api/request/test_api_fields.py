"""Every public field of every endpoint: bad values are refused by name, and none is forgotten.

The fields are those that the server itself declares; a new one fails here until it has an entry.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import jserve.api
from jserve.api.http.routes import PUBLIC
from jserve.api.ops import support
from jserve.api.ops.openapi import document
from jserve.api.request import fields
from jserve.api.request.fields import Holds, holds
from jserve.sampling import RANGES, SamplingParams
from tests.api.fake import live

HUGE, NUL = 2**63, "a\0b"
NOT_A_NUMBER: list[Any] = ["1", True, [], {}]
NOT_AN_INT: list[Any] = [*NOT_A_NUMBER, 1.5, HUGE, -HUGE - 1]
NOT_A_BOOL: list[Any] = [1, 0, "true", [], {}]
NOT_TEXT: list[Any] = [1, True, [], {}]
IDS: list[Any] = ["1", {}, [-1], [HUGE], [1.5], [True], ["1"], [[1]], [999]]
DEADLINE: list[Any] = [*NOT_A_NUMBER, 0, -1, 1e10]
PROMPT: list[Any] = [5, True, {}, [], "", [""] * 129, [-1], [HUGE], [1.0], ["a", 1], [[[1]]], [[]]]
TOOLS: list[Any] = ["x", 1, {}, [1], [{}], [{"type": "retrieval"}], [None]]
MESSAGES: list[Any] = [
    *("x", 1, {}, []),
    *([1], [{}], [{"role": "wizard", "content": "x"}], [{"role": "user", "content": 5}]),
    *([{"role": "user", "content": [{"type": "image"}]}], [{"role": "user", "content": ["x"]}]),
    *([{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": 1}]}]),
]

# Field -> values that are refused wherever it stands; (path, field) where an endpoint differs.
BAD: dict[Any, list[Any]] = {
    "model": NOT_TEXT,
    "stream": NOT_A_BOOL,
    "priority": NOT_AN_INT,
    "lane": [*NOT_TEXT, "vip", ""],
    "ttft_deadline_ms": DEADLINE,
    "tpot_deadline_ms": DEADLINE,
    "deadline_ms": DEADLINE,
    "cache_salt": [*NOT_TEXT, "", "a/b", "a@b", NUL, "x" * 129],
    "cache": [*NOT_TEXT, "", "x" * 129],
    "session": [*NOT_TEXT, "", "x" * 129],
    "retain": [
        *(1, "x", {}, [1], [{"x": 1}], [{}] * 17),
        *([{"start": -1}], [{"start": 4, "end": 4}], [{"priority": 101}], [{"seconds": -1}]),
    ],
    "skip_prefix_cache": NOT_A_BOOL,
    "speculative": NOT_A_BOOL,
    "truncate_prompt_tokens": [*NOT_AN_INT, 0, -2],
    "truncation_side": [*NOT_TEXT, "middle"],
    "request_id": NOT_TEXT,
    "temperature": [*NOT_A_NUMBER, -0.1, 2.1],
    "top_p": [*NOT_A_NUMBER, 0, -1, 1.1],
    "top_k": [*NOT_AN_INT, -2, 2**31],
    "min_p": [*NOT_A_NUMBER, -0.1, 1.1],
    "presence_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "repetition_penalty": [*NOT_A_NUMBER, 0, -1, 101],
    "seed": NOT_AN_INT,
    "stop": [1, {}, "", [""], [1], [[]], ["x"] * 17, "x" * 1025],
    "stop_token_ids": [*IDS, list(range(17))],
    "ignore_eos": NOT_A_BOOL,
    "min_tokens": [*NOT_AN_INT, -1],
    "include_stop_str_in_output": NOT_A_BOOL,
    "skip_special_tokens": NOT_A_BOOL,
    "logit_bias": [
        *(1, "x", [1], {"x": 1}, {"-1": 1}, {"999": 1}, {"1": 101}, {"1": "x"}, {"1": True}),
        *({"1": None}, {"1" * 400: 1}, {"١": 1}, {str(i): 0 for i in range(1025)}),
    ],
    "allowed_token_ids": [*IDS, []],
    "bad_words": ["x", [1], [""], ["nine chars and more"], ["x"] * 65],
    "vllm_xargs": [
        *(1, "x", [1], {"": 1}, {"a b": 1}, {"x" * 65: 1}, {str(i): 1 for i in range(17)}),
        *({"x": None}, {"x": {}}, {"x": [[1]]}, {"x": [None]}, {"x": "a" * 65536}),
    ],
    "custom_params": [
        *(1, "x", [1], {"": 1}, {"a b": 1}, {str(i): 1 for i in range(17)}, {"x": "a"}),
        *({"x": None}, {"x": False}, {"x": [1]}, {"x": {"a": "1"}}, {"x": {"a": True}}),
        *({"x": {"a": {}}}, {"x": {str(i) * 64: 1.0 for i in range(2000)}}),
    ],
    "n": [*NOT_AN_INT, 0, -1, 129],
    "max_tokens": [*NOT_AN_INT, -1, 100_000, 2**31],
    "max_completion_tokens": [*NOT_AN_INT, 0, -1, 100_000],
    "max_output_tokens": [*NOT_AN_INT, 0, -1, 100_000],
    "prompt_logprobs": [*NOT_AN_INT, -1, 21],
    "logprob_token_ids": [*IDS, []],
    "top_logprobs": [*NOT_AN_INT, -1, 21],
    "stream_options": [1, "x", [], {"include_usage": 1}],
    ("/v1/responses", "stream_options"): [1, "x", [], {"include_obfuscation": 1}],
    "return_token_ids": NOT_A_BOOL,
    "return_tokens_as_token_ids": NOT_A_BOOL,
    "add_special_tokens": NOT_A_BOOL,
    "response_format": [1, "json", [], {}, {"type": "yaml"}, {"type": "json_schema"}],
    "structured_outputs": [1, "x", [], {}, {"regex": 1}, {"regex": "(a"}, {"backend": "x"}],
    "regex": [*NOT_TEXT, "(a"],
    "ebnf": [*NOT_TEXT, "root ::= ("],
    "grammar": [*NOT_TEXT, "root ::= ("],
    "json_schema": [5, True, [], "{", {"not": {}}],
    "structural_tag": [5, True, [], {}, "{"],
    "messages": MESSAGES,
    "logprobs": [1, "x", []],
    ("/v1/completions", "logprobs"): [*NOT_AN_INT, -1, 21],
    "tools": TOOLS,
    "tool_choice": ["required", "some", 1, [], {}, {"type": "allowed_tools"}],
    ("/v1/responses", "tool_choice"): ["required", "some", 1, [], {}, {"type": "function"}],
    ("/tokenize", "prompt"): NOT_TEXT,
    ("/v1/messages", "tool_choice"): ["auto", 1, [], {}, {"type": "x"}, {"type": ["auto"]}],
    ("/v1/messages/count_tokens", "tool_choice"): ["auto", 1, [], {}, {"type": "x"}],
    "parallel_tool_calls": NOT_A_BOOL,
    "documents": [1, "x", {}, [1], [{"text": "x"}]],
    "reasoning_effort": [1, "enormous", "low"],
    "chat_template_kwargs": [1, "x", [], {"messages": "x"}, {"nonsense": 1}, {"tools": []}],
    "add_generation_prompt": NOT_A_BOOL,
    "continue_final_message": NOT_A_BOOL,
    "thinking_token_budget": [*NOT_AN_INT, -2, 5],
    "include_reasoning": NOT_A_BOOL,
    "prompt": PROMPT,
    "echo": NOT_A_BOOL,
    "input": [1, {}, [], [1], [{"role": "wizard", "content": "x"}], [{"type": "item_reference"}]],
    "instructions": NOT_TEXT,
    "text": [1, "x", [], {"format": 1}, {"format": {"type": "yaml"}}, {"verbosity": "high"}],
    "reasoning": [1, "x", [], {"effort": 1}, {"effort": "enormous"}],
    "include": [1, "x", {}, [1], [{}], ["file_search_call.results"]],
    "system": [1, {}, [], [1], [{"type": "image"}], [{"type": "text"}]],
    "thinking": [1, "x", [], {}, {"type": "x"}],
    ("/v1/messages", "thinking"): [
        *(1, "x", [], {}, {"type": "x"}),
        *({"type": "enabled"}, {"type": "enabled", "budget_tokens": 5}),
    ],
    "output_config": [1, "x", [], {"effort": "low"}, {"format": {"type": "x"}}, {"format": 1}],
    ("/v1/messages", "temperature"): [*NOT_A_NUMBER, -0.1, 1.1],
    "stop_sequences": [1, {}, "", [""], [1], ["x"] * 17],
    "metadata": [1, "x", [], {"user_id": 1}],
    "query": [*PROMPT, ["a", "b"]],
    "items": PROMPT,
    "label_token_ids": [*IDS, []],
    "apply_softmax": [*NOT_A_BOOL, True],
    "item_first": NOT_A_BOOL,
    "name": [*NOT_TEXT, None],
    "ttl_s": NOT_A_NUMBER,
    "return_token_strs": NOT_A_BOOL,
    "tokens": [None, *IDS],
    # labels
    "user": NOT_TEXT,
    "safety_identifier": NOT_TEXT,
    "prompt_cache_key": NOT_TEXT,
}
UNJUDGED = {"cache_control"}
"""Labels of any shape."""

# Fields of which a caller may take several; the one that errors name when they exclude each other.
ALSO = {"stream_options": ("stream",), "messages": ("prompt",), "prompt": ("messages",)}

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/score": {"query": "hi", "items": ["a"]},
    "/v1/caches": {"name": "c", "prompt": "hi"},
    "/v1/caches/{name}": {"ttl_s": 5.0},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
ROUTES = {route.path.replace(":.+", ""): route for route in PUBLIC if route.fields is not None}
# Needed, but not by a schema: one of two will do, or the value of another decides.
ALSO_NEEDED = {"/tokenize": ("prompt",), "/v1/caches": ("prompt",)}
CELLS = [(path, name) for path, route in ROUTES.items() for name in route.fields.model_fields]


@pytest.fixture
async def shared():
    async with live() as running:
        yield running


def base_for(path: str, name: str) -> dict[str, Any]:
    base = dict(BASE[path])
    if name == "stream_options":
        base["stream"] = True
    if name == "max_completion_tokens":
        del base["max_tokens"]  # another name of the same
    if path == "/tokenize" and name not in ("prompt", "add_special_tokens", "return_token_strs"):
        base = {"messages": CHAT["messages"]} | ({"prompt": "hi"} if name == "prompt" else {})
    if path == "/v1/caches" and name in ("messages", "tools", "documents", "chat_template_kwargs"):
        base = {"name": "c", "messages": CHAT["messages"]}
    return base


def url_of(path: str) -> str:
    return path.replace("{name}", "c")


def named(param: str | None, name: str) -> bool:
    """Whether an error names ``name``, a part of it, or what excludes it."""
    head = (param or "").split("[")[0].split(".")[0]
    return head in (name, *ALSO.get(name, ()))


def fields_of(path: str) -> dict[str, Any]:
    body = ROUTES[path].fields
    assert body is not None
    return body.model_fields


def test_every_endpoint_has_a_base_and_every_field_an_entry():
    assert set(BASE) == set(ROUTES)
    judged = {Holds.APPLIED, Holds.LABEL}
    missing = [
        (path, name)
        for path, name in CELLS
        if holds(fields_of(path)[name]) in judged
        and name not in BAD
        and (path, name) not in BAD
        and name not in UNJUDGED
    ]
    assert not missing, "these fields have no bad values"
    known = {name for _, name in CELLS} | set(CELLS)
    assert set(BAD) <= known, "entries of fields that no endpoint has"


@pytest.mark.parametrize("path", BASE)
async def test_bad_values_are_refused_by_name(shared, path):
    for name, field in fields_of(path).items():
        if name in UNJUDGED:
            continue
        if holds(field) is Holds.APPLIED or holds(field) is Holds.LABEL:
            values = BAD[path, name] if (path, name) in BAD else BAD[name]
        else:
            values = [{"bad": [1]}]
        if holds(field) is Holds.IGNORED:
            continue
        for value in values:
            body = base_for(path, name) | {name: value}
            status, answer, headers = await shared.post(url_of(path), body)
            error = answer.get("error", {})
            assert status == 400, (name, str(value)[:60], answer)
            assert named(error["param"], name), (name, str(value)[:60], error)
            assert error["type"] == "invalid_request_error"
            assert (answer.get("type") == "error") is ("messages" in path)
            assert headers["x-request-id"] == headers["request-id"]
            if holds(field) is Holds.REFUSED:
                assert error["code"] == "unsupported_parameter"
    assert shared.engine.records == []
    status, answer, _ = await shared.post(url_of(path), BASE[path])
    assert status == 200, answer


HOSTILE = [
    *(None, True, -1, HUGE, 1e300, "", NUL, "x" * 3000, [], {}, [None], {"type": None}),
    [[[[1]]]],
    {"a": {"b": {"c": []}}},
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", BASE)
async def test_no_value_of_any_field_is_a_fault_of_ours(shared, path):
    for name in [*fields_of(path), "unknown_field"]:
        for value in HOSTILE:
            body = base_for(path, name) | {name: value}
            async with shared.http.post(shared.url + url_of(path), json=body) as r:
                parsed = await r.text()
                assert r.status < 500, (name, value, parsed)
                assert r.status in (200, 400, 404), (name, value, parsed)
                assert '"error":{' not in parsed or r.status != 200, (name, value, parsed)
                if r.status != 200:
                    error = json.loads(parsed)["error"]
                    assert len(error["message"]) <= 300
                    assert "Traceback" not in parsed


@pytest.mark.parametrize("path", BASE)
async def test_refused_and_ignored_fields(shared, path):
    """Neutral values pass everywhere; what is ignored is listed, and refused when strict."""
    samples = {"str": "flex", "bool": True, "Any": {"a": 1}}
    async with live(strict_params=True) as strict:
        for name, field in fields_of(path).items():
            if holds(field) is Holds.APPLIED:
                continue
            row = support._fields(ROUTES[path].fields)
            neutral = dict(row)[name].get("but", [])
            for value in (None, *neutral):
                for server in (shared, strict):
                    status, answer, headers = await server.post(
                        url_of(path), BASE[path] | {name: value}
                    )
                    assert status == 200, (name, value, answer)
                    assert "x-jserve-ignored-params" not in headers
            if holds(field) is Holds.IGNORED:
                kind = str(field.annotation).split(" |")[0].removeprefix("<class '").split("'")[0]
                body = BASE[path] | {name: samples.get(kind, {"a": 1})}
                status, answer, headers = await shared.post(url_of(path), body)
                assert status == 200, (name, answer)
                assert headers["x-jserve-ignored-params"] == name
                status, answer, _ = await strict.post(url_of(path), body)
                assert (status, answer["error"]["param"]) == (400, name)
        for server, expected in ((shared, 200), (strict, 400)):
            body = BASE[path] | {"frobnicate": 1}
            status, answer, headers = await server.post(url_of(path), body)
            assert status == expected
            if expected == 200:
                assert headers["x-jserve-ignored-params"] == "frobnicate"
            else:
                assert answer["error"]["param"] == "frobnicate"
            status, answer, _ = await server.post(url_of(path), BASE[path] | {"guided_json": {}})
            assert (status, answer["error"]["param"]) == (400, "guided_json")


async def test_choices_need_tools(shared):
    for choice in ("auto", "none", "required", {"type": "function", "name": "f"}):
        body = BASE["/v1/responses"] | {"tool_choice": choice}
        expected = 200 if choice in ("auto", "none") else 400
        status, answer, _ = await shared.post("/v1/responses", body)
        assert status == expected, (choice, answer)
    body = BASE["/v1/messages"] | {"tool_choice": {"type": "any"}}
    status, answer, _ = await shared.post("/v1/messages", body)
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", BASE)
async def test_the_openapi_schema_agrees_with_the_server(shared, path):
    """What the server takes fits the schema; what does not fit the schema the server refuses."""
    route = ROUTES[path]
    schemas = document(PUBLIC)["components"]["schemas"]
    schema = schemas[route.fields.__name__] | {"components": {"schemas": schemas}}
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    assert judge.is_valid(BASE[path]), list(judge.iter_errors(BASE[path]))
    assert set(schema["properties"]) == set(route.fields.model_fields)
    for name in fields_of(path):
        for value in [*HOSTILE, *BAD.get((path, name), BAD.get(name, []))]:
            body = base_for(path, name) | {name: value}
            async with shared.http.post(shared.url + url_of(path), json=body) as r:
                taken = r.status == 200
            assert judge.is_valid(body) or not taken, (name, value, "taken against the schema")


@pytest.mark.parametrize("path", BASE)
async def test_required_fields_are_those_of_the_document(shared, path):
    found = document(PUBLIC)["components"]["schemas"][ROUTES[path].fields.__name__]
    required = set(found.get("required", []))
    for name in BASE[path]:
        body = {k: v for k, v in BASE[path].items() if k != name}
        status, answer, _ = await shared.post(url_of(path), body)
        assert (status == 400) is (name in required or name in ALSO_NEEDED.get(path, ())), name
        assert status == 200 or named(answer["error"]["param"], name)


async def test_the_document_is_served(shared):
    _, found, _ = await shared.get("/openapi.json")
    assert found["openapi"] == "3.1.0"
    assert found["info"]["version"] == "0.0.test"
    listed = {(m.upper(), p) for p, methods in found["paths"].items() for m in methods}
    routes = {(r.method, r.path.replace(":.+", "")) for r in PUBLIC}
    assert listed == routes
    text = json.dumps(found)
    assert "x-neutral" not in text
    for part in text.split('"$ref": "')[1:]:
        name = part.split('"')[0].rsplit("/", 1)[-1]
        assert name in found["components"]["schemas"]


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
async def test_answers_have_the_content_types_of_the_document(shared, accept):
    _, found, _ = await shared.get("/openapi.json")
    seen = set()
    for route in PUBLIC:
        if route.method == "GET" and "{" not in route.path:
            async with shared.http.get(shared.url + route.path, headers={"Accept": accept}) as got:
                stated = found["paths"][route.path]["get"]["responses"]["200"]["content"]
                assert got.status == 200
                assert got.content_type in stated, route.path
                seen.add(got.content_type)
    assert len(seen) == 2


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_that_are_declared(name):
    """A bound in the document is the bound in the parameters."""
    allowed = RANGES[name]
    schemas = document(PUBLIC)["components"]["schemas"]
    own = {"max_tokens", "min_tokens"}
    found = schemas["ChatBody"]["properties"].get(name)
    if found is not None and name != "logprobs":
        low = "exclusiveMinimum" if allowed.low_open else "minimum"
        assert (found[low], found["maximum"]) == (allowed.low, allowed.high)
    base = {"max_tokens": None} if name in own else {}
    for value in (allowed.high, allowed.low + (1e-9 if allowed.low_open else 0)):
        SamplingParams(**base | {name: int(value) if allowed.whole else value})


def test_validate_is_the_only_way_to_a_body():
    """No handler and no dialect makes a body by itself."""
    for path in Path(jserve.api.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if path != Path(fields.__file__):
            assert "model_validate" not in text, path
            assert "model_construct" not in text, path
