"""Requests over several replicas: whatever becomes of a replica, every client gets the answer of an undisturbed one."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

from jserve.build import serving_engine
from jserve.config import EngineConfig
from jserve.engine.wire import Control, HandleCommand, Outputs
from jserve.errors import BadRequest, CacheNotFound, ConfigError, EngineDead, JserveError
from jserve.fleet.asking import front_kv_name
from jserve.fleet.face import FleetEngine
from jserve.fleet.link import Endpoint, FrontClient
from jserve.fleet.member import OVERDUE_S, Member
from jserve.fleet.router import POLICIES
from jserve.fleet.suspicion import REST_S
from jserve.llm import LLM
from jserve.outputs import PartialOutput, RequestOutput
from jserve.sampling import SamplingParams
from jserve.types import Finish, Lane, Output, Request
from tests.engine.test_resume import any_request
from tests.fleet import fakes
from tests.fleet.fakes import ThreadSource
from tests.grammar import kit


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


class World:
    def __init__(self, n: int = 2, **options) -> None:
        self.source = ThreadSource(n, **options)
        self.fleet = FleetEngine(self.source)

    async def __aenter__(self):
        await self.fleet.start()
        return self

    async def __aexit__(self, *_):
        await self.fleet.close()


def requests(n: int = 6, max_tokens: int = 40) -> list[Request]:
    return [
        Request(
            id=f"q{i}",
            prompt_ids=tuple((7 * i + j) % 250 for j in range(40)),
            params=SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0,
                seed=i,
                presence_penalty=0.5 * (i % 2),
                n=1 + i % 2,
                logprobs=2 if i % 3 == 0 else None,
            ),
        )
        for i in range(n)
    ]


async def answer(fleet: FleetEngine, request: Request) -> tuple:
    """(ids by choice, ends, log-probabilities, attempts, error) as the client is told."""
    request = dataclasses.replace(request, id=uuid.uuid4().hex)  # one id is never asked twice
    outputs = [out async for out in fleet.generate(request)]
    ids = [
        [t for o in outputs if o.index == i for t in o.token_ids] for i in range(request.params.n)
    ]
    ends = sorted((o.index, o.finish) for o in outputs if o.finish is not None)
    logprobs = [entry for o in _by_choice(outputs) for entry in o.logprobs or ()]
    errors = [o.error for o in outputs if o.error]
    return ids, ends, logprobs, errors


def _by_choice(outputs: list[Output]) -> list[Output]:
    return sorted(outputs, key=lambda o: o.index)


async def answers(fleet: FleetEngine, asked: list[Request]) -> list[tuple]:
    return await asyncio.gather(*(answer(fleet, one) for one in asked))


async def undisturbed(asked: list[Request]) -> list[tuple]:
    async with World(1) as world:
        return await answers(world.fleet, asked)


async def told(fleet: FleetEngine, request: Request) -> RequestOutput:
    """All that a client makes of its answer, text and stop strings included; an error is an end."""
    job = PartialOutput(request, None, kit.tokenizer())
    async for out in fleet.generate(request):
        try:
            if job.take(out) is not None:
                fleet.abort(request.id, out.index)
        except JserveError as error:
            job.output.outputs[out.index].finish_reason = f"{error.code}: {error.message}"
    return dataclasses.replace(job.output, finished=True, num_cached_tokens=0, metrics=None)  # type: ignore[arg-type]


async def all_told(fleet: FleetEngine, asked: list[Request]) -> list[RequestOutput]:
    return await asyncio.gather(*(told(fleet, one) for one in asked))


async def until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.005)


async def begun(fleet: FleetEngine, n: int) -> None:
    """Wait until ``n`` requests were told something."""
    await until(lambda: sum(any(s.said) for s in fleet._streams.values()) >= n)


async def test_whatever_becomes_of_replicas_every_answer_is_the_undisturbed_one():
    """Lost, stopped for good, its stream broken, silent for a while: the same world suffers all of it in turn."""
    asked = requests()
    whole = await undisturbed(asked)
    async with World(3) as world:
        fleet, source = world.fleet, world.source

        async def play(disturb) -> None:
            running = asyncio.ensure_future(answers(fleet, asked))
            await begun(fleet, len(asked))
            busy = max(fleet.members, key=lambda one: one.n_open)
            assert busy.n_open
            done = disturb(busy)
            if done is not None:
                await done
            assert await asyncio.wait_for(running, 20.0) == whole
            await until(lambda: not fleet._streams)

        assert await answers(fleet, asked) == whole
        await play(lambda busy: source.kill(busy.name))
        assert fleet.counters["engine_deaths"] == 1
        await source.add()
        await until(lambda: len(fleet.members) == 3)
        await play(lambda busy: source.remove(busy.name))
        await play(lambda busy: source.clients[busy.name].cut())
        await until(lambda: len(fleet.members) == 2)  # it lives, so it is connected to again
        resumed = fleet.counters["resumed"]
        held = []
        await play(lambda busy: (held.append(busy.name), source.hold(busy.name, True))[1])
        assert fleet.counters["silent"] >= 1
        assert fleet.counters["resumed"] > resumed
        dropped = fleet.counters["dropped_outputs"]
        source.hold(held[0], False)
        await until(lambda: not any(one.silent for one in fleet.members))
        assert await answers(fleet, asked) == whole  # what it says of before is dropped
        assert fleet.counters["dropped_outputs"] > dropped
        for host in source.hosts.values():
            (front,) = host._fronts.values()
            await until(lambda front=front: not front.requests)


async def test_what_another_replica_says_of_a_request_is_dropped():
    (asked,) = requests(1, 60)
    whole = await undisturbed([asked])
    async with World(2) as world:
        fleet = world.fleet
        running = asyncio.ensure_future(answers(fleet, [asked]))
        await begun(fleet, 1)
        (other,) = (one for one in fleet.members if not one.n_open)
        (id,) = fleet._streams
        late = Output(request_id=id, index=0, token_ids=(1, 2), finish=Finish.STOP)
        fleet.received(other, Outputs(step=1, outputs=[late]))
        assert fleet.counters["dropped_outputs"] == 1
        assert await running == whole


async def test_a_replica_that_cannot_be_connected_to_again_is_lost_once(monkeypatch):
    """Serve has not yet heard of its end: the front tries again and again."""
    tries: list[str] = []

    async def endpoint() -> Endpoint:
        tries.append("")
        raise ConnectionRefusedError

    async with World(2) as world:
        fleet, source = world.fleet, world.source
        name = fleet.members[0].name
        with monkeypatch.context() as patch:
            patch.setattr(source, "client", lambda name: FrontClient(endpoint))
            source.clients[name].cut()
            await until(lambda: len(tries) > 2)
        assert fleet.counters["engine_deaths"] == 1
        await until(lambda: len(fleet.members) == 2)


async def test_what_ends_leaves_a_place_at_its_replica():
    async with World(2) as world:
        fleet, ended = world.fleet, [0, 0]
        one = fleet.members[1]
        outputs = [
            Output(request_id="gone", index=0, token_ids=(1,), finish=Finish.STOP),
            Output(request_id="gone too", index=0, token_ids=(1,)),
        ]
        fleet.received(one, Outputs(step=1, outputs=outputs))
        ended[one.number] = 1
        assert [each.n_ended for each in fleet._router.candidates] == ended


async def test_with_no_replica_left_requests_wait_for_the_next():
    asked = requests(3)
    whole = await undisturbed(asked)
    async with World(1) as world:
        running = asyncio.ensure_future(answers(world.fleet, asked))
        await begun(world.fleet, 3)
        world.source.kill("r0")
        await until(lambda: not world.fleet.ready)
        with pytest.raises(EngineDead):
            await answer(world.fleet, requests(4)[3])
        await world.source.add()
        assert await asyncio.wait_for(running, 10.0) == whole


@pytest.mark.parametrize("ago_s", [None, 0.2])
async def test_a_deadline_holds_wherever_a_request_goes_on(ago_s):
    """Its replica is killed, and the next one too: the time is that since it arrived."""
    async with World(3) as world:
        fleet, source = world.fleet, world.source
        began = time.monotonic()
        (asked,) = requests(1, 460)
        arrival = 0.0 if ago_s is None else began - ago_s
        asked = dataclasses.replace(asked, deadline_ms=1400.0, arrival=arrival)
        running = asyncio.ensure_future(told(fleet, asked))
        for _ in range(2):
            await asyncio.sleep(0.4)
            source.kill(next(one.name for one in fleet.members if one.n_open))
        output = await asyncio.wait_for(running, 5.0)
        assert output.outputs[0].finish_reason.startswith("deadline_exceeded")
        took = time.monotonic() - began + (ago_s or 0.0)
        assert 1.35 < took < 1.75, "begun anew it would be 2.2"
        assert fleet.counters["resumed"] == 2


async def test_one_that_is_moved_again_and_again_is_not_blamed():
    """Scale-down after scale-down while a request waits in the queue: nothing speaks against it."""
    async with World(3) as world:
        fleet, source = world.fleet, world.source
        (asked,) = requests(1, max_tokens=5)
        for one in fleet.members:
            source.hold(one.name, True)
        running = asyncio.ensure_future(answer(fleet, asked))
        await until(lambda: any(one.n_open for one in fleet.members))
        for _ in range(2):
            busy = next(one for one in fleet.members if one.n_open)
            source.hosts.pop(busy.name)
            source._on_change(source.hosts)
            await until(lambda: any(one.n_open for one in fleet.members))
        source.hold(fleet.members[0].name, False)
        ids, ends, _, errors = await asyncio.wait_for(running, 10.0)
        assert (len(ids[0]), ends, errors) == (5, [(0, Finish.LENGTH)], [])


async def test_a_cache_handle_is_where_it_was_made():
    async with World(2) as world:
        fleet = world.fleet
        made = Request(
            id="make",
            prompt_ids=tuple(range(1, 60)),
            params=SamplingParams(max_tokens=0),
            cache="doc",
        )
        await fleet.create(made, 60.0)
        (info,) = await fleet.handles(HandleCommand(id="1", action="find", name="doc"))
        assert info.n_tokens == 59
        assert len(await fleet.handles(HandleCommand(id="2", action="find"))) == 1
        use = Request(id="use", prompt_ids=(1, 2), params=SamplingParams(max_tokens=3), cache="doc")
        outputs = [out async for out in fleet.generate(use)]
        assert outputs[0].n_cached == 48
        await fleet.control(Control(id="3", action="reset_prefix_cache"))
        with pytest.raises(BadRequest, match="of one engine"):
            await fleet.control(Control(id="6", action="sleep"))
        await fleet.handles(HandleCommand(id="4", action="drop", name="doc"))
        with pytest.raises(CacheNotFound):
            await fleet.handles(HandleCommand(id="5", action="find", name="doc"))


async def test_a_prefix_goes_to_where_it_is():
    async with World(2) as world:
        fleet = world.fleet
        stem = tuple(range(100, 180))
        found = []
        for i in range(6):
            asked = Request(
                id=f"p{i}", prompt_ids=(*stem, i, i), params=SamplingParams(max_tokens=2)
            )
            outputs = [out async for out in fleet.generate(asked)]
            found.append(outputs[0].n_cached)
            await asyncio.sleep(0.06)
        assert found == [0, 80, 80, 80, 80, 80]
        assert sorted(one.n_requests for one in fleet.members) == [0, 6]


async def test_d7_a_popular_prefix_is_evicted_everywhere_at_once():
    """Each replica computes it once more for all who ask at once, and nobody is told anything else."""
    prefix = tuple(7 * j % 250 for j in range(160))
    asked = [
        dataclasses.replace(one, prompt_ids=(*prefix, *one.prompt_ids[:4]))
        for one in requests(24, 10)
    ]
    whole = await undisturbed(asked)
    async with World(3) as world:
        fleet = world.fleet

        def computed() -> float:
            return sum(one.stats.values["prefill_tokens_total"] for one in fleet.members)

        assert await answers(fleet, asked) == whole
        await until(lambda: all(one.stats.values.get("pages_cached") for one in fleet.members))
        await fleet.control(Control(id="evict", action="reset_prefix_cache"))
        await until(lambda: not len(fleet._router.pages))
        before = computed()
        assert await answers(fleet, asked) == whole
        await until(lambda: not any(one.stats.running for one in fleet.members))
        most = (
            3 * len(prefix) + len(asked) * 36
        )  # a choice has a page and what follows the prefix for itself
        assert before < computed() <= before + most
        assert len(fleet._router.pages) > 0, "it is known again"


async def test_pages_of_long_texts_are_known_by_the_names_that_replicas_give(monkeypatch):
    limits = dataclasses.replace(fakes.LIMITS, short_context=64)
    monkeypatch.setattr(fakes, "LIMITS", limits)
    (long,), (short,) = requests(1), requests(1, 20)
    async with World(2) as world:
        fleet, seen = world.fleet, []
        choose = fleet._router.choose
        monkeypatch.setattr(
            fleet._router, "choose", lambda asked: (seen.append(asked), choose(asked))[1]
        )
        await answers(fleet, [long])
        await until(lambda: len(fleet._router.pages) >= 2)
        assert max(fleet._router.pages.known(seen[0].pages, 2)) == 2
        await answers(fleet, [short])
        assert seen[1].pages != seen[0].pages, "the same prompt, which has other KV"


async def test_pages_of_steered_prompts_are_found_where_they_are_and_nowhere_else(monkeypatch):
    """What a step feature makes of a prompt is other KV: only the engine can name it as it does."""
    kv_names = {"steer": lambda asked, n: f"{asked}"}
    features = fakes.LIMITS.features | {"steer": lambda asked: None}
    limits = dataclasses.replace(fakes.LIMITS, features=features, kv_names=kv_names)
    monkeypatch.setattr(fakes, "LIMITS", limits)
    (plain,) = requests(1, 2)

    def steered(strength: float) -> Request:
        params = dataclasses.replace(plain.params, extra_args={"steer": ["calm", strength]})
        return dataclasses.replace(plain, params=params)

    async with World(2) as world:
        fleet, choices, found = world.fleet, [], []
        choose = fleet._router.choose
        monkeypatch.setattr(
            fleet._router, "choose", lambda asked: (choices.append(choose(asked)), choices[-1])[1]
        )
        for asked in [plain, steered(1.0), steered(1.0), steered(2.0), plain]:
            one = dataclasses.replace(asked, id=uuid.uuid4().hex)
            outputs = [out async for out in fleet.generate(one)]
            found.append(outputs[0].n_cached)
            await until(lambda: not fleet._placement.sent._sent)
            await asyncio.sleep(0.1)
        assert found == [0, 0, 32, 0, 32]
        assert [one.n_cached for one in choices] == [0, 0, 0, 0, 32], "no page is taken for another"
        assert choices[1].replica == choices[2].replica
        # While it is at a replica, what was sent there is known by the front's own name.
        running = asyncio.ensure_future(answers(fleet, [steered(3.0)] * 3))
        await asyncio.wait_for(running, 5.0)
        assert 32 in [one.n_cached for one in choices[-3:]]


def test_a_front_names_what_features_are_asked():
    def name(n_prompt: int = 40, features: tuple[str, ...] = ("steer", "bend"), **asked) -> str:
        params = SamplingParams(extra_args=asked)
        request = Request(id="a", prompt_ids=(1,) * n_prompt, params=params)
        return front_kv_name(request, features)

    vector = np.arange(2000, dtype=np.float32)
    changed = vector.copy()
    changed[1000] = 0.0
    names = [
        name(steer=[1.0]),
        name(steer=[2.0]),
        name(bend=[1.0]),
        name(steer=[1.0], bend=[1.0]),
        name(41, steer=[1.0]),
        name(steer=vector),
        name(steer=changed),
    ]
    assert len(set(names)) == len(names)
    assert name(steer=vector) == name(steer=vector.copy(), echo=1)
    assert name(bend=[1.0], steer=[1.0]) == name(steer=[1.0], bend=[1.0])
    assert name(echo=1) == name(features=(), steer=[1.0]) == name(steer=object()) == ""


async def test_a_pause_of_the_front_is_no_replicas_fault():
    """What replicas said meanwhile is heard late."""
    async with World(2) as world:
        fleet = world.fleet
        running = asyncio.ensure_future(answers(fleet, requests(4, 300)))
        await begun(fleet, 4)
        time.sleep(OVERDUE_S + 0.5)
        await asyncio.sleep(0.1)
        assert fleet.counters["silent"] == 0
        running.cancel()


async def test_who_is_refused_by_one_replica_asks_another(monkeypatch):
    """A replica's queue is full and the front does not know it yet; a budget bounds how often it asks again."""
    async with World(2, max_waiting=1, max_num_seqs=1) as world:
        fleet = world.fleet
        monkeypatch.setattr(fleet, "_weigh", lambda member: None)
        monkeypatch.setattr(fleet._placement, "rebalance", lambda: None)
        full, free = fleet.members
        # Dear as it is, it is the only other one.
        fleet._router.candidates.change(free.number, suspicion=1e6)

        async def begin(n: int) -> asyncio.Future:
            """One more at the first replica, which then has ``n``."""
            fleet._router.candidates.change(free.number, out=True)
            one = Request(
                id=uuid.uuid4().hex, prompt_ids=(1, 2, n), params=SamplingParams(max_tokens=90)
            )
            running = asyncio.ensure_future(answer(fleet, one))
            await asyncio.sleep(0)
            fleet._router.candidates.change(free.number, out=False)
            await until(lambda: full.stats.waiting + full.stats.running == min(n, 2))
            return running

        running = [await begin(1), await begin(2), await begin(3)]
        assert [errors for _, _, _, errors in await asyncio.gather(*running)] == [[]] * 3
        assert (fleet.counters["moved"], free.n_requests) == (1, 1)
        await until(lambda: not full.stats.running)
        fleet._placement.may_move(99)
        running = [await begin(1), await begin(2), await begin(3)]
        found = [errors for _, _, _, errors in await asyncio.gather(*running)]
        assert found[:2] == [[], []]
        assert "overloaded" in found[2][0], "nothing is left to ask again with"
        assert (fleet.counters["moved"], free.n_requests) == (1, 1)


