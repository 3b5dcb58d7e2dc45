"""A replica as its fronts see it: what each is told, and what becomes of its requests."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

import pytest

from jserve.config import EngineConfig
from jserve.engine.wire import Fault, Gone, Message, Outputs, Ready, Stats
from jserve.errors import EngineDead
from jserve.fleet.host import EngineHost
from jserve.fleet.link import FrontClient
from jserve.ports import Clock
from jserve.sampling import SamplingParams
from tests.fleet.fakes import OPTIONS
from tests.fleet.test_face import requests, until


def config(**options):
    return EngineConfig.of(**OPTIONS | options).flat()


async def hosted(end: Callable[[int], None] = lambda code: None) -> EngineHost:
    return await asyncio.to_thread(EngineHost, config(), "tests.fleet.fakes:build", end=end)


class Front:
    """One front, and what it was told."""

    def __init__(self, host: EngineHost, clock: Clock = time.monotonic) -> None:
        self.told: list[Message] = []
        self.client = FrontClient(lambda: host.endpoint("r"), clock=clock)
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


@pytest.mark.parametrize("shift_s", [-1e4, 0.0, 1e4])
async def test_deadlines_hold_whatever_the_front_takes_for_now(shift_s):
    """Clocks of machines differ: what has its time left is answered, what arrived long ago ends when it has to."""

    def clock() -> float:
        return time.monotonic() + shift_s

    def ends(front: Front) -> dict[str, str | None]:
        outputs = [out for one in front.told if isinstance(one, Outputs) for out in one.outputs]
        return {out.request_id: out.error_code for out in outputs if out.finish is not None}

    host = await hosted()
    try:
        front = await Front(host, clock).ready()
        asked = dataclasses.replace(requests(1, 400)[0], deadline_ms=60_000.0)
        short = dataclasses.replace(asked, params=SamplingParams(max_tokens=2))
        front.client.submit(dataclasses.replace(short, id="new", arrival=clock()))
        front.client.submit(dataclasses.replace(asked, id="old", arrival=clock() - 59.5))
        front.client.submit(dataclasses.replace(short, id="unknown"))
        cached = dataclasses.replace(short, cache="doc", params=SamplingParams(max_tokens=0))
        front.client.create(dataclasses.replace(cached, id="made", arrival=clock()), 60.0)
        await until(lambda: len(ends(front)) == 4)
        fine: dict[str, str | None] = dict.fromkeys(["new", "unknown", "made"])
        assert ends(front) == fine | {"old": "deadline_exceeded"}
        await front.close()
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
