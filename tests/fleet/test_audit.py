"""Answers that are computed once more: a replica that says something else is found, and no client notices."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest

from jserve.engine.wire import Control
from jserve.fleet.face import FleetEngine
from tests.fleet.fakes import DirectoryRunner, ThreadSource
from tests.fleet.test_face import answers, begun, requests, until


class World:
    """Replicas whose draws depend on their weights; those of a ``faulty`` one are not what it says."""

    def __init__(self, tmp_path, n: int, share: float = 1.0) -> None:
        (tmp_path / "weights").write_text("1")
        self.source = ThreadSource(n, "tests.fleet.fakes:weighed", model=str(tmp_path))
        self.fleet = FleetEngine(self.source, model=str(tmp_path), audit_share=share)
        self.n = n

    async def __aenter__(self) -> World:
        DirectoryRunner.made.clear()
        await self.fleet.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.fleet.close()

    @property
    def audits(self):
        return self.fleet._placement.audits

    def break_one(self, number: int) -> str:
        """From now on the weights of this replica are others; its name."""
        DirectoryRunner.made[number].weights = 99
        return list(self.source.hosts)[number]

    async def done(self) -> None:
        await until(lambda: not len(self.audits))
        assert not len(self.fleet._placement.sent)
        assert not self.fleet._router.pages._sent._root.below
        await until(lambda: not any(one.stats.running for one in self.fleet.members))


async def test_replicas_that_agree(tmp_path):
    async with World(tmp_path, 2) as world:
        await answers(world.fleet, requests(8))
        await world.done()
        assert world.fleet.counters["audited"] == 8
        assert world.fleet.counters["audit_mismatches"] == 0
        assert {one.odd for one in world.fleet.replicas()} == {0}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_replica_that_computes_something_else_is_named(tmp_path, number):
    """Whether it answered or was asked in the audit, the third one says that it is odd."""
    async with World(tmp_path, 3) as world:
        faulty = world.break_one(number)
        for _ in range(3):
            await answers(world.fleet, requests(6))
            await world.done()
        odd = {one.name: one.odd for one in world.fleet.replicas()}
        assert odd.pop(faulty) > 0
        assert set(odd.values()) == {0}
        assert world.fleet.counters["audit_mismatches"] > 0


async def test_of_two_that_differ_both_are_counted(tmp_path, caplog):
    async with World(tmp_path, 2) as world:
        world.break_one(1)
        await answers(world.fleet, requests(2))
        await world.done()
        assert {one.odd for one in world.fleet.replicas()} == {2}
        assert sum("replicas differ" in record.message for record in caplog.records) == 2


async def test_only_a_share_is_audited_and_none_by_default(tmp_path):
    async with World(tmp_path, 2, share=0.0) as world:
        await answers(world.fleet, requests(6))
        assert world.fleet.counters["audited"] == 0
    async with World(tmp_path, 2, share=0.5) as world:
        for _ in range(10):
            await answers(world.fleet, requests(8, 2))
        await world.done()
        assert 20 <= world.fleet.counters["audited"] <= 60


async def test_an_audit_is_given_up_with_its_replica(tmp_path):
    async with World(tmp_path, 2) as world:
        await answers(world.fleet, requests(1, 100))
        await until(lambda: len(world.audits) == 1)
        [audit] = world.audits._audits.values()
        world.source.kill(audit.sent.member.name)
        await world.done()
        assert world.fleet.counters["audited"] == 0
        assert world.fleet.counters["resumed"] == 0


async def test_a_request_of_the_same_id_ends_its_audit(tmp_path):
    async with World(tmp_path, 2) as world:
        asked = dataclasses.replace(requests(1, 60)[0], id="again")
        told = [out.token_ids async for out in world.fleet.generate(asked)]
        [audit] = world.audits._audits.values()
        candidates = world.fleet._router.candidates
        for number in range(len(candidates)):
            candidates.change(number, out=number != audit.sent.member.number)
        again = [out.token_ids async for out in world.fleet.generate(asked)]
        assert sum(again, ()) == sum(told, ())
        await world.done()


async def test_what_was_left_is_compared_as_far_as_it_came(tmp_path):
    async with World(tmp_path, 2) as world:
        running = asyncio.ensure_future(answers(world.fleet, requests(1, 400)))
        await begun(world.fleet, 1)
        running.cancel()
        await until(lambda: world.fleet.counters["audited"] == 1)
        await world.done()
        assert world.fleet.counters["audit_mismatches"] == 0


async def test_answers_of_other_weights_are_not_compared(tmp_path):
    """Audits end where an update begins, and an answer that saw one has none."""
    new = tmp_path / "new"
    new.mkdir()
    (new / "weights").write_text("2")
    async with World(tmp_path, 2) as world:
        first, second = world.fleet.members
        running = asyncio.ensure_future(answers(world.fleet, requests(6, 60)))
        await begun(world.fleet, 6)
        command = Control(id="u", action="update_weights", source=str(new), version="2")
        update = asyncio.ensure_future(world.fleet.control(command))
        await asyncio.gather(running, update)
        await world.done()
        assert (first.weights, second.weights) == ("w2", "w2")
        assert world.fleet.counters["audit_mismatches"] == 0
        await answers(world.fleet, requests(4, 60))
        await world.done()
        assert world.fleet.counters["audited"] >= 4
        assert world.fleet.counters["audit_mismatches"] == 0


async def test_the_second_answer_is_of_the_same_weights(tmp_path):
    async with World(tmp_path, 2) as world:
        answering = asyncio.ensure_future(answers(world.fleet, requests(1, 40)))
        await begun(world.fleet, 1)
        [busy] = [one for one in world.fleet.members if one.n_open]
        [other] = [one for one in world.fleet.members if one is not busy]
        candidates = world.fleet._router.candidates
        changed = msgspec.structs.replace(candidates[other.number].view, weights="w9")
        candidates.change(other.number, view=changed)
        await answering
        assert not len(world.audits)