@pytest.mark.parametrize("code", ["overloaded", "deadline_unreachable"])
async def test_who_is_refused_by_all_is_told_the_least_wait(code):
    async with World(3) as world:
        fleet, refused = world.fleet, []
        for one in fleet.members:
            world.source.hold(one.name, True)
        (asked,) = requests(1, 4)

        async def told() -> Output:
            outputs = [out async for out in fleet.generate(asked)]
            assert len(outputs) == 1
            return outputs[0]

        running = asyncio.ensure_future(told())
        for attempt, wait_s in enumerate([7.0, 3.0, 9.0]):
            await until(lambda: any(one.n_open for one in fleet.members))
            (busy,) = (one for one in fleet.members if one.n_open)
            refused.append(busy.name)
            refusal = Output(
                request_id=asked.id,
                index=0,
                finish=Finish.ERROR,
                error=f"try again in {wait_s:.0f} s",
                error_code=code,
                retry_after=wait_s,
                attempt=attempt,
            )
            fleet.received(busy, Outputs(step=0, outputs=[refusal]))
        end = await asyncio.wait_for(running, 5.0)
        assert sorted(refused) == sorted(one.name for one in fleet.members)
        assert (end.retry_after, end.error, end.error_code) == (3.0, "try again in 3 s", code)
        assert not fleet._placement._refusals
        for one in fleet.members:
            world.source.hold(one.name, False)


