"""Roles that follow the load: which replica changes, when none does, and that a steady load ends the changes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import sys
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from jserve.config import EngineConfig
from jserve.engine.view import View
from jserve.errors import ConfigError
from jserve.fleet.candidates import PREFILL, Candidate, CandidateTable
from jserve.fleet.face import FleetEngine
from jserve.fleet.role_control import CHANGE_S, GAIN, LEAST, WINDOW_S, RoleControl, who_changes
from jserve.fleet.roles import AUTO, DECODE, exchanged, parse_roles
from jserve.fleet.start import fleet_engine
from jserve.sim import traffic
from tests.fleet.fakes import ThreadSource
from tests.fleet.test_face import answers, requests, undisturbed, until
from tests.sim.test_sim_roles import LONG, play, with_roles


def fleet_of(*roles: str) -> CandidateTable:
    return CandidateTable(Candidate(view=View(), role=role) for role in roles)


def split(p: int, n: int) -> CandidateTable:
    """``n`` replicas, the first ``p`` of which compute prompts."""
    return fleet_of(*[PREFILL] * p, *[DECODE] * (n - p))


def n_of(role: str, candidates: Iterable[Candidate]) -> int:
    return sum(one.role == role for one in candidates)


def exchange_role(candidates: CandidateTable, number: int) -> str:
    """The role that candidate ``number`` has from now on."""
    role = DECODE if candidates[number].role == PREFILL else PREFILL
    candidates.change(number, role=role)
    return role


def busier(prefill: float, decode: float, p: int, n: int) -> float:
    return max(prefill / p, decode / (n - p))


class World:
    """Replicas that are sent work, once a second; roles change as the control says."""

    def __init__(self, candidates: CandidateTable) -> None:
        self.candidates, self.control = candidates, RoleControl()
        self.now = self.prefill_s = self.decode_s = 0.0
        self.changes: list[tuple[float, int, str]] = []

    def run(self, seconds: float, prefill: float, decode: float) -> None:
        """So many seconds of either kind come each second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.prefill_s += prefill
            self.decode_s += decode
            self.look()

    def look(self) -> None:
        found = self.control.look(self.now, self.prefill_s, self.decode_s, self.candidates)
        if found is not None:
            self.changes.append((self.now, found, exchange_role(self.candidates, found)))


def test_the_kind_that_has_more_to_do_gets_the_replica_with_the_least_rows():
    found = fleet_of(PREFILL, DECODE, DECODE, DECODE)
    for number, n_rows in ((1, 5), (2, 2), (3, 3)):
        found.change(number, view=View(n_rows=n_rows))
    assert who_changes(1.0, 0.5, found) == 2
    found.change(2, n_sent=4)  # of which its view knows nothing
    assert who_changes(1.0, 0.5, found) == 3
    back = fleet_of(PREFILL, PREFILL, PREFILL, DECODE)
    assert who_changes(0.5, 1.0, back) == 0


def test_a_load_that_is_nearly_equal_changes_nothing():
    assert who_changes(1.0, 1.0, split(2, 4)) is None
    assert who_changes(1.0, 0.5, split(2, 4)) is None, "0.5 each; with three it would be the others"
    assert who_changes(LEAST * 0.9, 0.0, split(1, 4)) is None, "a handful of requests"
    assert who_changes(0.0, 0.0, split(1, 4)) is None
    assert who_changes(LEAST * 1.1, 0.0, split(1, 4)) is not None


def test_who_takes_no_requests_neither_counts_nor_changes():
    found = split(1, 4)
    found.change(1, out=True)
    found.change(2, view=View(ready=False))
    assert who_changes(9.0, 0.0, found) is None, "the last one that answers"
    found.change(2, view=View(n_rows=8))
    found.change(3, view=View(n_rows=9))
    assert who_changes(9.0, 0.0, found) == 2, "the other one with less to do takes nothing"


def test_a_kind_that_is_gone_gets_one():
    assert who_changes(0.0, 0.0, split(3, 3)) == 0
    assert who_changes(0.2, 0.1, split(0, 3)) == 0
    assert who_changes(1.0, 1.0, split(1, 1)) is None
    assert who_changes(1.0, 1.0, split(0, 0)) is None


able = st.builds(
    Candidate,
    view=st.builds(View, ready=st.sampled_from([True, True, False]), n_rows=st.integers(0, 9)),
    out=st.sampled_from([False, False, False, True]),
    role=st.sampled_from([PREFILL, DECODE]),
)
loads = st.floats(0.0, 8.0)
phases = st.lists(st.tuples(st.integers(1, 60), loads, loads), min_size=1, max_size=6)


@given(st.lists(able, max_size=9).map(CandidateTable), loads, loads)
def test_both_kinds_keep_one_that_takes_requests(candidates, prefill, decode):
    takes = {i for i, one in enumerate(candidates) if one.view.ready and not one.out}
    had = [n_of(role, [candidates[i] for i in takes]) for role in (PREFILL, DECODE)]
    found = who_changes(prefill, decode, candidates)
    assert found == who_changes(prefill, decode, candidates)
    if found is None:
        return
    assert found in takes
    exchange_role(candidates, found)
    p, n = n_of(PREFILL, [candidates[i] for i in takes]), len(takes)
    assert 1 <= p <= n - 1
    if all(had):
        assert busier(prefill, decode, p, n) <= busier(prefill, decode, had[0], n)


