"""The life of a server: signals, draining, an engine that gives up, a taken port."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import aiohttp
import pytest

from jserve.api.http.server import serve
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.text.chat.template import ChatTemplate
from tests.api.fake import CHATML, FakeEngine, byte_tokenizer, card, chat_body, parse_events, until

CHAT = "/v1/chat/completions"


class Running:
    """``serve`` in a task of this loop; signals go to this process."""

    def __init__(self, engine: FakeEngine, **options) -> None:
        self.engine = engine
        self.url = ""
        config = EngineConfig.of(**{"port": 0, "drain_timeout_s": 5.0} | options)
        self.task = asyncio.create_task(
            serve(
                config,
                engine,
                byte_tokenizer(),
                ChatTemplate({"default": CHATML}),
                card(),
                on_listening=self._listening,
            )
        )

    def _listening(self, url: str) -> None:
        self.url = url

    async def code(self, seconds: float = 5.0) -> int:
        return await asyncio.wait_for(self.task, seconds)


async def stream(http, url: str) -> tuple[int, list]:
    async with http.post(url + CHAT, json=chat_body(stream=True)) as r:
        return r.status, parse_events(await r.read())


async def started(engine: FakeEngine, **options) -> Running:
    running = Running(engine, **options)
    await until(lambda: running.url)
    return running


async def test_sigterm_lets_running_requests_finish():
    engine = FakeEngine(("x" * 30,))
    engine.delay = 0.02
    async with aiohttp.ClientSession() as http:
        running = await started(engine)
        task = asyncio.create_task(stream(http, running.url))
        await until(lambda: engine.records and engine.records[0].n_sent > 2)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: engine.draining)
        async with http.get(running.url + "/ready") as r:
            assert r.status == 503
            assert (await r.json())["error"]["code"] == "draining"
        async with http.get(running.url + "/health") as r:
            assert r.status == 200
        async with http.post(running.url + CHAT, json=chat_body()) as r:
            assert r.status == 503
            assert r.headers["Retry-After"]
        status, events = await task
        assert status == 200
        assert events[-1] == "[DONE]"
        assert await running.code() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(running.url + "/health")


async def test_what_does_not_finish_in_time_ends_with_an_error_event():
    engine = FakeEngine(("x" * 300,))
    engine.delay = 0.05
    async with aiohttp.ClientSession() as http:
        running = await started(engine, drain_timeout_s=0.2)
        task = asyncio.create_task(stream(http, running.url))
        await until(lambda: engine.records and engine.records[0].n_sent > 2)
        os.kill(os.getpid(), signal.SIGINT)
        _, events = await task
        assert events[-1]["error"]["code"] == "draining"
        assert await running.code() == 0


async def test_a_second_signal_ends_at_once():
    engine = FakeEngine()
    engine.first_delay = 30.0
    async with aiohttp.ClientSession() as http:
        running = await started(engine, drain_timeout_s=30.0)
        task = asyncio.create_task(http.post(running.url + CHAT, json=chat_body()))
        await until(lambda: engine.records)
        begin = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: engine.draining)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.code() == 128 + signal.SIGTERM
        assert time.monotonic() - begin < 2.5
        await asyncio.gather(task, return_exceptions=True)
        assert engine.records[0].cancelled_at is not None


async def test_an_idle_server_stops_fast_with_open_connections():
    async with aiohttp.ClientSession() as http:
        running = await started(FakeEngine())
        async with http.get(running.url + "/health") as r:
            assert r.status == 200
        begin = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.code() == 0
        assert time.monotonic() - begin < 1.0


async def test_an_engine_that_gave_up_ends_the_server(caplog):
    engine = FakeEngine()
    running = await started(engine)
    engine.gave_up_reason = "three restarts in a minute"
    engine.gave_up.set()
    assert await running.code() == 1
    assert "three restarts" in caplog.text


async def test_a_taken_port_is_a_config_error():
    running = await started(FakeEngine())
    port = int(running.url.rsplit(":", 1)[1])
    second = Running(FakeEngine(), port=port)
    with pytest.raises(ConfigError, match=str(port)) as e:
        await second.code()
    assert e.value.field == "port"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running.code() == 0


async def test_the_signal_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    running = await started(FakeEngine())
    os.kill(os.getpid(), signal.SIGTERM)
    await running.code()
    assert signal.getsignal(signal.SIGTERM) is before