def put_out(fleet: FleetEngine, monkeypatch) -> Member:
    """The first replica, which is put out as slow and has rested."""
    slow = fleet.members[0]
    record = fleet.suspicion.records[slow.name]
    monkeypatch.setattr(fleet.suspicion, "look", lambda now: [])
    fleet.suspicion._put_out(record, time.monotonic())
    fleet._out(slow, silent=False)
    record.factor, record.rests_until = 4.0, 0.0
    fleet._weigh(slow)
    return slow


async def test_a_slow_replica_gives_up_as_much_as_may_be_moved_and_comes_back(monkeypatch):
    """The ways of ``suspicion`` in a fleet: put out, tried, trusted again."""
    async with World(2) as world:
        fleet = world.fleet
        asked = requests(4, 60)
        whole = await undisturbed(asked)
        slow = fleet.members[0]
        running = asyncio.ensure_future(answers(fleet, asked))
        await until(lambda: slow.n_open > 0)
        n = slow.n_open
        put_out(fleet, monkeypatch)
        fleet.suspicion.records[slow.name].rests_until = time.monotonic() + 99.0
        assert (slow.n_open, fleet.counters["moved"]) == (0, n)
        assert await running == whole
        before = slow.n_requests
        assert await answers(fleet, asked) == whole
        assert slow.n_requests == before, "it is out"
        fleet.suspicion.records[slow.name].rests_until = 0.0
        assert await answers(fleet, asked) == whole
        assert slow.n_requests == before + 1, "it is tried with one at a time"
        assert await answers(fleet, asked[:1]) == whole[:1]
        await until(lambda: not fleet.suspicion.records[slow.name].out)
        assert not slow.streams
        assert not fleet._placement.probes._probes


