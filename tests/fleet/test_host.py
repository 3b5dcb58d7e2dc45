"""A replica as its fronts see it: what each is told, and what becomes of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jserve.config import EngineConfig
from jserve.engine.wire import Fault, Gone, Message, Ready, Stats
from jserve.errors import EngineDead
from jserve.fleet.host import EngineHost
from jserve.fleet.link import FrontClient
from tests.fleet.fakes import OPTIONS
from tests.fleet.test_face import requests, until


def config(**options):
    return EngineConfig.of(**OPTIONS | options).flat()


async def hosted(end: Callable[[int], None] = lambda code: None) -> EngineHost:
    return await asyncio.to_thread(EngineHost, config(), "tests.fleet.fakes:build", end=end)


class Front:
    """One front, and what it was told."""

    def __init__(self, host: EngineHost) -> None:
        self.told: list[Message] = []
        self.client = FrontClient(lambda: host.endpoint("r"))
        self.client.start(self.told.append)

    async def ready(self) -> Front:
        await until(lambda: any(isinstance(one, Stats) for one in self.told))
        assert isinstance(self.told[0], Ready)
        return self

    @property
    def stats(self) -> list[Stats]:
        return [one for one in self.told if isinstance(one, Stats)]

    def close(self) -> Awaitable[None]:
        return asyncio.to_thread(self.client.close)


async def test_an_engine_that_does_not_start_says_why():
    with pytest.raises(EngineDead, match="no_such_module"):
        await asyncio.to_thread(EngineHost, config(), "tests.fleet.no_such_module:build")


async def test_a_front_that_hangs_up_takes_its_requests_with_it():
    host = await hosted()
    try:
        front = await Front(host).ready()
        for one in requests(3, 400):
            front.client.submit(one)
        await until(lambda: host._stats.running >= 3)
        await front.close()
        await until(lambda: not host._stats.running and not host._fronts)
        assert host._stats.step < 300, "they ran to their end"
        assert isinstance(front.told[-1], Gone)
    finally:
        await asyncio.to_thread(host._client.close)


async def test_a_front_that_comes_later_is_told_of_all_pages_and_counts_its_own_requests():
    host = await hosted()
    try:
        first, (asked, *_) = await Front(host).ready(), requests(1, 2)
        first.client.submit(asked)
        await until(lambda: bool(host._pages))
        await until(lambda: not host._stats.running and host._stats.view.n_taken == 1)
        later = await Front(host).ready()
        stats = later.stats[0]
        assert {event.digest for event in stats.pages} == host._pages
        assert (host._stats.view.n_taken, stats.view.n_taken) == (1, 0)
        await until(lambda: first.stats[-1].view.n_taken == 1)
        await asyncio.gather(first.close(), later.close())
    finally:
        await asyncio.to_thread(host._client.close)


async def test_a_host_whose_engine_is_gone_is_unfit_and_ends_its_process():
    ended: list[int] = []
    host = await hosted(ended.append)
    host.check_health()
    front = await Front(host).ready()
    host._client.kill()
    await until(lambda: isinstance(front.told[-1], Gone))
    assert [type(one) for one in front.told[-2:]] == [Fault, Gone]
    with pytest.raises(EngineDead):
        host.check_health()
    await until(lambda: len(ended) == 1)
    late = Front(host)  # whoever connects now is told, and let go
    await until(lambda: isinstance((late.told or [None])[-1], Gone))
