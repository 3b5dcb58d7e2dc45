"""Drills on Ray Serve with a fake device: a replica is killed, stopped, slowed down, cut off, scaled and replaced
while clients wait, and every one of them gets the answer of an undisturbed engine.

One cluster for all; a replica is a process of Ray's, which the drills kill by its number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import random
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray Serve is not installed: pip install 'jserve[ray]'", allow_module_level=True)

from jserve.config import EngineConfig
from jserve.engine.wire import Control
from jserve.fleet.autoscale import Autoscaler
from jserve.fleet.face import FleetEngine
from jserve.fleet.on_ray import RayReplicas
from jserve.fleet.router import POLICIES
from jserve.types import Output, Request
from tests.engine.test_resume import any_request
from tests.fleet.fakes import OPTIONS
from tests.fleet.test_face import World, all_told, answers, begun, requests, undisturbed, until
from tests.fleet.test_fleet_kv_events import at, free_ports, replayed

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
ROOT = Path(__file__).parents[2]
N = 3


@pytest.fixture(scope="module")
def orders(tmp_path_factory) -> Path:
    """The directory of orders of ``fakes.build``."""
    return tmp_path_factory.mktemp("orders")


class Drill:
    def __init__(self, orders: Path) -> None:
        self.events, replay = free_ports()
        self.config = EngineConfig.of(
            **OPTIONS, replicas=N, model=str(orders), kv_events=self.events, kv_events_replay=replay
        )
        self.orders = orders
        self.source = RayReplicas(self.config, "tests.fleet.fakes:build", app="drills")
        self.fleet = FleetEngine(self.source)

    def pid(self, member: Any) -> int:
        return member.info["pid"]

    def busiest(self) -> Any:
        return max(self.fleet.members, key=lambda one: one.n_open)

    async def whole(self, n: int = N) -> None:
        """Wait until ``n`` replicas take part and are trusted."""
        await until(lambda: len(self.fleet.members) == n, 60.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(ray_cluster, orders):
    made = Drill(orders)
    began = time.monotonic()
    try:
        await made.fleet.start()
        print(f"the cluster took {time.monotonic() - began:.1f} s")
        yield made
    finally:
        await made.fleet.close()


async def disturbed(drill: Drill, disturb, n: int = 9, max_tokens: int = 120) -> float:
    """All answers while ``disturb`` is done to the busiest replica; the longest that a client then waited
    for a token."""
    asked = requests(n, max_tokens)
    whole = await undisturbed(asked)
    running = asyncio.ensure_future(answers(drill.fleet, asked))
    await begun(drill.fleet, n)
    disturb(drill.busiest())
    gap = await _longest_gap(drill.fleet, running)
    found = await asyncio.wait_for(running, 60.0)
    assert [one[3] for one in found] == [[]] * n
    assert found == whole
    await until(lambda: not drill.fleet._streams)
    return gap


async def _longest_gap(fleet: FleetEngine, running: asyncio.Future) -> float:
    """Over all requests, until they are over."""
    said: dict[str, tuple[int, float]] = {}
    longest = 0.0
    while not running.done():
        now = time.monotonic()
        for id, stream in list(fleet._streams.items()):
            n = sum(map(len, stream.said))
            before, at = said.get(id, (-1, now))
            if n != before:
                longest = max(longest, now - at)
                said[id] = n, now
        await asyncio.sleep(0.002)
    return longest


async def test_d1_a_replica_is_killed_while_it_answers(drill):
    deaths = drill.fleet.counters["engine_deaths"]
    gap = await disturbed(drill, lambda one: os.kill(drill.pid(one), signal.SIGKILL))
    print(f"D1: the longest gap was {1e3 * gap:.0f} ms")
    assert drill.fleet.counters["engine_deaths"] == deaths + 1
    assert gap < 2.0
    await drill.whole()  # Serve started another one


async def test_who_takes_a_place_publishes_there(drill):
    """Replicas are processes that choose their ports at the same time, and one by one later."""
    addresses = {one.kv_events for one in drill.fleet.replicas()}
    assert addresses == {at(drill.events, rank) for rank in range(N)}
    assert await answers(drill.fleet, requests(9)) == await undisturbed(requests(9))
    gone = drill.fleet.replicas()[1]
    os.kill(drill.pid(drill.fleet.members[1]), signal.SIGKILL)
    await until(lambda: gone.name not in [one.name for one in drill.fleet.replicas()], 10.0)
    await drill.whole()
    assert {one.kv_events for one in drill.fleet.replicas()} == addresses
    rank = int(gone.kv_events.rpartition(":")[2]) - int(drill.events.rpartition(":")[2])
    found = replayed(at(drill.config.cache.kv_events_replay, rank))
    assert (found[0], {one[2] for one in found}) == ((0, ["AllBlocksCleared"], rank), {rank})


async def test_a_replica_is_as_nice_as_its_server(drill):
    """Ray by itself would have it wait for all others on a busy machine."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, drill.pid(one)) for one in drill.fleet.members} == {own}


