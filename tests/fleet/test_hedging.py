"""Requests whose first token is late go to a second replica; whoever speaks first answers, and nobody is told twice."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from jserve.errors import BadRequest
from jserve.fleet.face import FleetEngine
from jserve.types import Lane, Request
from tests.fleet.fakes import ThreadSource
from tests.fleet.test_face import answers, begun, requests, undisturbed, until


class World:
    def __init__(self, n: int = 2, share: float = 1.0) -> None:
        self.source = ThreadSource(n)
        self.fleet = FleetEngine(self.source, hedge_share=share)

    async def __aenter__(self) -> World:
        await self.fleet.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.fleet.close()

    @property
    def hedging(self):
        return self.fleet._placement.hedging

    def first(self) -> str:
        """The replica that has the request."""
        [name] = {one.name for one in self.fleet.members if one.n_open}
        return name

    async def late(self, asked: list[Request]) -> tuple[asyncio.Future, str]:
        """(answers, replica) of requests at one replica, which says nothing from now on."""
        running = asyncio.ensure_future(answers(self.fleet, asked))
        await until(lambda: any(one.n_open for one in self.fleet.members))
        name = self.first()
        self.source.hold(name, True)
        return running, name

    def drawn(self, name: str) -> float:
        """Tokens that ended interactive requests had at this replica."""
        member = next(one for one in self.fleet.members if one.name == name)
        return member.stats.values["interactive_output_tokens"]

    async def clean(self) -> None:
        """Nothing is left of any request, here or at a replica."""
        fleet = self.fleet
        await until(lambda: not any(one.streams for one in fleet.members))
        assert not len(self.hedging)
        assert not len(fleet._placement.sent)
        assert not fleet._router.pages._sent._root.below
        await until(lambda: not any(one.stats.running for one in fleet.members))


def interactive(n: int = 1, max_tokens: int = 20) -> list[Request]:
    return [dataclasses.replace(r, lane=Lane.INTERACTIVE) for r in requests(n, max_tokens)]


async def test_a_second_replica_answers_where_the_first_one_is_late():
    asked = interactive(max_tokens=300)
    whole = await undisturbed(asked)
    async with World() as world:
        running, late = await world.late(asked)
        await until(lambda: world.hedging.n_won == 1, 0.9)
        world.source.hold(late, False)
        assert await asyncio.wait_for(running, 5.0) == whole
        assert (world.hedging.n_sent, world.fleet.counters["moved"]) == (1, 0)
        await world.clean()
        assert world.drawn(late) < 300, "it is cancelled there"
        assert world.fleet.counters["resumed"] == 0
        assert await answers(world.fleet, asked) == whole
        assert world.fleet.counters["hedged"] == 1


async def test_the_first_one_answers_where_it_speaks_after_all():
    asked = interactive(max_tokens=200)
    whole = await undisturbed(asked)
    async with World() as world:
        running, late = await world.late(asked)
        other = next(one.name for one in world.fleet.members if one.name != late)
        await until(lambda: world.hedging.n_sent == 1)
        world.source.hold(other, True)
        world.source.hold(late, False)
        await begun(world.fleet, 1)
        assert not len(world.hedging)
        world.source.hold(other, False)
        assert await asyncio.wait_for(running, 5.0) == whole
        assert world.hedging.n_won == 0
        await world.clean()


@pytest.mark.parametrize("dies", ["first", "second"])
async def test_either_of_both_may_die(dies):
    asked = interactive(max_tokens=60)
    whole = await undisturbed(asked)
    async with World(3) as world:
        running, late = await world.late(asked)
        for one in world.fleet.members:
            if one.name != late:
                world.source.hold(one.name, True)
        await until(lambda: world.hedging.n_sent == 1)
        second = world.hedging._hedges[next(iter(world.hedging._hedges))].sent.member.name
        world.source.kill(late if dies == "first" else second)
        await until(lambda: not len(world.hedging))
        [stream] = world.fleet._streams.values()
        left = second if dies == "first" else late
        assert world.fleet._placement.sent.get(stream.request.id).member.name == left
        for name in world.source.hosts:
            world.source.hold(name, False)
        assert await asyncio.wait_for(running, 5.0) == whole
        assert world.fleet.counters["resumed"] == 0, "the other one had it already"
        await world.clean()


async def test_who_hangs_up_ends_both():
    async with World() as world:
        running = asyncio.ensure_future(answers(world.fleet, interactive(max_tokens=200)))
        await until(lambda: any(one.n_open for one in world.fleet.members))
        for name in world.source.hosts:
            world.source.hold(name, True)
        await until(lambda: world.hedging.n_sent == 1)
        running.cancel()
        await until(lambda: not len(world.hedging), 0.5)
        for name in world.source.hosts:
            world.source.hold(name, False)
        await world.clean()
        assert all(world.drawn(name) < 200 for name in world.source.hosts)


async def test_other_lanes_and_more_than_the_share_are_not_sent_twice():
    async with World(share=0.25) as world:
        world.hedging._budget.spend(99)
        asked = [*requests(4), *interactive(8, 4)]
        running = asyncio.ensure_future(answers(world.fleet, asked))
        await until(lambda: sum(one.n_open for one in world.fleet.members) == 12)
        for name in world.source.hosts:
            world.source.hold(name, True)
        await until(lambda: world.hedging.n_sent == 2)
        await asyncio.sleep(0.2)
        hedged = [hedge.stream.request.lane for hedge in world.hedging._hedges.values()]
        assert hedged == [Lane.INTERACTIVE] * 2, "a quarter of eight"
        for name in world.source.hosts:
            world.source.hold(name, False)
        await running
        await world.clean()


async def test_off_by_default():
    async with World(share=0.0) as world:
        running = asyncio.ensure_future(answers(world.fleet, interactive()))
        await until(lambda: any(one.n_open for one in world.fleet.members))
        world.source.hold(world.first(), True)
        await asyncio.sleep(0.6)
        assert world.hedging.n_sent == 0
        for name in world.source.hosts:
            world.source.hold(name, False)
        await running


async def test_a_second_replica_that_cannot_be_told_changes_nothing(monkeypatch):
    asked = interactive(max_tokens=30)
    whole = await undisturbed(asked)
    async with World() as world:
        running = asyncio.ensure_future(answers(world.fleet, asked))
        await until(lambda: any(one.n_open for one in world.fleet.members))
        late, tried = world.first(), []

        def refuses(stream, request, ttl_s=None):
            tried.append(request)
            raise BadRequest("too large", field="prompt")

        other = next(one for one in world.fleet.members if one.name != late)
        monkeypatch.setattr(other, "work_on", refuses)
        world.source.hold(late, True)
        await until(lambda: bool(tried))
        world.source.hold(late, False)
        assert await asyncio.wait_for(running, 5.0) == whole
        assert world.hedging.n_sent == 0
        await world.clean()
