"""Replicas that a load no longer needs end, that which costs least first, and nobody loses an answer."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from jserve.config import EngineConfig
from jserve.errors import ConfigError, EngineDead
from jserve.fleet.autoscale import Autoscaler
from jserve.fleet.face import FleetEngine
from jserve.fleet.start import check
from tests.fleet.fakes import ThreadSource
from tests.fleet.test_face import answers, begun, requests, undisturbed, until


class Says(Autoscaler):
    """One that knows how many are enough."""

    n: int | None = None

    def enough(self, now: float) -> int | None:
        return self.n


class World:
    def __init__(self, n: int, least: int = 1) -> None:
        self.source = ThreadSource(n)
        self.source.scales = True
        self.least, self.says = least, Says()
        self.fleet = FleetEngine(self.source, autoscaler=self.says)

    async def __aenter__(self) -> World:
        await self.fleet.start()
        self.source.n = self.least
        return self

    async def __aexit__(self, *_) -> None:
        await self.fleet.close()

    async def shrunk(self, n: int) -> None:
        await until(lambda: len(self.fleet.members) == n == len(self.source.hosts), 10.0)


async def test_one_after_the_other_ends_and_every_answer_is_the_undisturbed_one():
    asked = requests(12, 60)
    whole = await undisturbed(asked)
    async with World(3) as world:
        running = asyncio.ensure_future(answers(world.fleet, asked))
        await begun(world.fleet, 3)
        world.says.n = 1
        assert await asyncio.wait_for(running, 30.0) == whole
        await world.shrunk(1)
        assert len(world.source.retired) == 2
        assert world.fleet.counters["moved"] > 0
        assert world.fleet.counters["engine_deaths"] == 0
        assert await answers(world.fleet, asked) == whole


async def test_nobody_ends_below_the_least_number_or_before_enough_is_known():
    async with World(3, least=2) as world:
        await asyncio.sleep(0.3)
        assert len(world.fleet.members) == 3
        world.says.n = 1
        await world.shrunk(2)
        await asyncio.sleep(0.3)
        assert len(world.fleet.members) == 2


async def test_a_source_of_a_fixed_number_is_left_alone():
    async with World(2) as world:
        world.source.scales, world.says.n = False, 1
        await asyncio.sleep(0.3)
        assert len(world.fleet.members) == 2


async def test_whose_cache_saved_least_and_who_works_least_ends():
    async with World(3) as world:
        first, second, third = world.fleet.members
        world.says.saved_s |= {first.name: 9.0, second.name: 2.0, third.name: 5.0}
        assert world.fleet._scale_down._cost(second) < world.fleet._scale_down._cost(third)
        world.says.n = 2
        await world.shrunk(2)
        assert world.source.retired == [second.name]
    async with World(2) as world:
        running = asyncio.ensure_future(answers(world.fleet, requests(1, 200)))
        await begun(world.fleet, 1)
        idle = next(one for one in world.fleet.members if not one.n_open)
        world.says.n = 1
        await world.shrunk(1)
        assert world.source.retired == [idle.name]
        await running


async def test_one_that_is_out_ends_first():
    async with World(3) as world:
        slow = world.fleet.members[0]
        world.says.saved_s[slow.name] = 9.0
        world.fleet.suspicion._put_out(world.fleet.suspicion.records[slow.name], 0.0)
        world.says.n = 2
        await world.shrunk(2)
        assert world.source.retired == [slow.name]


async def test_named_caches_keep_their_replica():
    async with World(2) as world:
        request = dataclasses.replace(requests(1)[0], cache="kept")
        await world.fleet.create(request, 60.0)
        [holder] = set(world.fleet._handles.places)
        world.says.saved_s |= {one.name: 9.0 for one in world.fleet.members if one is not holder}
        world.says.n = 1
        await world.shrunk(1)
        assert world.fleet.members == [holder]


async def test_nobody_ends_while_other_weights_are_tried(monkeypatch):
    async with World(2) as world:
        monkeypatch.setattr(type(world.fleet._rollout), "has_canary", property(lambda _: True))
        world.says.n = 1
        await asyncio.sleep(0.3)
        assert len(world.fleet.members) == 2


async def test_one_that_cannot_be_told_serves_on_and_is_asked_again(monkeypatch):
    async with World(2) as world:
        retire, failed = world.source.retire, []

        async def fails_once(name: str) -> None:
            if not failed:
                failed.append(name)
                raise EngineDead("it does not answer")
            await retire(name)

        monkeypatch.setattr(world.source, "retire", fails_once)
        world.says.n = 1
        await world.shrunk(1)
        assert len(failed) == len(world.source.retired) == 1
        assert await answers(world.fleet, requests(2)) == await undisturbed(requests(2))


async def test_who_ends_or_is_not_there_is_not_connected_to_again():
    async with World(2) as world:
        fleet, (first, _) = world.fleet, world.fleet.members
        fleet._scale_down.retired.add(first.name)
        fleet._leave(first)
        fleet._join(first.name)
        fleet._join("nobody")
        assert set(fleet._members) == {fleet.members[0].name} != {first.name}
        fleet._scale_down.retired.clear()
        fleet._join(first.name)
        await until(lambda: len(fleet.members) == 2)


async def test_the_host_says_that_it_is_retired_and_then_ends(monkeypatch):
    monkeypatch.setattr("jserve.fleet.host.RETIRED_S", 0.05)
    source, codes = ThreadSource(1), []
    await source.start(lambda names: None)
    [host] = source.hosts.values()
    host._end = codes.append
    assert host.record_autoscaling_stats() == {
        "offered_seconds_total": 0.0,
        "saved_seconds_total": 0.0,
        "queue_seconds": 0.0,
        "retired": 0.0,
    }
    await host.retire("r0")
    await host.retire("r0")
    assert host.record_autoscaling_stats()["retired"] == 1.0
    await until(lambda: codes == [0], 5.0)
    await source.close()


async def test_the_load_of_a_replica_is_what_its_requests_cost():
    async with World(1) as world:
        await answers(world.fleet, requests(4))
        [host] = world.source.hosts.values()
        assert 0.0 < host.record_autoscaling_stats()["offered_seconds_total"] < 5.0


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 3, "max_replicas": 2},
        {"replicas": 2, "max_replicas": 4, "roles": "prefill=1,decode=1"},
    ],
)
def test_numbers_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError) as caught:
        check(EngineConfig.of(**options))
    assert caught.value.field == "max_replicas"