async def test_d1_whatever_was_asked_for(drill):
    """Requests with any fields, while the busiest replica is killed."""
    rng = random.Random(7)
    asked = [any_request(rng, f"any-{i}") for i in range(24)]
    async with World(1) as alone:
        whole = await all_told(alone.fleet, asked)
    running = asyncio.ensure_future(all_told(drill.fleet, asked))
    resumed = drill.fleet.counters["resumed"]
    await begun(drill.fleet, 4)
    os.kill(drill.pid(drill.busiest()), signal.SIGKILL)
    assert await asyncio.wait_for(running, 60.0) == whole
    assert drill.fleet.counters["resumed"] > resumed
    await drill.whole()


async def test_d2_a_replica_is_stopped_and_goes_on_later(drill):
    stopped: list[Any] = []

    def stop(one: Any) -> None:
        stopped.append(one)
        os.kill(drill.pid(one), signal.SIGSTOP)

    try:
        gap = await disturbed(drill, stop)
    finally:
        for one in stopped:
            os.kill(drill.pid(one), signal.SIGCONT)
    print(f"D2: the longest gap was {1e3 * gap:.0f} ms")
    assert gap < 2.5
    assert drill.fleet.counters["silent"] >= 1
    await until(lambda: not any(one.silent for one in drill.fleet.members), 30.0)
    asked = requests(9)
    assert await answers(drill.fleet, asked) == await undisturbed(
        asked
    )  # what it says late reaches nobody
    await drill.whole()


async def test_d3_a_replica_becomes_slow(drill, monkeypatch):
    """Four times slower: it is put out, what it had goes on elsewhere, and it comes back. Requests go to each in
    turn, so that it keeps getting some whatever its price becomes."""
    fleet = drill.fleet
    monkeypatch.setattr(fleet._router, "_policy", POLICIES["round_robin"])
    asked = requests(6, 60)
    whole = await undisturbed(asked)
    for _ in range(8):  # what is usual is learned
        assert await answers(fleet, asked) == whole
    slow = fleet.members[0]
    order = drill.orders / f"slow.{drill.pid(slow)}"
    order.write_text("4")
    until_s = time.monotonic() + 60.0
    while not fleet.suspicion.records[slow.name].out:
        assert time.monotonic() < until_s, fleet.suspicion.records
        assert await answers(fleet, asked) == whole
    assert fleet.counters["ejected"] == 1
    before = slow.n_requests
    assert await answers(fleet, asked) == whole
    assert slow.n_requests == before, "it is out and got one"
    order.unlink()
    while fleet.suspicion.records[slow.name].out:
        assert time.monotonic() < until_s + 60.0
        assert await answers(fleet, asked) == whole
    assert slow.n_requests > before


async def test_d4_a_stream_breaks_and_the_replica_lives(drill):
    broken: list[Any] = []

    def cut(one: Any) -> None:
        broken.append(one)
        one.client.kill()

    gap = await disturbed(drill, cut)
    print(f"D4: the longest gap was {1e3 * gap:.0f} ms")
    await drill.whole()
    assert drill.pid(broken[0]) in [drill.pid(one) for one in drill.fleet.members]