@given(st.integers(2, 12), st.data())
def test_whatever_comes_one_changes_in_ten_seconds_and_each_kind_has_one(n, data):
    p, found = data.draw(st.integers(1, n - 1)), data.draw(phases)
    worlds = [World(split(p, n)) for _ in range(2)]
    for world in worlds:
        for seconds, prefill, decode in found:
            world.run(seconds, prefill, decode)
            assert 1 <= n_of(PREFILL, world.candidates) <= n - 1
    assert worlds[0].changes == worlds[1].changes
    times = [at for at, *_ in worlds[0].changes]
    assert all(after - before >= CHANGE_S for before, after in itertools.pairwise(times))
    assert all(at >= WINDOW_S for at in times)


@given(st.integers(2, 24), st.data(), st.floats(0.0, 8.0), st.floats(0.0, 8.0))
def test_a_steady_load_is_balanced_and_changes_nothing_more(n, data, prefill, decode):
    p = data.draw(st.integers(1, n - 1))
    world = World(split(p, n))
    world.run(WINDOW_S + 1 + n * CHANGE_S, prefill, decode)
    assert len(world.changes) <= n - 2
    assert len({role for *_, role in world.changes}) <= 1, "never there and back"
    now = busier(prefill, decode, n_of(PREFILL, world.candidates), n)
    least = min(busier(prefill, decode, k, n) for k in range(1, n))
    assert now < LEAST * (1 + 1e-6) or least >= GAIN * now * (1 - 1e-6)
    before = len(world.changes)
    world.run(60, prefill, decode)
    assert len(world.changes) == before


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_load_that_wavers_moves_nobody_to_and_fro(n):
    """Around each split's break-even, a tenth up and down, by windows."""
    for p in range(1, n - 1):
        world = World(split(p, n))
        for k in range(20):
            prefill = p / (n - p - 1) * (1.1 if k % 2 else 0.9)
            world.run(WINDOW_S, prefill, 1.0)
        assert len(world.changes) <= 1


def test_samples_that_are_close_are_left_out():
    world = World(split(1, 4))
    for _ in range(1000):
        world.now += 0.05
        world.prefill_s += 0.05
        world.look()
    assert len(world.control._totals) <= WINDOW_S + 2
    assert world.control.prefill == pytest.approx(1.0, rel=0.05)


def test_auto_begins_with_a_quarter():
    assert [parse_roles(AUTO, n)[PREFILL] for n in (2, 3, 4, 7, 8, 64)] == [1, 1, 1, 1, 2, 16]
    assert sum(parse_roles(AUTO, 7).values()) == 7
    assert exchanged(parse_roles(AUTO, 4), PREFILL) == {PREFILL: 2, DECODE: 2}
    with pytest.raises(ConfigError) as found:
        parse_roles(AUTO, 1)
    assert found.value.field == "roles"


@pytest.mark.parametrize(
    ("text", "follows"), [(AUTO, True), ("prefill=1,decode=3", False), ("", False)]
)
def test_auto_is_wired(monkeypatch, text, follows):
    source = SimpleNamespace(RayReplicas=lambda config, build: SimpleNamespace(n=4, scales=False))
    monkeypatch.setitem(sys.modules, "jserve.fleet.on_ray", source)
    fleet = fleet_engine(EngineConfig.of(replicas=4, roles=text), "")
    assert (fleet._role_control is not None) == follows
    assert fleet._roles == parse_roles(text, 4)


async def test_a_front_gives_roles_as_the_load_asks(tmp_path, caplog):
    """Prompts come, then answers; clients notice nothing, and who joins gets the role that lacks now."""
    caplog.set_level(logging.INFO, "jserve.fleet.face")
    source = ThreadSource(4, disk_dir=str(tmp_path), host_memory_gb=1.0)
    control = RoleControl(window_s=1.0, change_s=1.0)
    fleet = FleetEngine(source, roles=parse_roles(AUTO, 4), role_control=control)
    await fleet.start()

    def n_prefill() -> int:
        return sum(one.role == PREFILL for one in fleet.replicas())

    try:
        asked = requests(4)
        whole = await undisturbed(asked)
        assert n_prefill() == 1
        sending = asyncio.ensure_future(_ask_again(fleet, asked, whole))
        fleet._router.prefill_s += 100.0
        await until(lambda: n_prefill() == 2)
        assert "has role prefill from now on" in caplog.text
        fleet._router.prefill_s += 500.0
        await until(lambda: n_prefill() == 3)
        candidates = fleet._router.candidates
        assert [candidates[one.number].role for one in fleet.members] == [
            one.role for one in fleet.members
        ]
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert sending.cancelled()
        helper = next(one for one in fleet.members if one.role == PREFILL)
        fleet._role_control = None  # so that only the replica that joins gets a role
        source.kill(helper.name)
        await until(lambda: len(fleet.members) == 3)
        await source.add()
        await until(lambda: len(fleet.members) == 4)
        assert n_prefill() == 3
    finally:
        await fleet.close()


async def _ask_again(fleet: FleetEngine, asked: list, whole: list) -> None:
    while True:
        assert await answers(fleet, asked) == whole


@pytest.mark.slow
def test_the_simulator_changes_roles_by_the_same_function():
    """Long prompts first, then long answers."""
    answering = ";start=60,prompt=24,output=200,context=400,rate=4,n=240"
    trace = traffic.generate(
        traffic.parse(LONG.replace("rate=1.5,n=60", "rate=3,n=150") + answering), 1
    )
    made = dataclasses.replace(with_roles({PREFILL: 1, DECODE: 3}), auto_roles=True)
    run, again = play(trace, made), play(trace, made)
    assert run.role_changes
    assert run.role_changes == again.role_changes
    assert run.role_changes[0][2] == PREFILL
    assert run.role_changes[-1][2] == DECODE
    assert len(run.records.done) == len(trace)
    assert play(trace, dataclasses.replace(made, auto_roles=False)).role_changes is None
