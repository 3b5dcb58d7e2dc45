"""Errors name fields as the client does, wherever they are found: by the body, the engine, a step."""

from __future__ import annotations

import pytest

from jserve.api.request.naming import dialect_name, renamed
from jserve.errors import BadRequest, ContextTooLong, InvalidSchema, NothingAllowed, Overloaded
from tests.api.fake import FakeEngine, live
from tests.api.request.test_api_structured import LIMITS, real_engine
from tests.api.talk import Script, talking

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
USER = [{"role": "user", "content": "hi"}]
BASE = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 40},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "schema": SCHEMA}
NAMED_JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"name": "f", "parameters": SCHEMA}

# Every way to ask for a structure, and what an error of it must name.
STRUCTURES = [
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"response_format": NAMED_JSON}, "response_format.json_schema.schema"),
    (CHAT, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (CHAT, {"tools": [{"function": TOOL}], "tool_choice": "required"}, "tools"),
    (CHAT, {"regex": "a+"}, "regex"),
    (CHAT, {"ebnf": 'root ::= "a"'}, "ebnf"),
    (TEXT, {"grammar": 'root ::= "a"'}, "grammar"),
    (TEXT, {"json_schema": '{"type": "object"}'}, "json_schema"),
    (TEXT, {"response_format": {"type": "json_object"}}, "response_format"),
    (TEXT, {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
    (RESPONSES, {"text": {"format": JSON}}, "text.format.schema"),
    (RESPONSES, {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}, "tools"),
    (MESSAGES, {"output_config": {"format": JSON}}, "output_config.format.schema"),
    (
        MESSAGES,
        {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        "tools",
    ),
]


def test_a_name_is_exact_or_a_part_of_a_path():
    names = {"stop": "stop_sequences", ".function.": ".", ".parameters": ".input_schema"}
    assert dialect_name("stop", names) == "stop_sequences"
    assert dialect_name("stop_token_ids", names) == "stop_token_ids"
    assert dialect_name("tools[1].function.name", names) == "tools[1].name"


@pytest.mark.parametrize(
    ("parsed", "field", "names", "expected"),
    [
        ("stop may hold 16", "stop", {"stop": "stop_sequences"}, "stop_sequences may hold 16"),
        ("no stop for max_tokens", "x", {"stop": "y", "max_tokens": "n"}, "no stop for n"),
        ("max_tokens, not min_max_tokens_x", None, {"max_tokens": "n"}, "n, not min_max_tokens_x"),
        ("a.max_tokens stays", None, {"max_tokens": "n"}, "a.max_tokens stays"),
        ("a_b.c and a_b", "a_b.c", {"a_b": "x", "a_b.c": "y"}, "y and x"),
        ("prompt is long, the prompt", "prompt", {"prompt": "input"}, "input is long, the prompt"),
        ("nothing to do", None, {}, "nothing to do"),
    ],
)
def test_words(parsed, field, names, expected):
    assert renamed(BadRequest(parsed, field=field), names).message == expected


def test_an_error_keeps_what_else_it_is():
    error = renamed(Overloaded("max_tokens", code="x", retry_after=3), {"max_tokens": "n"})
    assert (type(error), error.code, error.retry_after) == (Overloaded, "x", 3)
    twice = renamed(error, {"max_tokens": "n"})
    assert twice is error


@pytest.mark.parametrize("stream", [False, True])
async def test_a_structure_is_named_as_the_client_named_it(stream):
    """At once, as a status; behind the first tokens, as an event."""
    script = Failing()
    async with talking(script) as srv:
        for path, fields, name in STRUCTURES:
            body = BASE[path] | fields | {"stream": stream}
            for inner in ("structured_outputs", "structured_outputs.json", "allowed_token_ids"):
                script.fail_with(inner, after=0)
                status, answer, _ = await srv.post(path, body)
                assert status == 400, answer
                check(answer["error"], inner, name)
                script.fail_with(inner, after=2)
                if stream:
                    events = await srv.events(path, body)
                    check([e["error"] for e in events if e.get("error")][-1], inner, name)
                else:
                    check((await srv.post(path, body))[1]["error"], inner, name)


def check(error: dict, inner: str, name: str) -> None:
    assert error["code"] == "nothing_allowed"
    if inner == "structured_outputs.json" and name == "structured_outputs":
        name = inner
        assert error["param"] == name
        return
    assert error["param"] == (inner if inner == "allowed_token_ids" else name)
    assert error["message"] == f"allowed_token_ids and {name} together leave no token"


class Failing(Script):
    """Fails behind ``after`` outputs, as the engine does: raised at first, told later."""

    after = 0

    def __init__(self) -> None:
        super().__init__(("red car, blue car",))
        self.failure: BadRequest = BadRequest("no")

    def fail_with(self, field: str, *, after: int) -> None:
        words = "allowed_token_ids and structured_outputs together leave no token"
        self.failure, self.after = NothingAllowed(words, field=field), after

    async def generate(self, request):
        if not self.after:
            raise self.failure
        n = 0
        async for output in super().generate(request):
            if n == self.after:
                raise self.failure
            n += 1
            yield output


@pytest.mark.parametrize(
    ("path", "field", "name"),
    [
        (CHAT, "max_tokens", "max_tokens"),
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (MESSAGES, "max_tokens", "max_tokens"),
        (CHAT, "prompt", "messages"),
        (TEXT, "prompt", "prompt"),
        (RESPONSES, "prompt", "input"),
        (MESSAGES, "prompt", "messages"),
        (MESSAGES, "thinking_token_budget", "thinking.budget_tokens"),
        (RESPONSES, "thinking_token_budget", "thinking_token_budget"),
        ("/v1/score", "prompt", "items"),
    ],
)
async def test_what_the_engine_refuses_is_named_as_the_client_named_it(path, field, name):
    engine = FakeEngine()
    engine.refuse = ContextTooLong(f"{field} is too much", field=field)
    body = BASE.get(path, {"query": "a", "items": ["b"]})
    async with live(engine) as srv:
        status, answer, _ = await srv.post(path, body)
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"] == f"{name} is too much"
        if path == CHAT and field == "max_tokens":
            _, answer, _ = await srv.post(path, body | {"max_completion_tokens": 4})
            assert answer["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, "/v1/messages/count_tokens"])
async def test_what_the_template_refuses_is_named_as_the_client_named_it(path):
    raising = "{{ raise_exception('no') }}"
    async with live(template=raising) as srv:
        body = BASE.get(path, {"messages": USER})
        status, answer, _ = await srv.post(path, body)
        assert status == 400
        assert answer["error"]["param"] == ("input" if path == RESPONSES else "messages")


async def test_an_empty_turn_to_continue_is_one_of_the_messages():
    async with live() as srv:
        for path in (MESSAGES, "/v1/messages/count_tokens"):
            turns = [*USER, {"role": "assistant", "content": ""}]
            body = {"messages": turns} | ({"max_tokens": 5} if path == MESSAGES else {})
            status, answer, _ = await srv.post(path, body)
            assert (status, answer["error"]["param"]) == (400, "messages")
            assert "continue_final_message" not in answer["error"]["message"]


async def test_the_real_scheduler_names_what_the_client_sent():
    async with real_engine() as face, talking(face, reasoning_parser="none") as srv:
        for path, fields, name in STRUCTURES:
            base = BASE[path] | {"allowed_token_ids": [40]}  # no answer begins with it
            status, answer, _ = await srv.post(path, base | fields)
            assert status == 400, (path, fields, answer)
            error = answer["error"]
            assert error["code"] == "nothing_allowed", error
            assert name in error["message"], (path, error)
            assert "structured_outputs" not in error["message"].replace(name, "")
        long = {"input": "hi", "max_output_tokens": LIMITS.max_model_len}
        status, answer, _ = await srv.post(RESPONSES, long)
        assert (status, answer["error"]["param"]) == (400, "max_output_tokens")


def test_the_kinds_of_errors_are_kept():
    for kind in (InvalidSchema, NothingAllowed, ContextTooLong):
        assert type(renamed(kind("prompt", field="prompt"), {"prompt": "input"})) is kind