async def test_d8_the_controller_of_serve_is_killed(drill):
    """It places and watches; what runs goes on without it, and Ray starts another one."""
    import ray

    resumed: list[int] = []

    def kill(one: Any) -> None:
        resumed.append(drill.fleet.counters["resumed"])  # before, a request that waits may be moved
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        ray.kill(controller, no_restart=False)

    await disturbed(drill, kill)
    assert resumed == [drill.fleet.counters["resumed"]]
    os.kill(drill.pid(drill.fleet.members[0]), signal.SIGKILL)
    await until(lambda: len(drill.fleet.members) == N - 1, 30.0)
    await drill.whole()  # the new one knows what the old one was told


async def under_load(drill: Drill, change, n: int = 6) -> int:
    """Answers all the while ``change`` takes place; how many rounds of them."""
    asked = requests(n, 60)
    whole = await undisturbed(asked)
    changing, rounds = asyncio.ensure_future(change), 0
    while not changing.done():
        assert await asyncio.wait_for(answers(drill.fleet, asked), 60.0) == whole
        rounds += 1
    await changing
    return rounds


async def test_d9_replicas_are_replaced_one_after_the_other(drill):
    """Other options: Serve stops one replica after the other. No request is lost or told anything else."""
    before = {drill.pid(one) for one in drill.fleet.members}
    scheduler = dataclasses.replace(drill.config.scheduler, max_waiting=4000)
    config = dataclasses.replace(drill.config, scheduler=scheduler)
    assert await under_load(drill, drill.source.deploy(config)) > 2
    await until(lambda: len(drill.fleet.members) == N, 60.0)
    assert not before & {drill.pid(one) for one in drill.fleet.members}
    drill.config = config


async def test_d9_replicas_get_other_weights_one_after_the_other(drill, tmp_path):
    """In place, while clients wait; then one is killed, and Serve's next one gets them before its first request."""
    models = [tmp_path / name for name in ("one", "two")]
    for i, model in enumerate(models):
        model.mkdir()
        (model / "weights").write_text(str(i + 1))
    (models[1] / "seconds").write_text("0.5")
    config = EngineConfig.of(**OPTIONS, replicas=2, model=str(models[0]))
    source = RayReplicas(config, "tests.fleet.fakes:weighed", app="weighed")
    fleet = FleetEngine(source, model=str(models[0]))

    async def order(**fields: Any) -> dict[str, Any]:
        return await fleet.control(Control(id=uuid.uuid4().hex, **fields))

    async def drawn_by() -> set[str]:
        asked = [dataclasses.replace(one, id=uuid.uuid4().hex) for one in requests(6)]
        outputs = [[out async for out in fleet.generate(one)] for one in asked]
        assert not [out.error for all_of_it in outputs for out in all_of_it if out.error]
        return {out.weights for all_of_it in outputs for out in all_of_it if out.token_ids}

    try:
        await fleet.start()
        assert await drawn_by() == {"0"}
        rolling = asyncio.ensure_future(order(action="update_weights", source=str(models[1])))
        while not rolling.done():
            assert await drawn_by() <= {"0", "1"}
        assert set((await rolling)["replicas"].values()) == {"1"}
        assert await drawn_by() == {"1"}
        os.kill(fleet.members[0].info["pid"], signal.SIGKILL)
        await until(lambda: len(fleet.members) == 1, 30.0)
        assert await drawn_by() == {"1"}
        await until(lambda: len(fleet.members) == 2, 60.0)
        assert await drawn_by() == {"1"}
        await until(lambda: {one.weights for one in fleet.members} == {"w2"}, 30.0)
        facts = await order(action="rollback_weights")
        assert set(facts["replicas"].values()) == await drawn_by() == {"0"}
    finally:
        await fleet.close()


async def test_a_replica_that_computes_something_else_is_named(ray_cluster, tmp_path):
    """Across processes: one of three, and every answer is computed once more."""
    (tmp_path / "weights").write_text("1")
    config = EngineConfig.of(**OPTIONS, replicas=N, model=str(tmp_path))
    source = RayReplicas(config, "tests.fleet.fakes:weighed", app="audited")
    fleet = FleetEngine(source, model=str(tmp_path), audit_share=1.0)
    try:
        await fleet.start()
        await answers(fleet, requests(6))
        await until(lambda: fleet.counters["audited"] == 6)
        assert fleet.counters["audit_mismatches"] == 0
        broken = fleet.members[1]
        (tmp_path / f"faulty.{broken.info['pid']}").touch()
        for _ in range(3):
            await answers(fleet, requests(6))
            await until(lambda: not len(fleet._placement.audits))
        odd = {one.name: one.odd for one in fleet.replicas()}
        assert odd.pop(broken.name) > 0
        assert set(odd.values()) == {0}
    finally:
        await fleet.close()


