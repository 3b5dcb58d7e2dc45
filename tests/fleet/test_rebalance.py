"""A request that waits goes where it costs less than the wait that is left, and its answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics

import pytest
from hypothesis import given, strategies as st

from jserve.fleet.candidates import PREFILL, Candidate, CandidateTable
from jserve.fleet.pages import PageIndex
from jserve.fleet.rebalance import (
    MOST_LOOKED,
    WaitingRequest,
    goes_elsewhere,
    longest_waits,
    waits_of,
)
from jserve.sim import traffic
from jserve.sim.fleet import FleetSimulation
from jserve.sim.simulate import limits_of
from tests.fleet.direct import direct_route
from tests.fleet.fakes import HostClient
from tests.fleet.test_face import World, answers, begun, requests, undisturbed, until
from tests.fleet.test_route import PAGE, asked, candidates, held, index, view
from tests.sim.test_fleet import RAMP, setup


def waiting(left_s: float, replica: int = 0, **changes) -> WaitingRequest:
    return WaitingRequest(id="a", asked=asked(**changes), replica=replica, left_s=left_s)


FREE = view(n_rows=0, wait_s={"bulk": 1.0})


def test_it_goes_where_its_price_is_below_what_is_left_of_its_wait():
    """140 tokens at 1 ms, and as much again for what they evict there."""
    fleet = CandidateTable([Candidate(view=view()), Candidate(view=FREE)])
    assert goes_elsewhere(waiting(0.285), fleet, PageIndex())
    assert not goes_elsewhere(waiting(0.275), fleet, PageIndex())
    assert goes_elsewhere(waiting(0.03), fleet, index([0, 8])), (
        "12 tokens are left to compute there"
    )
    fleet.change(1, suspicion=2.0)
    assert not goes_elsewhere(waiting(0.285), fleet, PageIndex())


def test_a_queue_is_no_place_to_go_to_however_short():
    fleet = CandidateTable([Candidate(view=view()), Candidate(view=FREE)])
    fleet.change(1, view=view(n_rows=1, wait_s={"standard": 0.02}))
    assert not goes_elsewhere(waiting(50.0), fleet, PageIndex())


@pytest.mark.parametrize(
    "change", [{"out": True}, {"role": PREFILL}, {"view": view(ready=False, wait_s={})}]
)
def test_nobody_goes_where_no_request_is_sent(change):
    waits, other = Candidate(view=view()), Candidate(**{"view": FREE} | change)
    assert not goes_elsewhere(waiting(9.0), CandidateTable([waits, other]), PageIndex())
    assert not goes_elsewhere(waiting(9.0), CandidateTable([waits]), PageIndex())
    alone = CandidateTable([Candidate(view=FREE)])
    assert not goes_elsewhere(waiting(9.0), alone, PageIndex()), "where it is already"


@given(candidates, held, st.floats(0.0, 20.0), st.integers(0, 8))
def test_it_goes_exactly_where_the_plain_form_says_so(candidates, held, left_s, replica):
    replica %= len(candidates)
    wanted = False
    for i, (one, n) in enumerate(zip(candidates, held, strict=False)):
        choice = direct_route(asked(), [one], [n])
        new_s = (140 - n * PAGE) * one.view.prefill_token_s * one.suspicion
        free = not one.n_sent and not one.view.wait_s["standard"] and i != replica
        wanted |= choice is not None and free and choice.cost_s + new_s < left_s
    one = WaitingRequest(id="a", asked=asked(), replica=replica, left_s=left_s)
    assert goes_elsewhere(one, CandidateTable(candidates), index(held)) == wanted


def test_the_last_of_a_queue_waits_longest():
    """Three of lane standard and one of bulk at replica 0, one at replica 1."""
    waits = [{"standard": 6.0, "bulk": 9.0}, {"standard": 1.0}]
    fleet = CandidateTable(Candidate(view=view(wait_s=wait_s)) for wait_s in waits)
    sent = [("a", 0, "standard"), ("b", 0, "bulk"), ("c", 0, "standard"), ("d", 1, "standard")]
    sent.append(("e", 0, "standard"))
    found = waits_of([(id, asked(lane=lane), n) for id, n, lane in sent], fleet)
    assert {one.id: one.left_s for one in found} == {"a": 2, "b": 9, "c": 4, "d": 1, "e": 6}


def test_one_that_has_got_something_gets_more_when_its_view_counts_it():
    fleet = CandidateTable([Candidate(view=view()), Candidate(view=FREE)])
    assert goes_elsewhere(waiting(5.0), fleet, PageIndex())
    fleet.change(1, n_sent=1)
    assert not goes_elsewhere(waiting(5.0), fleet, PageIndex())


def test_the_longest_waits_are_looked_at_and_no_more_than_so_many():
    many = [dataclasses.replace(waiting(float(i % 7)), id=str(i)) for i in range(100)]
    found = longest_waits(many)
    assert [one.left_s for one in found] == [6.0] * 14 + [5.0] * 2
    assert len(found) == MOST_LOOKED
    assert found[0].id == "13", "the smaller id of equal ones"
    assert not longest_waits([waiting(0.0), waiting(-1.0)])


async def test_those_who_wait_go_to_a_replica_that_joins(monkeypatch):
    cancelled, cancel = [], HostClient.cancel

    def noted(self: HostClient, request_id: str, index: int | None = None) -> None:
        cancelled.append(self.name)
        cancel(self, request_id, index)

    monkeypatch.setattr(HostClient, "cancel", noted)
    asked = requests(8, 60)
    whole = await undisturbed(asked)
    async with World(1, max_num_seqs=1) as world:
        fleet, source = world.fleet, world.source
        assert await answers(fleet, asked[:2]) == whole[:2], "it knows how long answers take"
        running = asyncio.ensure_future(answers(fleet, asked))
        await begun(fleet, 1)
        [first] = fleet.members
        before = first.n_open
        await source.add()
        await until(lambda: len(fleet.members) == 2 and fleet.counters["moved"] > 1)
        assert await asyncio.wait_for(running, 30.0) == whole
        second = fleet.members[1]
        assert second.n_requests == fleet.counters["moved"] < before
        assert cancelled == ["r0"] * second.n_requests, "nobody works for them there"
        assert fleet.counters["engine_deaths"] == 0
        await until(lambda: not fleet._streams)
        assert not len(fleet._placement.sent)
        assert not fleet._router.pages._sent._root.below, (
            "what it had at the first one is over there"
        )


async def test_moves_have_a_budget(monkeypatch):
    asked = requests(8, 40)
    async with World(1, max_num_seqs=1) as world:
        fleet = world.fleet
        await answers(fleet, asked[:2])
        monkeypatch.setattr(fleet._placement._rebalances, "_left", 1.0)
        monkeypatch.setattr(fleet._placement._rebalances, "_share", 0.0)
        running = asyncio.ensure_future(answers(fleet, asked))
        await begun(fleet, 1)
        await world.source.add()
        await asyncio.wait_for(running, 30.0)
        assert fleet.counters["moved"] == 1


@pytest.mark.slow
def test_in_the_simulator_a_replica_that_joins_takes_its_part_of_the_queue():
    """Load grows tenfold and each replica takes 20 s to start."""
    calm = {"max_queue_s": 0, "max_waiting": 10_000, "max_num_seqs": 16}
    made = dataclasses.replace(
        setup(options=calm, n_pages=400), replicas=1, max_replicas=8, start_s=20.0
    )
    trace = traffic.generate(traffic.parse(RAMP), 2)
    moves, stays = (FleetSimulation(trace, made, limits_of(made)) for _ in range(2))
    stays._rebalance = lambda now: None  # type: ignore[method-assign]
    ttft = {}
    for name, simulation in (("moves", moves), ("stays", stays)):
        run = simulation.run()
        assert not run.records.open
        assert {d.error for d in run.records.done} == {None}
        ttft[name] = statistics.fmean([d.ttft or 0.0 for d in run.records.done])
    assert moves.n_moved > 10
    assert ttft["moves"] < 0.9 * ttft["stays"]
