"""The loads and faults of bench.replicas, on replicas in threads of this process."""

from __future__ import annotations

import signal
from argparse import Namespace

import pytest

from bench import replicas, routers
from bench.replicas import Load, disturbed
from tests.fleet.test_face import World


async def test_both_are_asked_in_turn(monkeypatch):
    monkeypatch.setattr(replicas, "THROUGH_S", 0.5)
    monkeypatch.setattr(replicas, "AT_ONCE", 4)
    monkeypatch.setattr(replicas, "ANSWERS", (3, 6))
    async with World(1) as one, World(1) as other:
        found = await Load().first(one.fleet, other.fleet, 40, 3)
        assert set(found) == {"server_first_ms_40", "replica_first_ms_40", "added_ms_40"}
        counts = [world.fleet.members[0].n_requests for world in (one, other)]
        assert counts == [4, 4], "three and one to warm up"
        rate = await Load().through([one.fleet, other.fleet])
        more = [world.fleet.members[0].n_requests - 4 for world in (one, other)]
        assert min(more) >= 2, "two at once for each"
        assert 0 < 0.5 * rate <= 6 * sum(more)


async def test_the_wait_of_those_whose_replica_is_killed_is_found(monkeypatch):
    async with World(2) as world:
        fleet, source = world.fleet, world.source
        monkeypatch.setattr(replicas, "LONG", 60)
        killed = []

        def kill(pid: int, number: int) -> None:
            busiest = max(fleet.members, key=lambda one: one.n_open)
            killed.append((busiest.name, number))
            for one in fleet.members:  # as one process they have one number
                assert one.info["pid"] == pid
            source.clients[busiest.name].cut()  # it lives, so it is connected to again

        monkeypatch.setattr("bench.replicas.os.kill", kill)
        found = await disturbed(fleet, Load(), signal.SIGKILL)
        assert len(killed) == 1
        assert fleet.counters["resumed"] > 0
        assert found["gap_ms"] >= found["usual_ms"] > 0
        assert found["prefill_ms"] >= 0
        assert found["due_ms"] > 1000


def test_routers_are_compared_with_one_cache(monkeypatch):
    monkeypatch.setattr(routers, "SEEDS", [1])
    large, found = routers.one_cache(Namespace())
    assert found["of_one_cache"] == found["hit_tokens"] / large["hit_tokens"]
    assert found["of_one_cache"] == pytest.approx(0.963, abs=1e-3)
