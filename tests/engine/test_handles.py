"""Cache handles across the process boundary: made, used, renewed, dropped, and lost with the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import pytest

from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import ProcClient
from jserve.engine.wire import HandleCommand
from jserve.errors import BadRequest, CacheNotFound, EngineDead
from jserve.sampling import SamplingParams
from jserve.testing import FakeRunner
from jserve.types import Finish, Request
from tests.engine import child
from tests.engine.fakes import HOST_CORE_LIMITS

DOCUMENT = tuple(range(100, 150))


def request(id: str, tokens, n: int = 5, **fields) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=n)
    return Request(id=id, prompt_ids=tuple(tokens), params=params, **fields)


@pytest.fixture
async def engine():
    config = EngineConfig.of(model="host core")
    made = AsyncEngine(lambda: ProcClient(config, command=child.command), backoff_s=0.05)
    await made.start()
    yield made
    await made.close()


def ask(id: str, action, name: str | None = "doc", **fields) -> HandleCommand:
    return HandleCommand(id=id, action=action, name=name, **fields)


async def test_a_handle_over_the_wire(engine):
    outputs = await engine.create(request("make", DOCUMENT, 0, cache="doc"), 60.0)
    assert (outputs[-1].finish, outputs[-1].error) == (Finish.LENGTH, None)
    (info,) = await engine.handles(ask("1", "find"))
    assert (info.name, info.n_tokens, info.n_pages, info.pinned) == ("doc", 50, 3, True)

    rest = request("use", [1, 2, 3], cache="doc")
    found = [out async for out in engine.generate(rest)]
    whole = dataclasses.replace(rest, prompt_ids=(*DOCUMENT, 1, 2, 3))
    drawn = [t for out in found for t in out.token_ids]
    assert drawn == FakeRunner(HOST_CORE_LIMITS).expected(whole)
    assert found[0].n_cached == 48

    answers = await asyncio.gather(
        engine.handles(ask("2", "renew", ttl_s=500.0)),
        engine.handles(ask("3", "find", None)),
    )
    assert answers[0][0].expires_in_s == pytest.approx(500.0)
    assert [info.n_uses for info in answers[1]] == [1]
    with pytest.raises(BadRequest) as e:
        await engine.handles(ask("4", "renew", ttl_s=-1.0))
    assert e.value.field == "ttl_s"
    await engine.handles(ask("5", "drop"))
    for number, action in enumerate(["find", "renew", "drop"]):
        with pytest.raises(CacheNotFound):
            await engine.handles(ask(f"gone-{number}", action, ttl_s=1.0))
    assert engine._asked == {}


async def test_a_refused_creation_says_why(engine):
    outputs = await engine.create(request("short", [1, 2], 0, cache="doc"), 60.0)
    assert (outputs[-1].finish, outputs[-1].error_code) == (Finish.ERROR, "invalid_value")
    assert outputs[-1].error_field == "prompt"


async def test_an_engine_that_dies_fails_what_was_asked(engine):
    os.kill(engine.client.pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(engine.handles(ask("1", "find", None)))
    await asyncio.sleep(0.1)
    os.kill(engine.client.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await asked