async def back(fleet: FleetEngine, slow: Member, n_prompt: int = 40) -> None:
    """Ask until ``slow`` is trusted again."""
    rest_s = fleet.suspicion.records[slow.name].rest_s
    for i in range(4):
        ids = tuple((7 * i + j) % 250 for j in range(n_prompt))
        asked = Request(id="new", prompt_ids=ids, params=SamplingParams(max_tokens=2))
        await answers(fleet, [asked] * 3)
        await until(lambda: not fleet._placement.probes._probes)
        record = fleet.suspicion.records[slow.name]
        if not record.out:
            return
        assert record.rest_s == rest_s, "a probe of a healthy replica was a bad one"
    raise AssertionError("it never comes back")


async def test_one_with_long_steps_comes_back(monkeypatch):
    """A first token takes four steps of 50 ms; that is its price, and no sign of slowness."""
    monkeypatch.setattr(fakes.SlowRunner, "slow", 0.05 / fakes.STEP_S)
    async with World(2) as world:
        fleet = world.fleet
        monkeypatch.setattr(fleet._router, "_policy", POLICIES["round_robin"])
        for i in range(3):  # what steps cost is learned
            learned = [dataclasses.replace(one, prompt_ids=(i,) * 200) for one in requests(2, 4)]
            await answers(fleet, learned)
        await back(fleet, put_out(fleet, monkeypatch), n_prompt=200)


