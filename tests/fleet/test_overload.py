"""A fleet that gets more than it can do, in simulated time: those who would wait too long are refused, lane interactive
goes first on every replica, nothing is lost, and afterwards all is as before."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from typing import Any

import pytest

from jserve.config import EngineConfig
from jserve.fleet.face import FleetEngine
from jserve.sim import traffic
from jserve.sim.trace import EOS, Streams, TraceItem, request_of
from jserve.types import Lane
from tests.fleet.test_same_choice import setup
from tests.fleet.virtual import VirtualLoop, VirtualSource, in_virtual_time

EACH = "prompt=60,output=40,context=500"
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "page_size": 16, "max_queue_s": 1}
TWO = setup(replicas=2, config=EngineConfig.of(**OPTIONS))


class Crowd:
    """Clients of a fleet, and what becomes of their requests."""

    def __init__(self, text: str, loop: VirtualLoop) -> None:
        self._loop, self._streams = loop, Streams()
        self._items = {item.id: item for item in traffic.generate(traffic.parse(text), 3)}
        self.first_s: dict[Lane, list[float]] = defaultdict(list)
        """Of those that were answered: until their first token."""
        self.ends: dict[Lane, Counter[str]] = defaultdict(Counter)

    async def run(self) -> Crowd:
        source = VirtualSource(TWO, lambda c: self._streams.answer(self._items[c.request.id], 0))
        fleet = FleetEngine(source, policy=TWO.router, clock=self._loop.time)
        await fleet.start()
        began = self._loop.time()
        await asyncio.gather(*(self._client(fleet, item, began) for item in self._items.values()))
        await fleet.close()
        return self

    async def _client(self, fleet: FleetEngine, item: TraceItem, began: float) -> None:
        await asyncio.sleep(began + item.at - self._loop.time())
        asked, first_s = self._loop.time(), math.inf
        said: list[int] = []
        async for output in fleet.generate(request_of(item, self._streams, asked)):
            first_s = min(first_s, self._loop.time() - asked)
            said += output.token_ids
            if output.error is not None:
                self.ends[item.lane][output.error_code or ""] += 1
                return
        whole = self._streams.answer(item, 0)
        self.ends[item.lane]["whole" if said == whole[: whole.index(EOS)] else "cut"] += 1
        self.first_s[item.lane].append(first_s)


def crowd(*parts: str) -> Any:
    text = ";".join(f"{part},{EACH}" for part in parts)
    return in_virtual_time(lambda loop: Crowd(text, loop).run())


def late(times: list[float]) -> float:
    """The 95th of a hundred."""
    return sorted(times)[int(0.95 * len(times))]


def test_interactive_goes_first_and_those_who_would_wait_too_long_are_refused() -> None:
    calm = crowd("lane=interactive,rate=5,seconds=4")
    assert {*calm.ends[Lane.INTERACTIVE]} == {"whole"}
    others = ("lane=standard,rate=80,seconds=6", "lane=bulk,rate=80,seconds=6")
    full = crowd("lane=interactive,rate=10,seconds=6", *others)
    assert {end for ends in full.ends.values() for end in ends} == {"whole", "overloaded"}
    refused = {lane: ends["overloaded"] / ends.total() for lane, ends in full.ends.items()}
    assert refused[Lane.INTERACTIVE] < 0.1 < 0.3 < refused[Lane.STANDARD] < refused[Lane.BULK]
    times = {lane: late(full.first_s[lane]) for lane in Lane}
    assert times[Lane.INTERACTIVE] < 0.3 * times[Lane.STANDARD] < times[Lane.BULK]


@pytest.mark.slow
def test_afterwards_all_is_as_before() -> None:
    again = "lane=interactive,rate=5,seconds=4,start=12"
    found = crowd("lane=bulk,rate=200,seconds=4", again)
    assert found.ends[Lane.BULK]["overloaded"] > 300
    assert {*found.ends[Lane.INTERACTIVE]} == {"whole"}
    calm = crowd(again)
    assert late(found.first_s[Lane.INTERACTIVE]) <= 1.1 * late(calm.first_s[Lane.INTERACTIVE])
