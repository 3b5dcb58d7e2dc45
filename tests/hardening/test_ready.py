"""``/ready`` of a whole server whose engine makes steps, and had better get no new requests."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import numpy as np
import pytest

from jserve.engine import health
from tests.api.fake import until
from tests.hardening.world import COMP, World, world

BODY = {"prompt": "Hello", "max_tokens": 3, "temperature": 0}


@pytest.fixture(autouse=True)
def quiet(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(health, "REST_S", 0.3)


async def heard(made: World) -> None:
    """Wait until the front knows what its engine has counted."""
    await made.idle()
    counted = made.engine.stats().values
    names = ("finished", "sequences_nonfinite_total", "step_faults_total", "steps_failed_in_row")
    told = made.face.stats
    await until(lambda: all(told().values.get(n) == counted[n] for n in names), 5.0)


async def ready(made: World) -> tuple[int, str]:
    """(status, words); what else must hold of a server that is up."""
    await heard(made)
    return await answer(made)


async def answer(made: World) -> tuple[int, str]:
    assert (await made.srv.get("/health"))[0] == 200
    status, body, headers = await made.srv.get("/ready")
    if status == 200:
        return status, body["status"]
    assert body["error"]["code"] == "degraded"
    assert int(headers["Retry-After"]) >= 1
    return status, body["error"]["message"]


def nonfinite(made: World) -> None:
    """From now on the model gives logits that are not finite."""
    collect = made.runners[-1].collect

    def broken(flight):
        result = collect(flight)
        return dataclasses.replace(result, finite_R=np.zeros_like(result.finite_R))

    made.runners[-1].collect = broken


async def test_a_model_that_gives_no_finite_logits():
    async with world() as made:
        assert (await made.srv.post(COMP, BODY))[0] == 200
        assert await ready(made) == (200, "ready")
        whole = made.runners[-1].collect
        nonfinite(made)
        for _ in range(4):
            status, body, _ = await made.srv.post(COMP, BODY)
            assert (status, body["error"]["code"]) == (500, "nonfinite_logits")
        assert await ready(made) == (
            503,
            "4 of 5 sequences of a minute had logits that are not finite",
        )
        made.runners[-1].collect = whole
        assert (await made.srv.post(COMP, BODY))[0] == 200, "who asks all the same is served"
        assert made.face.counters["degraded"] == 1
        told = made.srv.app_metrics()
        assert "jserve:sequences_nonfinite_total" in told
        assert "jserve:engine_degraded_total" in told


async def test_few_bad_requests_among_many_are_theirs():
    """A 500 of one client does not take a server from the others."""
    async with world() as made:
        for _ in range(3):
            for _ in range(9):
                assert (await made.srv.post(COMP, BODY))[0] == 200
            whole = made.runners[-1].collect
            nonfinite(made)
            assert (await made.srv.post(COMP, BODY))[0] == 500
            made.runners[-1].collect = whole
            assert await ready(made) == (200, "ready")


async def test_steps_that_all_fail_and_then_do_not():
    async with world() as made:
        launch = made.runners[-1].launch

        def broken(plan):
            raise RuntimeError("no step comes back")

        made.runners[-1].launch = broken
        answers = await asyncio.gather(*(made.srv.post(COMP, BODY) for _ in range(3)))
        assert {(status, body["error"]["code"]) for status, body, _ in answers} == {
            (500, "engine_step_failed")
        }
        status, words = await ready(made)
        assert status == 503
        assert words.endswith("steps failed in a row")
        made.runners[-1].launch = launch
        assert (await made.srv.post(COMP, BODY))[0] == 200
        await heard(made)
        await asyncio.sleep(0.4)
        assert await ready(made) == (200, "ready")


async def test_a_step_that_runs_for_long(monkeypatch):
    async with world() as made:
        made.face._replica.health = health.EngineHealth(health.HealthLimits(step_s=0.2))
        gate = asyncio.Event()
        collect, loop = made.runners[-1].collect, asyncio.get_running_loop()

        def slow(flight):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10.0)
            return collect(flight)

        made.runners[-1].collect = slow
        asked = asyncio.create_task(made.srv.post(COMP, BODY))
        await until(lambda: made.face.degraded_reasons() != [], 5.0)
        status, words = await answer(made)
        assert status == 503
        assert "while there is work" in words
        gate.set()
        assert (await asked)[0] == 200
        await asyncio.sleep(0.4)
        assert await ready(made) == (200, "ready")