@pytest.mark.parametrize("own", [{"lane": Lane.INTERACTIVE}, {"ttft_deadline_ms": 5000.0}])
async def test_one_comes_back_whatever_the_traffic_is(monkeypatch, own):
    """No client in a hurry waits for it: what tries it is nobody's."""
    asked = [dataclasses.replace(one, **own) for one in requests(3, 8)]
    whole = await undisturbed(asked)
    async with World(2) as world:
        fleet = world.fleet
        await answers(fleet, asked)
        slow = put_out(fleet, monkeypatch)
        world.source.hold(slow.name, True)
        assert await asyncio.wait_for(answers(fleet, asked), 5.0) == whole
        world.source.hold(slow.name, False)
        await until(lambda: not slow.silent and not fleet._placement.probes._probes)
        fleet.suspicion.records[slow.name].rests_until = 0.0
        fleet.suspicion.records[slow.name].rest_s = REST_S
        await back(fleet, slow)


async def test_a_probe_that_gets_no_answer_is_tried_again(monkeypatch):
    """Its replica falls silent, then refuses."""
    asked = requests(3, 4)
    async with World(2) as world:
        fleet, source = world.fleet, world.source
        await answers(fleet, asked)
        slow = put_out(fleet, monkeypatch)
        source.hold(slow.name, True)
        await answers(fleet, asked[:1])
        assert fleet.suspicion.records[slow.name].probe is not None
        await until(lambda: slow.silent)
        assert fleet.suspicion.records[slow.name].probe is None
        source.hold(slow.name, False)
        await until(lambda: not slow.silent)
        source.hold(slow.name, True)
        await answers(fleet, asked[:1])
        (id,) = fleet._placement.probes._probes
        refusal = Output(
            request_id=id, index=0, finish=Finish.ERROR, error="full", error_code="overloaded"
        )
        fleet.received(slow, Outputs(step=slow.stats.step, outputs=[refusal]))
        assert fleet.suspicion.records[slow.name].probe is None
        source.hold(slow.name, False)
        await back(fleet, slow)