async def test_d10_one_three_one_replicas(drill):
    async def scaled(n: int) -> None:
        fleet = dataclasses.replace(drill.config.fleet, replicas=n)
        await drill.source.deploy(dataclasses.replace(drill.config, fleet=fleet))
        await until(lambda: len(drill.fleet.members) == n, 60.0)

    async def one_three_one() -> None:
        for n in (1, N, 1, N):
            await scaled(n)

    assert await under_load(drill, one_three_one()) > 2
    assert drill.fleet.counters["moved"] > 0


SECOND_FRONT = """
import asyncio, sys
from jserve.config import EngineConfig
from jserve.fleet.face import FleetEngine
from jserve.fleet.on_ray import RayReplicas
from tests.fleet.fakes import OPTIONS
from tests.fleet.test_face import answers, requests

async def main(address, name, n_tokens):
    config = EngineConfig.of(**OPTIONS, replicas=1, ray_address=address, ray_application=name)
    fleet = FleetEngine(RayReplicas(config, "nobody:builds"))
    await fleet.start()
    print("started", flush=True)
    print(await answers(fleet, requests(6, int(n_tokens))), flush=True)
    await fleet.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def second_front(n_tokens: int) -> asyncio.subprocess.Process:
    """A front in a process of its own, which uses the replicas of the drills and has begun to ask."""
    import ray  # pyright: ignore[reportMissingImports]

    address = ray.get_runtime_context().gcs_address
    argv = ["-c", SECOND_FRONT, address, "drills", str(n_tokens)]
    made = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert made.stdout is not None
    assert (await asyncio.wait_for(made.stdout.readline(), 60.0)) == b"started\n"
    return made


async def test_a_second_front_uses_the_same_replicas_and_leaves_them(drill):
    whole = await undisturbed(requests(6, 60))
    other = await second_front(60)
    asked = requests(9, 60)
    assert await answers(drill.fleet, asked) == await undisturbed(asked)
    said, _ = await asyncio.wait_for(other.communicate(), 60.0)
    assert said.decode().strip() == str(whole)
    assert other.returncode == 0
    assert len(drill.fleet.members) == N


async def test_d12_a_front_is_killed(drill):
    """Nobody else's requests are told of it; its own end in the replicas (test_host has one that falls silent)."""
    other = await second_front(460)
    running = lambda: sum(one.stats.running for one in drill.fleet.members)  # noqa: E731
    await until(lambda: running() >= 6, 20.0)
    other.kill()
    await other.wait()
    asked = requests(9, 120)
    assert await answers(drill.fleet, asked) == await undisturbed(asked)
    await until(lambda: running() == 0, 20.0)


async def test_the_number_follows_the_load(ray_cluster, orders):
    """One replica, more than it can do, three, nothing to do, one: Serve starts them, the front chooses who ends."""
    config = EngineConfig.of(**OPTIONS, replicas=1, max_replicas=N, model=str(orders))
    limits = {"window_s": 3.0, "hold_s": 10.0}
    source = RayReplicas(config, "tests.fleet.fakes:build", app="scaled", autoscaler=limits)
    fleet = FleetEngine(source, autoscaler=Autoscaler(**limits))
    try:
        await fleet.start()
        first = fleet.members[0].name
        asked = requests(60, 60)
        whole = await undisturbed(asked)
        began, seen = time.monotonic(), set[str]()

        async def grown() -> None:
            """On a busy machine the answers end so slowly that one is stopped again before they are over."""
            await until(lambda: len(fleet.members) == N, 120.0)
            seen.update(one.name for one in fleet.members)

        growing = asyncio.ensure_future(grown())
        while not growing.done():
            for one in fleet.members:  # a device that takes longer than this machine's cores
                (orders / f"slow.{one.info['pid']}").write_text("6")
            assert await answers(fleet, asked) == whole
        await growing
        print(f"three replicas after {time.monotonic() - began:.1f} s")
        running = asyncio.ensure_future(answers(fleet, asked[:3]))
        fleet._scale_down.autoscaler.saved_s |= dict.fromkeys(seen - {first}, 9.0)
        assert await running == whole[:3]
        began = time.monotonic()
        while len(fleet.members) > 1 or len(fleet._listed) > 1:
            assert time.monotonic() - began < 120.0, "nobody was stopped"
            assert await answers(fleet, asked[:1]) == whole[:1]
            seen |= {one.name for one in fleet.members}
        print(f"one replica after {time.monotonic() - began:.1f} s")
        assert first not in {one.name for one in fleet.members}, "its cache had saved least"
        assert len(seen) == N, "nobody was started in place of one that ended"
        assert fleet.counters["engine_deaths"] == 0
    finally:
        await fleet.close()


