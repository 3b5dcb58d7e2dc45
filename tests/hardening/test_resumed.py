"""A whole server whose engine dies: clients get what they would have got, after a pause."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from jserve.errors import EngineDead
from tests.hardening.world import CHAT, COMP, GOOD, World, play, world


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def die_after(made: World, n_steps: int, n_seqs: int = 0) -> None:
    """The engine that runs now ends ``n_steps`` steps after it got ``n_seqs`` sequences."""
    engine = made.engine
    step, left = engine.step, [n_steps]

    def last() -> Any:
        left[0] -= engine.scheduler._n_submitted >= n_seqs
        if left[0] < 0:
            raise EngineDead("the test ends it")
        return step()

    engine.step = last  # type: ignore[method-assign]


N_SEQS = 10
"""Those of the jobs of ``play``."""


async def answers(n_steps: int) -> list[Any]:
    """What every client gets of a server whose engine dies so, and deaths."""
    async with world(step_s=0.002) as made:
        die_after(made, n_steps, N_SEQS)
        found = await play(made)
        await made.idle()
        return [*found, made.face.counters["engine_deaths"]]


async def test_every_client_gets_the_answer_of_an_engine_that_lives():
    *whole, deaths = await answers(10**9)
    assert deaths == 0
    assert {got.kind for got in whole} == {GOOD}
    for n_steps in (0, 1, 2, 3, 5, 8, 12):
        *found, deaths = await answers(n_steps)
        assert found == whole, f"the engine died after {n_steps} steps"
        assert deaths == 1


BODIES = [
    (COMP, {"prompt": "Hello", "logprobs": 2, "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_answer_says_that_it_was_resumed(path, body):
    """Told by a header, for an answer that is sent whole; counts and log-probabilities are as without."""
    asked = body | {"max_tokens": 20, "seed": 3}
    async with world() as made:
        status, whole, headers = await made.srv.post(path, asked)
        assert (status, headers.get("x-jserve-resumed")) == (200, None)
        die_after(made, 8)
        status, resumed, headers = await made.srv.post(path, asked)
        assert (status, headers["x-jserve-resumed"]) == (200, "1")
    assert resumed["choices"] == whole["choices"]
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [resumed["usage"][k] for k in counted] == [whole["usage"][k] for k in counted]


async def test_a_stream_says_so_in_a_comment():
    """Its headers were sent long ago; clients of server-sent events skip comments."""
    async with world(step_s=0.005) as made:
        body = {"prompt": "Hello", "max_tokens": 20, "seed": 3, "stream": True}
        whole = await _raw(made, body)
        assert ": x-jserve-resumed" not in whole
        die_after(made, 8)
        resumed = await _raw(made, body)
        assert resumed.count(": x-jserve-resumed: 1\n\n") == 1
        assert _text(resumed) == _text(whole)


async def test_a_resumed_request_that_had_said_nothing_is_not_marked():
    async with world() as made:
        die_after(made, 0)
        _, _, headers = await made.srv.post(COMP, {"prompt": "Hello", "max_tokens": 3})
        assert made.face.counters["resumed"] == 1
        assert "x-jserve-resumed" not in headers


async def test_a_deadline_that_passes_meanwhile_ends_it():
    async with world(face={"backoff_s": 0.3}) as made:
        die_after(made, 2)
        body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "deadline_ms": 200}
        status, answer, _ = await made.srv.post(COMP, body)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_with_no_restart_left_requests_end_in_error():
    async with world(face={"max_restarts": 0}) as made:
        die_after(made, 3)
        asked = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
        status, body, _ = await asyncio.wait_for(made.srv.post(COMP, asked), 5.0)
        assert (status, body["error"]["code"]) == (503, "engine_dead")


async def _raw(made: World, body: dict[str, Any]) -> str:
    async with made.srv.http.post(made.srv.url + COMP, json=body) as response:
        return (await response.read()).decode()


def _text(raw: str) -> str:
    events = [part[6:] for part in raw.split("\n\n") if part.startswith("data: {")]
    return "".join(json.loads(e)["choices"][0]["text"] for e in events if json.loads(e)["choices"])
