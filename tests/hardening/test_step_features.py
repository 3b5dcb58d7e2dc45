"""``vllm_xargs``: what a request asks of step features, over HTTP and back, with every dialect that has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jserve import serve_commands
from jserve.config import EngineConfig
from jserve.types import NOTHING_LEFT
from tests.api import fake
from tests.hardening.world import CHAT, COMP, World, world

RESPONSES = "/v1/responses"
ECHO = {"vllm_xargs": {"echo": 1}, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 9, "return_token_ids": True},
    COMP: {"prompt": "hi", "max_tokens": 9, "return_token_ids": True},
}


@pytest.fixture
async def made() -> AsyncIterator[World]:
    async with world() as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
async def test_a_value_for_each_token_of_each_choice(made: World, path: str) -> None:
    status, answer, _ = await made.srv.post(path, BODIES[path] | ECHO | {"n": 2})
    assert status == 200
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 9
        assert choice["extra"] == {"echo": choice["token_ids"]}
    _, answer, _ = await made.srv.post(path, BODIES[path])
    assert "extra" not in answer["choices"][0]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_them_beside_its_tokens(made: World, path: str) -> None:
    body = BODIES[path] | ECHO | {"stop": ["never said, so that text is held back"]}
    asked = {k: v for k, v in body.items() if k != "return_token_ids"}
    events = await made.srv.events(path, asked)
    values = [
        v for e in events[:-1] for c in e["choices"] for v in c.get("extra", {}).get("echo", ())
    ]
    _, whole, _ = await made.srv.post(path, body)
    assert values == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", BODIES)
async def test_values_of_the_prompt_come_once_with_the_first_token(made: World, path: str) -> None:
    body = BODIES[path] | {"vllm_xargs": {"echo": "prompt"}, "temperature": 0, "n": 2}
    _, answer, _ = await made.srv.post(path, body)
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    for choice in answer["choices"]:
        assert choice["prompt_extra"] == {"echo": ids}
    asked = {k: v for k, v in body.items() if k != "return_token_ids"}
    told = [c for e in (await made.srv.events(path, asked))[:-1] for c in e["choices"]]
    for index in (0, 1):
        found = [c["prompt_extra"] for c in told if c["index"] == index and "prompt_extra" in c]
        assert found == [{"echo": ids}]
    _, answer, _ = await made.srv.post(path, BODIES[path] | ECHO)
    assert "prompt_extra" not in answer["choices"][0]


async def test_a_stop_string_cuts_them_with_the_tokens(made: World) -> None:
    body = BODIES[COMP] | ECHO
    _, whole, _ = await made.srv.post(COMP, body)
    stop = whole["choices"][0]["text"][4]
    _, cut, _ = await made.srv.post(COMP, body | {"stop": stop})
    [choice] = cut["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["extra"] == {"echo": choice["token_ids"]}
    assert len(choice["token_ids"]) < 9


async def test_responses_have_them_in_the_response(made: World) -> None:
    body = {"input": "hi", "max_output_tokens": 9} | ECHO
    _, answer, _ = await made.srv.post(RESPONSES, body)
    events = await made.srv.events(RESPONSES, body)
    assert len(answer["extra"]["echo"]) == 9
    assert events[-1]["response"]["extra"] == answer["extra"]
    assert "extra" not in events[0]["response"]
    assert "prompt_extra" not in answer
    _, answer, _ = await made.srv.post(RESPONSES, body | {"vllm_xargs": {"echo": "prompt"}})
    assert len(answer["prompt_extra"]["echo"]) == answer["usage"]["input_tokens"]


async def test_taps_are_given_where_they_are_allowed() -> None:
    kept = replace(fake.card(), taps=("echo",))
    async with world(serve={"model": kept}) as running:
        for path, body in BODIES.items():
            status, answer, _ = await running.srv.post(path, body | ECHO)
            assert (status, answer["error"]["param"]) == (400, "vllm_xargs.echo")
            assert "--allow-taps" in answer["error"]["message"]
            assert (await running.srv.post(path, body))[0] == 200


@pytest.mark.parametrize(("allowed", "kept"), [(False, ("echo",)), (True, ())])
def test_a_server_keeps_what_its_engine_calls_taps(allowed: bool, kept: tuple[str, ...]) -> None:
    text = SimpleNamespace(name="m", aliases=(), eos_ids=(), defaults={})
    info = {"max_model_len": 8, "vocab_size": 9, "taps": ["echo"]}
    config = EngineConfig.of(allow_taps=allowed)
    assert serve_commands._card(config, text, info).taps == kept  # type: ignore[arg-type]


async def test_custom_params_are_asked_of_features_too(made: World) -> None:
    body = {"prompt": "hi", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    _, answer, _ = await made.srv.post("/v1/completions", body | {"custom_params": {"echo": 1}})
    assert len(answer["choices"][0]["extra"]["echo"]) == 9
    for custom, word in (({"other": 1}, "no such"), ({"echo": {"a": 2.0}}, "must be 1")):
        (name,) = custom
        status, answer, _ = await made.srv.post("/v1/completions", body | {"custom_params": custom})
        assert (status, answer["error"]["param"]) == (400, f"custom_params.{name}")
        assert word in answer["error"]["message"]
    both = {"custom_params": {"echo": 1}, "vllm_xargs": {"echo": 1}}
    status, answer, _ = await made.srv.post("/v1/completions", body | both)
    assert (status, answer["error"]["param"]) == (400, "custom_params.echo")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "name", "word"),
    [({"other": 1}, "other", "no such step feature"), ({"echo": 2}, "echo", "must be 1, not 2")],
)
async def test_what_no_feature_takes_is_refused_by_name(
    made: World, asked: dict[str, Any], name: str, word: str, stream: bool
) -> None:
    for path, body in BODIES.items():
        status, answer, _ = await made.srv.post(
            path, body | {"vllm_xargs": asked, "stream": stream}
        )
        assert status == 400, answer
        assert answer["error"]["param"] == f"vllm_xargs.{name}"
        assert answer["error"]["message"].startswith(f"vllm_xargs.{name}: ")
        assert word in answer["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("what", "status", "code"),
    [(NOTHING_LEFT, 400, "nothing_allowed"), ("gives NaN", 500, "step_feature_failed")],
)
async def test_a_processor_that_leaves_nothing_or_is_broken_ends_its_row_by_name(
    made: World, path: str, what: str, status: int, code: str
) -> None:
    collect = made.runners[-1].collect

    def faulty(flight: Any) -> Any:
        result = collect(flight)
        rows = [row.choice.request.params.extra_args for row in flight.plan.rows]
        bad = [r for r, asked in enumerate(rows) if "echo" in asked]
        finite_R = result.finite_R.copy()
        finite_R[bad] = False
        return replace(result, finite_R=finite_R, faults=dict.fromkeys(bad, ("echo", what)))

    made.runners[-1].collect = faulty
    told, answer, _ = await made.srv.post(path, BODIES[path] | ECHO)
    error = answer["error"]
    assert (told, error["code"], error["param"]) == (status, code, "vllm_xargs.echo")
    assert error["message"] == f"the step feature echo {what}"
    assert (await made.srv.post(path, BODIES[path]))[0] == 200