async def test_one_that_cannot_be_tried_keeps_no_other_from_it(monkeypatch):
    async with World(7) as world:
        fleet, source = world.fleet, world.source
        asked = requests(7, 4)
        await answers(fleet, asked)
        put_out(fleet, monkeypatch)
        silent, slow, *_ = fleet.members
        fleet.suspicion._put_out(fleet.suspicion.records[slow.name], 0.0)
        fleet._weigh(slow)
        silent.silent = True
        source.hold(silent.name, True)
        await back(fleet, slow)
        assert fleet.suspicion.records[silent.name].out
        source.hold(silent.name, False)


async def test_who_is_degraded_gets_nothing_while_others_are_fit(monkeypatch):
    """Its logits are not finite, say; it answers no slower than others."""
    async with World(2) as world:
        fleet = world.fleet
        asked = requests(4, 10)
        whole = await undisturbed(asked)
        sick, other = fleet.members
        monkeypatch.setattr(sick, "degraded_reasons", lambda: ["3 steps failed in a row"])
        fleet.look()
        before = sick.n_requests
        assert await answers(fleet, asked) == whole
        assert sick.n_requests == before
        assert [one.state for one in fleet.replicas()] == ["unfit", "ready"]
        assert not fleet.degraded_reasons()
        monkeypatch.setattr(other, "degraded_reasons", lambda: ["3 steps failed in a row"])
        fleet.look()
        assert len(fleet.degraded_reasons()) == 2
        assert await answers(fleet, asked) == whole, "better than nothing"
        monkeypatch.undo()
        fleet.look()
        assert {one.state for one in fleet.replicas()} == {"ready"}