async def test_d11_ten_times_what_fits(drill):
    """Every request has its one end; those that run are right."""
    asked = requests(110 * N, 30)
    found = await asyncio.wait_for(answers(drill.fleet, asked), 120.0)
    whole = await undisturbed(asked)
    assert [bool(one[3]) for one in found] == [False] * len(asked)
    assert found == whole
    shares = [one.n_requests for one in drill.fleet.members]
    assert min(shares) > 0


async def test_d11_more_than_may_wait(ray_cluster):
    """Replicas refuse: every request has one end, its answer or when to ask again."""
    config = EngineConfig.of(**OPTIONS, replicas=2, max_waiting=20)
    fleet = FleetEngine(RayReplicas(config, "tests.fleet.fakes:build", app="crowded"))
    asked = requests(200)
    whole = await undisturbed(asked)
    try:
        await fleet.start()
        found = await asyncio.wait_for(asyncio.gather(*(ends(fleet, one) for one in asked)), 120.0)
        n_refused = 0
        for one, alone, (answer, last) in zip(asked, whole, found, strict=True):
            assert [out.index for out in last] == [*range(one.params.n)], "one end of each choice"
            if last[0].error is None:
                assert answer == alone[0]
                continue
            n_refused += 1
            assert {out.error_code for out in last} == {"overloaded"}
            assert all(1.0 <= (out.retry_after or 0.0) <= 60.0 for out in last)
            assert not any(answer)
        print(f"D11: refused {n_refused}, asked another {fleet.counters['moved']}")
        assert 0 < n_refused < len(asked)
        assert fleet.counters["moved"] > 0
        assert not fleet._placement._refusals
    finally:
        await fleet.close()


async def ends(fleet: FleetEngine, request: Request) -> tuple[list[list[int]], list[Output]]:
    """(ids by choice, last output of each choice) as a client is told."""
    request = dataclasses.replace(request, id=uuid.uuid4().hex)
    outputs = [out async for out in fleet.generate(request)]
    n = range(request.params.n)
    ids = [[t for out in outputs if out.index == i for t in out.token_ids] for i in n]
    last = sorted((out for out in outputs if out.finish is not None), key=lambda out: out.index)
    return ids, last


async def test_a_replica_of_the_shipped_model_is_killed(drill):
    """The real step, in float32: what is drawn after a prefill of prompt and answer is what was drawn before."""
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 256}
    small |= {"structured_outputs": False, "prompt_logprobs": False, "dtype": "float32"}
    source = RayReplicas(EngineConfig.of(**small, replicas=2), "jserve.build:engine", app="shipped")
    fleet = FleetEngine(source)
    try:
        await fleet.start()
        asked = requests(3, 150)
        whole = await answers(fleet, asked)
        assert [one[3] for one in whole] == [[]] * len(asked)
        running = asyncio.ensure_future(answers(fleet, asked))
        await begun(fleet, 1)
        os.kill(max(fleet.members, key=lambda one: one.n_open).info["pid"], signal.SIGKILL)
        found = await asyncio.wait_for(running, 120.0)
        assert fleet.counters["resumed"] > 0
        assert [one[:2] for one in found] == [one[:2] for one in whole]
        for now, before in zip(found, whole, strict=True):
            assert [entry.token for entry in now[2]] == [entry.token for entry in before[2]]
            logprobs = [entry.logprob for entry in before[2]]
            assert [entry.logprob for entry in now[2]] == pytest.approx(logprobs, abs=1e-4)
    finally:
        await fleet.close()
