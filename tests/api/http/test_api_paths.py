"""What a client of another server is told: paths, methods, fields and efforts that are others' names."""

from __future__ import annotations

import pytest

from jserve.api.http.routes import OPERATOR, PUBLIC
from jserve.api.http.unknown_path import ELSEWHERE
from tests.api.fake import chat_body
from tests.api.talk import Script, talking

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


async def message(srv, method: str, path: str, **kwargs) -> tuple[int, str]:
    async with srv.http.request(method, srv.url + path, **kwargs) as r:
        return r.status, (await r.json())["error"]["message"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/chat/completions", "there is /v1/chat/completions"),
        ("/models", "there is /v1/models"),
        ("/messages/", "there is /v1/messages"),
        ("/v1/tokenize", "there is /tokenize"),
        ("/v1/v1/chat/completions", "there is /v1/chat/completions"),
        ("/ping", "/health"),
        ("/load", "/metrics"),
        ("/v1/responses/resp_1", "responses are not stored"),
        ("/v1/responses/resp_1/cancel", "responses are not stored"),
    ],
)
async def test_a_path_of_another_server_is_answered_with_ours(srv, path, named):
    for method in ("GET", "POST"):
        status, parsed = await message(srv, method, path)
        assert status == 404
        assert parsed.startswith("there is nothing at this path; ")
        assert named in parsed


async def test_a_path_that_nobody_has_gets_no_hint(srv):
    assert await message(srv, "GET", "/secret-words") == (404, "there is nothing at this path")


def test_hints_name_paths_that_exist_and_are_no_paths_of_ours():
    known = {route.path for route in (*PUBLIC, *OPERATOR)} | {"/dashboard"}
    public = {route.path for route in PUBLIC}
    assert not public & set(ELSEWHERE)
    for text in ELSEWHERE.values():
        named = [word.strip(";,") for word in text.split() if word.startswith("/")]
        assert set(named) <= known, text


async def test_stored_responses_and_foreign_pages_are_told_why(srv):
    assert "not stored" in (await message(srv, "GET", "/v1/responses"))[1]
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    status, parsed = await message(srv, "OPTIONS", CHAT, headers=headers)
    assert (status, "--allowed-origins" in parsed) == (405, True)
    status, parsed = await message(srv, "OPTIONS", CHAT)
    assert (status, "--allowed-origins" in parsed) == (405, False)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (COMP, {}, "prompt"),
        ("/v1/responses", {}, "input"),
        ("/v1/messages", {"max_tokens": 1}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
        ("/v1/score", {"items": ["x"]}, "query"),
        ("/v1/score", {"query": "x"}, "items"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_missing_is_required(srv, path, body, field):
    status, parsed = await message(srv, "POST", path, json=body)
    assert (status, parsed) == (400, f"{field} is required")


@pytest.mark.parametrize(
    ("path", "field", "instead"),
    [
        (CHAT, "guided_json", 'send "structured_outputs": {"json": ...}'),
        (COMP, "guided_regex", 'send "structured_outputs": {"regex": ...}'),
        (CHAT, "guided_decoding_backend", "structured_outputs takes its place"),
    ],
)
async def test_old_names_of_structures_are_answered_with_the_new_one(srv, path, field, instead):
    body = chat_body() if path == CHAT else {"prompt": "x"}
    status, parsed = await message(srv, "POST", path, json=body | {field: "a+"})
    assert status == 400
    assert parsed == f"{field} is not supported by this server; {instead}"


async def test_tokenize_names_llama_cpps_field(srv):
    status, parsed = await message(srv, "POST", "/tokenize", json={"content": "x"})
    assert status == 400
    assert "prompt is the name of content here" in parsed


def asked(srv):
    return srv.engine.records[-1].params


@pytest.mark.parametrize(
    ("effort", "thinks", "budget"),
    [
        ("none", False, None),
        ("minimal", True, 128),
        ("low", True, 512),
        ("medium", True, 2048),
        ("high", True, None),
    ],
)
async def test_effort_is_a_switch_and_a_budget_where_the_template_has_no_effort(
    effort, thinks, budget
):
    async with talking(Script(("<think>a</think>b",))) as srv:
        for path, body in (
            (CHAT, chat_body(reasoning_effort=effort)),
            ("/v1/responses", {"input": "hi", "reasoning": {"effort": effort}}),
        ):
            status, parsed, _ = await srv.post(path, body)
            assert status == 200, parsed
            assert asked(srv).thinking_token_budget == budget
            prompt = srv.server.front.prepare.tokenizer.decode(
                srv.engine.records[-1].prompt_ids, skip_special_tokens=False
            )
            assert prompt.endswith("<think></think>") is not thinks


async def test_what_a_request_says_itself_wins_over_its_effort():
    async with talking(Script(("<think>a</think>b",))) as srv:
        own = {"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}}
        status, parsed, _ = await srv.post(CHAT, chat_body(reasoning_effort="low", **own))
        assert status == 200, parsed
        assert asked(srv).thinking_token_budget == 7
        ids = srv.engine.records[-1].prompt_ids
        text = srv.server.front.prepare.tokenizer.decode(ids, skip_special_tokens=False)
        assert text.endswith("<think></think>")


async def test_effort_of_a_model_without_thoughts(srv):
    """None asks for nothing; more is refused with the names of what models that think have."""
    assert (await srv.post(CHAT, chat_body(reasoning_effort="none")))[0] == 200
    status, parsed = await message(srv, "POST", CHAT, json=chat_body(reasoning_effort="low"))
    assert status == 400
    assert "enable_thinking" in parsed
    assert "thinking_token_budget" in parsed


async def test_effort_that_nothing_can_apply_is_refused():
    """Thoughts without a switch: to go on thinking would be the opposite of none."""
    async with talking(Script(("x",)), template="{{ messages }}") as srv:
        for effort in ("none", "low"):
            status, _ = await message(srv, "POST", CHAT, json=chat_body(reasoning_effort=effort))
            assert status == 400