async def test_an_error_in_one_look_ends_no_watching(monkeypatch, caplog):
    """Something is wrong with rebalancing; a replica that falls silent is found all the same."""
    caplog.set_level(logging.ERROR)
    asked = requests()
    whole = await undisturbed(asked)
    async with World(2) as world:
        fleet = world.fleet
        n_looks = 0

        def broken() -> None:
            nonlocal n_looks
            n_looks += 1
            raise (KeyError if n_looks % 2 else ValueError)("broken")

        monkeypatch.setattr(fleet._placement, "rebalance", broken)
        monkeypatch.setattr(fleet.suspicion, "look", lambda now: broken())
        running = asyncio.ensure_future(answers(fleet, asked))
        await begun(fleet, len(asked))
        busy = max(fleet.members, key=lambda one: one.n_open)
        world.source.hold(busy.name, stopped=True)
        assert await asyncio.wait_for(running, 20.0) == whole
        assert fleet.counters["silent"] == 1
        assert n_looks > 8
        logged = [record for record in caplog.records if "goes on" in record.message]
        assert len(logged) == 2, "one of each kind"
        assert all(record.exc_info for record in logged)
        world.source.hold(busy.name, stopped=False)


def test_without_ray_replicas_are_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "jserve.fleet.on_ray", raising=False)
    with pytest.raises(ConfigError, match=r"jserve\[ray\]") as error:
        serving_engine(EngineConfig.of(replicas=2))
    assert error.value.field == "replicas"


def test_one_engine_loads_no_fleet_and_no_ray():
    code = (
        "import sys; from jserve.build import serving_engine; from jserve.config import EngineConfig\n"
        "serving_engine(EngineConfig())\n"
        "print([m for m in sys.modules if m.startswith(('ray', 'jserve.fleet'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_llm_has_one_engine():
    with pytest.raises(ConfigError, match="AsyncLLM takes replicas"):
        LLM(replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_any_request_is_told_the_same_wherever_its_replicas_die(seed):
    """All fields: structures, thoughts, penalties, stop strings over the cut, several choices."""
    rng = random.Random(seed)
    asked = [any_request(rng, f"{seed}-{i}") for i in range(10)]
    async with World(1) as alone:
        whole = await all_told(alone.fleet, asked)
    async with World(3) as world:
        fleet, source = world.fleet, world.source
        running = asyncio.ensure_future(all_told(fleet, asked))
        for _ in range(2):
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            ways = [source.kill, lambda name: source.clients[name].cut()]
            busy = [one.name for one in fleet.members if one.n_open]
            if busy:
                rng.choice(ways)(rng.choice(busy))
            await source.add()
        assert await asyncio.wait_for(running, 30.0) == whole
        assert fleet.counters["resumed"] > 0
