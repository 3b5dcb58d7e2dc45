"""A replica's connections: every frame once and in order, whichever thread puts it."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from jserve.config import EngineConfig
from jserve.engine.wire import Fault, FromEngine, Stats, Submit, decoder, pack, take_frames
from jserve.errors import EngineDead
from jserve.fleet.host import EngineHost, FrontConnection, NoConnection
from tests.fleet.fakes import OPTIONS
from tests.fleet.test_face import requests


async def test_frames_of_another_thread_come_once_and_in_order():
    """The threads are switched as often as Python can, so that one is caught between any two steps."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        connection = FrontConnection(asyncio.get_running_loop())
        n = 4000
        writer = threading.Thread(
            target=lambda: [connection.put(Fault(message=str(i))) for i in range(n)]
        )
        writer.start()
        got: list[bytes] = []
        while writer.is_alive():
            got += take_frames(bytearray(await connection.next(0.1) or b""))
        writer.join()
        got += take_frames(bytearray(await connection.next(0.1) or b""))
        assert got == [pack(Fault(message=str(i)))[4:] for i in range(n)]
    finally:
        sys.setswitchinterval(interval)


async def test_a_closed_connection_ends_and_an_unknown_one_is_refused():
    connection = FrontConnection(asyncio.get_running_loop())
    connection.put(Fault(message="last words"))
    connection.close()
    assert await connection.next(1.0)
    connection.close()
    assert await connection.next(1.0) is None


def config(**options):
    return EngineConfig.of(**OPTIONS | options).flat()


async def test_an_engine_that_does_not_start_says_why():
    with pytest.raises(EngineDead, match="no_such_module"):
        await asyncio.to_thread(EngineHost, config(), "tests.fleet.no_such_module:build")


async def test_a_front_that_hangs_up_takes_its_requests_with_it():
    host = await asyncio.to_thread(EngineHost, config(), "tests.fleet.fakes:build", lambda code: 0)
    try:
        talk = host.talk("r", "front")
        await anext(talk)
        await host.take("r", "front", b"".join(pack(Submit(request=r)) for r in requests(3, 400)))
        while host._stats.running < 3:
            await asyncio.sleep(0.01)
        await talk.aclose()
        while host._stats.running:
            await asyncio.sleep(0.01)
        assert host._stats.step < 300, "they ran to their end"
        with pytest.raises(NoConnection):
            await host.take("r", "front", b"")
    finally:
        await asyncio.to_thread(host._client.close)


async def test_a_front_that_comes_later_is_told_of_all_pages_and_counts_its_own_requests():
    host = await asyncio.to_thread(EngineHost, config(), "tests.fleet.fakes:build", lambda code: 0)
    try:
        first, (asked, *_) = host.talk("r", "first"), requests(1, 2)
        await anext(first)
        await host.take("r", "first", pack(Submit(request=asked)))
        while not host._pages:
            await asyncio.sleep(0.01)
        while host._stats.running or host._stats.view.n_taken < 1:
            await asyncio.sleep(0.01)
        later = host.talk("r", "later")
        stats = _stats_of(await anext(later))
        assert {event.digest for event in stats.pages} == host._pages
        assert (host._stats.view.n_taken, stats.view.n_taken) == (1, 0)
        assert _stats_of(await anext(first)).view.n_taken == 1
    finally:
        await asyncio.to_thread(host._client.close)


def _stats_of(frames: bytes) -> Stats:
    """The last one among them."""
    decode = decoder(FromEngine).decode
    return [m for m in map(decode, take_frames(bytearray(frames))) if isinstance(m, Stats)][-1]


async def _to_the_end(talk) -> None:
    async for _ in talk:
        pass


async def test_a_host_whose_engine_is_gone_is_unfit_and_ends_its_process():
    ended: list[int] = []
    host = await asyncio.to_thread(EngineHost, config(), "tests.fleet.fakes:build", ended.append)
    host.check_health()
    talk = host.talk("r", "front")
    await anext(talk)
    host._client.kill()
    await asyncio.wait_for(_to_the_end(talk), 5.0)
    with pytest.raises(EngineDead):
        host.check_health()
    await asyncio.sleep(0.7)
    assert len(ended) == 1
