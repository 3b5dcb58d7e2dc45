"""Hypothesis over every declared field: whatever a client sends, no answer is a 5xx and all go on.

The field tables are those of the request models; a field that is added is drawn from here without
anybody thinking of it. Where the server describes itself (``/openapi.json``), the operations of that
document are driven too.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from jserve import faults
from jserve.api.openai.fields import ChatBody, CompletionBody
from tests.hardening.world import CHAT, COMP, probe, world

HUGE = [2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**300]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 5, 16, 17, 64, 127, 128, 129, 512, 1025, *HUGE]),
    st.sampled_from([0.0, -0.0, 0.5, 1e-300, 1e-6, 2.0, 2.0000001, 1e308, -1e308, -2.0]),
    st.integers(-300, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["", "\0", "a" * 2000, "\N{COMBINING ACUTE ACCENT}" * 50, "../../etc/passwd"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["type", "0", "-1", "role", "name", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)
ASKED_FOR = {"deadline_exceeded", "deadline_unreachable"}
"""What a client can bring upon itself and only time can tell."""
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    COMP: {"prompt": "hi", "max_tokens": 3},
}
FIELDS = {
    CHAT: sorted({*ChatBody.model_fields, "unknown"}),
    COMP: sorted({*CompletionBody.model_fields, "unknown"}),
}


@st.composite
def bodies(draw: Any) -> tuple[str, dict[str, Any]]:
    """A good request with one to three fields replaced by anything."""
    path = draw(st.sampled_from([CHAT, COMP]))
    names = draw(st.lists(st.sampled_from(FIELDS[path]), min_size=1, max_size=3, unique=True))
    return path, GOOD[path] | {name: draw(values) for name in names}


async def ask_all(requests: list[tuple[str, str, dict[str, Any]]], described: str = "") -> None:
    """Send them, a few at a time; every answer must be in the contract, and the server well after."""
    async with world() as made:
        want = await probe(made)
        limit = asyncio.Semaphore(8)

        async def one(method: str, path: str, body: dict[str, Any]) -> None:
            async with (
                limit,
                made.srv.http.request(
                    method, made.srv.url + path, data=json.dumps(body).encode(), headers=JSON
                ) as response,
            ):
                raw = await response.read()
                said = f"{response.status} for {path} {json.dumps(body)[:600]}: {raw[:300]!r}"
                assert response.status < 500 or json.loads(raw)["error"]["code"] in ASKED_FOR, said
                if response.status != 200 and method != "HEAD":
                    error = json.loads(raw)["error"]
                    assert error["message"], said
                    assert len(error["message"]) <= 300
                    assert {"message", "type", "param", "code"} <= error.keys()
                assert b"internal_error" not in raw, said
                assert b"Traceback" not in raw, said

        await asyncio.wait_for(asyncio.gather(*(one(*r) for r in requests)), 120.0)
        await made.idle()
        assert made.face.counters["engine_deaths"] == 0
        assert await probe(made) == want


JSON = {"Content-Type": "application/json"}


def in_groups(n_examples: int):
    return settings(
        max_examples=n_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@in_groups(8)
@given(st.lists(bodies(), min_size=20, max_size=60))
def test_no_body_is_answered_with_a_fault(requests):
    asyncio.run(ask_all([("POST", path, body) for path, body in requests]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@in_groups(300)
@given(st.lists(bodies(), min_size=40, max_size=80))
def test_no_body_is_answered_with_a_fault_at_length(requests):
    asyncio.run(ask_all([("POST", path, body) for path, body in requests]))


async def test_constraints_that_leave_nothing_are_the_clients_fault():
    """Found at once, or behind some text: 400 and its words, in a stream as its last event."""
    letters, regex = list(b"ab"), {"structured_outputs": {"regex": "[ab]{2}[19]"}}
    async with world() as made:
        for body, param in (
            ({"allowed_token_ids": letters, "bad_words": ["a", "b"]}, "allowed_token_ids"),
            ({"allowed_token_ids": [ord("z")], **regex}, "allowed_token_ids"),
            ({"allowed_token_ids": letters, **regex}, "allowed_token_ids"),
        ):
            status, answer, headers = await made.srv.post(COMP, GOOD[COMP] | body)
            assert status == 400, answer
            assert answer["error"]["code"] == "nothing_allowed"
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["param"] == param
            assert "x-should-retry" not in headers
        asked = {**GOOD[COMP], **regex, "allowed_token_ids": letters, "stream": True}
        async with made.srv.http.post(made.srv.url + COMP, json=asked) as response:
            events = (await response.text()).strip().split("\n\n")
        assert response.status == 200
        assert json.loads(events[-1][6:])["error"]["code"] == "nothing_allowed"
        assert not any('finish_reason":"' in event for event in events)
        await made.idle()


WIDE = {
    "type": "object",
    "properties": {
        "pick": {"enum": ["x", "y"]},
        "wide": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(900)}},
    },
    "required": ["pick", "wide"],
    "additionalProperties": False,
}
"""Compiles, and has more keys to choose from than the matcher may follow when it gets there."""


async def test_a_structure_too_complex_to_follow_is_the_clients_and_costs_nobody():
    """The matcher finds out behind some text: 400 by the field's name, or the stream's last event."""
    param = "structured_outputs"
    body = GOOD[CHAT] | {"max_tokens": 40, "structured_outputs": {"json": WIDE}}
    async with world() as made:
        want = await probe(made)
        (status, answer, headers), beside = await asyncio.gather(
            made.srv.post(CHAT, body), probe(made)
        )
        assert (status, answer["error"]["code"]) == (400, "invalid_schema"), answer
        assert answer["error"]["param"] == param
        assert answer["error"]["message"].startswith(f"{param} became too complex")
        assert "x-should-retry" not in headers
        async with made.srv.http.post(
            made.srv.url + CHAT, json=body | {"stream": True}
        ) as response:
            raw = (await response.text()).strip().split("\n\n")
        assert response.status == 200
        assert json.loads(raw[-1][6:])["error"]["param"] == param
        assert beside == await probe(made) == want
        await made.idle()


async def test_a_fault_of_the_matcher_is_ours_and_says_so():
    """Not a limit: 500 with its code, and no advice to try again."""
    asked = GOOD[COMP] | {"structured_outputs": {"regex": "[ab]{9}"}, "max_tokens": 9}
    async with world() as made:
        for at in (1, 3):
            with faults.armed("grammar.take", at):
                status, answer, headers = await made.srv.post(COMP, asked)
            assert (status, answer["error"]["code"]) == (500, "grammar_failed")
            assert (answer["error"]["type"], answer["error"]["param"]) == ("server_error", None)
            assert headers["x-should-retry"] == "false"
        assert (await made.srv.post(COMP, asked))[0] == 200
        await made.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_as_many_prompts_as_a_request_may_hold_are_taken_by_an_idle_server(stream):
    """However small its queue is: the prompts of one request are one decision."""
    prompts = [f"prompt {i}" for i in range(128)]
    async with world(max_waiting=4, max_waiting_tokens=64) as made:
        body = {"prompt": prompts, "max_tokens": 2, "stream": stream}
        async with made.srv.http.post(made.srv.url + COMP, json=body) as response:
            raw = await response.text()
        assert response.status == 200, raw[:300]
        assert raw.count('"finish_reason":"length"') + raw.count('"finish_reason":"stop"') == 128
        told, told_too = await asyncio.gather(
            made.srv.post(COMP, body | {"stream": False}),
            made.srv.post("/v1/score", {"query": "x", "items": prompts}),
        )
        assert {told[0], told_too[0]} <= {200, 503}, (
            "one of them may find the queue full, as a whole"
        )
        await made.idle()


@pytest.mark.slow
def test_every_field_alone_with_every_hostile_scalar():
    """Not left to chance: each declared field, each nasty value."""
    nasty = [None, True, -1, 0, 2**63, 10**300, 0.5, -1e308, 1e-300, "", "x" * 3000, [], {}, [[]]]
    nasty += [[None], {"x": -1}, {"-1": 1}, [-1], [2**40], {"type": []}, [{"role": []}], [""]]
    requests = [
        ("POST", path, GOOD[path] | {name: value})
        for path in FIELDS
        for name in FIELDS[path]
        for value in nasty
    ]
    asyncio.run(ask_all(requests))


def _example(schema: dict[str, Any], document: dict[str, Any], depth: int = 0) -> Any:
    """Some value that a schema of the document describes."""
    while "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        schema = document["components"]["schemas"][name]
    for union in ("anyOf", "oneOf", "allOf"):
        if schema.get(union):
            return _example(schema[union][0], document, depth + 1)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        wanted = schema.get("required", []) if depth < 6 else []
        return {
            name: _example(schema.get("properties", {}).get(name, {}), document, depth + 1)
            for name in wanted
        }
    if kind == "array":
        return [_example(schema.get("items", {}), document, depth + 1)] if depth < 6 else []
    low = schema.get("minimum", 1)
    return {"string": "x", "integer": math.ceil(low), "number": low, "boolean": True}.get(kind)


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], list[str]]]:
    """(method, path, an example body, its fields) of every operation."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method not in ("get", "post", "put", "delete", "patch"):
                continue
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schema = body.get("schema", {})
            while "$ref" in schema:
                schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
            example = _example(schema, document) if schema else {}
            found.append((method.upper(), path, example, sorted(schema.get("properties", {}))))
    return found


@pytest.mark.slow
async def test_the_described_operations_with_anything_in_every_field():
    """Picks up ``/openapi.json`` where the server has one."""
    async with world() as made:
        status, document, _ = await made.srv.get("/openapi.json")
    if status != 200:
        pytest.skip("this server does not describe itself")
    nasty = [None, True, -1, 2**63, 0.5, "", "x" * 3000, [], {}, [None], {"x": [-1]}]
    requests = []
    for method, path, example, fields in operations(document):
        path = path.replace("{", "").replace("}", "")
        requests.append((method, path, example))
        requests += [(method, path, {**example, f: v}) for f in fields for v in nasty]
    assert requests
    await ask_all(requests)
