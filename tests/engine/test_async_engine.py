"""The asyncio face over an engine in a thread and in a process: streams, cancels, restarts."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import subprocess
import threading
import time
from typing import ClassVar

import pytest

from jserve import faults
from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import InprocClient, ProcClient
from jserve.engine.streams import MERGED_TOKENS, Stream
from jserve.engine.wire import (
    Control,
    Fault,
    FromEngine,
    Gone,
    HandleReply,
    Outputs,
    Progress,
    Ready,
    SocketLink,
    Start,
    Stats,
    Submit,
)
from jserve.errors import BadRequest, ConfigError, EngineDead, NotReady
from jserve.types import Finish, Output, TokenLogprob
from tests.engine import child
from tests.engine.fakes import build, expected, request

KINDS = ["thread", "process"]
THREADS = {"engine", "engine-reader", "engine-writer"}


def client_of(kind, model="ok", **options):
    config = EngineConfig.of(model=model, **options)
    if kind == "thread":
        return InprocClient(config, build)
    return ProcClient(config, command=child.command)


def engine_of(kind="thread", model="ok", **options):
    options = {"backoff_s": 0.05, **options}
    return AsyncEngine(lambda: client_of(kind, model), **options)


@pytest.fixture(params=KINDS)
async def engine(request):
    engine = engine_of(request.param)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def process_engine():
    engine = engine_of("process", max_restarts=1)
    await engine.start()
    yield engine
    await engine.close()


async def outputs_of(engine, r):
    return [out async for out in engine.generate(r)]


def tokens(outputs, index=0):
    return [t for out in outputs if out.index == index for t in out.token_ids]


def finishes(outputs):
    return [(out.index, out.finish) for out in outputs if out.finish is not None]


async def eventually(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_start_reports_progress_and_info(request):
    seen = []
    engine = engine_of("process", "some model")
    info = await engine.start(lambda *progress: seen.append(progress))
    assert seen == [("compile", 1, 2), ("compile", 2, 2)]
    assert info == engine.info
    assert (info["model"], info["vocab_size"]) == ("some model", 1000)
    assert info["startup_s"] >= 0
    assert engine.ready
    assert engine.healthy()
    await engine.close()
    assert not engine.ready


async def test_a_request_streams_its_tokens_and_ends(engine):
    r = request("a", max_tokens=20)
    outputs = await outputs_of(engine, r)
    assert tokens(outputs) == expected(r)
    assert finishes(outputs) == [(0, Finish.LENGTH)]
    assert engine.n_active == 0
    assert engine.counters["aborted"] == 0


async def test_every_choice_has_its_own_end(engine):
    r = request("a", max_tokens=5, n=3)
    outputs = await outputs_of(engine, r)
    assert [tokens(outputs, i) for i in range(3)] == [expected(r, i) for i in range(3)]
    assert sorted(finishes(outputs)) == [(i, Finish.LENGTH) for i in range(3)]


async def test_200_concurrent_requests(engine):
    requests = [request(f"r{i}", n_prompt=i % 7 + 1, max_tokens=i % 11 + 1) for i in range(200)]
    results = await asyncio.gather(*(outputs_of(engine, r) for r in requests))
    for r, outputs in zip(requests, results, strict=True):
        assert tokens(outputs) == expected(r)
        assert finishes(outputs) == [(0, Finish.LENGTH)]
    assert engine.n_active == engine.n_buffered_bytes == 0
    assert engine.counters["dropped_outputs"] == 0


async def test_a_refusal_is_the_first_and_only_output(engine):
    (out,) = await outputs_of(engine, request("full"))
    assert (out.finish, out.error_code) == (Finish.ERROR, "overloaded")


async def test_an_id_in_use_is_refused(engine):
    stream = engine.generate(request("a", max_tokens=4000))
    await anext(stream)
    with pytest.raises(BadRequest, match="in use") as caught:
        await outputs_of(engine, request("a"))
    assert caught.value.field == "id"
    await stream.aclose()


async def running_in_engine(engine):
    """Sequences that the engine has, once it went idle or said so anew."""
    await eventually(lambda: engine.stats().running == 0)
    return engine.stats().running


@pytest.mark.parametrize("n_taken", [0, 1, 30])
async def test_closing_the_stream_cancels_at_every_stage(engine, n_taken):
    stream = engine.generate(request("a", max_tokens=4000))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    if n_taken == 0:
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    else:
        await first
        for _ in range(n_taken - 1):
            await anext(stream)
        await stream.aclose()
    assert engine.n_active == 0
    assert engine.counters["aborted"] == 1
    assert await running_in_engine(engine) == 0
    r = request("b")
    assert tokens(await outputs_of(engine, r)) == expected(r)


async def test_a_cancelled_task_cancels_its_request(engine):
    task = asyncio.create_task(outputs_of(engine, request("a", max_tokens=4000)))
    await eventually(lambda: engine.stats().running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await running_in_engine(engine) == 0


async def test_a_stream_closed_after_its_end_cancels_nothing(engine):
    stream = engine.generate(request("a", max_tokens=1))
    assert (await anext(stream)).finish is Finish.LENGTH
    await stream.aclose()
    assert engine.counters["aborted"] == 0


async def test_abort_ends_the_consumer_with_one_terminal_output(engine):
    task = asyncio.create_task(outputs_of(engine, request("a", max_tokens=4000, n=2)))
    await eventually(lambda: engine.stats().running == 2)
    engine.abort("a")
    engine.abort("a")
    assert sorted(finishes(await task)) == [(0, Finish.ABORT), (1, Finish.ABORT)]
    assert engine.counters["aborted"] == 1
    assert await running_in_engine(engine) == 0


async def test_abort_of_one_choice_leaves_the_other(engine):
    r = request("a", max_tokens=60, n=2)
    task = asyncio.create_task(outputs_of(engine, r))
    await eventually(lambda: engine.n_active == 1)
    engine.abort("a", 0)
    engine.abort("a", 0)
    engine.abort("nobody")
    outputs = await task
    assert sorted(finishes(outputs)) == [(0, Finish.ABORT), (1, Finish.LENGTH)]
    assert tokens(outputs, 1) == expected(r, 1)
    assert engine.counters["aborted"] == 0, "the request came to its end"


async def test_abort_racing_the_finish_gives_one_terminal_output(engine):
    for i in range(20):
        r = request(f"r{i}", max_tokens=i % 4 + 1)
        task = asyncio.create_task(outputs_of(engine, r))
        await asyncio.sleep(0.002 * (i % 4))
        engine.abort(r.id)
        assert len(finishes(await task)) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_config_error_stops_the_start_and_keeps_its_field(kind, caplog):
    engine = engine_of(kind, "no such model")
    with pytest.raises(ConfigError, match="no such directory") as caught:
        await engine.start()
    assert caught.value.field == "model"
    assert not [r for r in caplog.records if r.levelname == "ERROR"], "its caller says it"
    await engine.close()
    assert engine.counters["restarts"] == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_crash_at_start_is_reported_and_not_tried_again(kind, capfd):
    engine = engine_of(kind, "crash at start")
    with pytest.raises(EngineDead, match="RuntimeError: boom"):
        await engine.start()
    await asyncio.sleep(0.1)
    assert engine.counters["restarts"] == 0
    await engine.close()


async def test_a_command_that_cannot_run_is_reported():
    engine = AsyncEngine(
        lambda: ProcClient(EngineConfig(), command=lambda fd: ["./no-such-program"])
    )
    with pytest.raises(EngineDead, match="cannot start the engine"):
        await engine.start()
    await engine.close()


async def test_a_start_that_fails_is_reported_once_by_its_caller(caplog):
    engine = AsyncEngine(
        lambda: ProcClient(EngineConfig(), command=lambda fd: ["./no-such-program"])
    )
    with pytest.raises(EngineDead):
        await engine.start()
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
    await engine.close()


async def test_before_the_start_requests_are_refused():
    engine = engine_of()
    with pytest.raises(NotReady) as caught:
        await outputs_of(engine, request("a"))
    assert caught.value.code == "starting"


async def test_an_engine_that_is_not_heard_any_more_ends_by_itself(process_engine, caplog):
    r = request("a")
    with faults.armed("wire.receive", 1):  # on this side only: the engine is another process
        await outputs_of(process_engine, r)  # the call that waits already is not counted
        await eventually(lambda: process_engine.counters["engine_deaths"] == 1)
    await eventually(lambda: process_engine.ready)
    assert "it ended with code 0" in caplog.text
    assert tokens(await outputs_of(process_engine, r)) == expected(r)


async def test_a_killed_process_is_restarted_and_every_request_goes_on(process_engine):
    engine = process_engine
    first_pid = engine.client.pid
    requests = [request(f"r{i}", max_tokens=400, n=1 + i % 2) for i in range(20)]
    tasks = [asyncio.create_task(outputs_of(engine, r)) for r in requests]
    await eventually(lambda: engine.stats().running == 30)
    os.kill(first_pid, signal.SIGKILL)
    await eventually(lambda: not engine.ready)
    with pytest.raises(EngineDead, match="being restarted"):
        await outputs_of(engine, request("early"))
    assert not engine.healthy()
    answers = await asyncio.gather(*tasks)
    for r, outputs in zip(requests, answers, strict=True):
        for i in range(r.params.n):
            assert tokens(outputs, i) == expected(r, i)
        assert sorted(finishes(outputs)) == [(i, Finish.LENGTH) for i in range(r.params.n)]
        assert outputs[-1].attempt == 1
    assert any(outputs[0].attempt == 0 for outputs in answers), "one began before the kill"
    assert engine.client.pid != first_pid
    counted = engine.counters
    assert (counted["engine_deaths"], counted["restarts"], counted["resumed"]) == (1, 1, 20)


async def test_a_request_that_its_consumer_leaves_meanwhile_is_not_resumed(process_engine):
    engine = process_engine
    stream = engine.generate(request("a", max_tokens=4000))
    await anext(stream)
    os.kill(engine.client.pid, signal.SIGKILL)
    await eventually(lambda: not engine.ready)
    await stream.aclose()
    await eventually(lambda: engine.ready)
    assert engine.counters["resumed"] == 0
    assert engine.stats().running == 0


async def test_ctrl_c_is_for_the_parent_to_handle(process_engine):
    os.kill(process_engine.client.pid, signal.SIGINT)
    r = request("a", max_tokens=30)
    assert tokens(await outputs_of(process_engine, r)) == expected(r)


async def test_it_gives_up_when_the_restarts_are_used_up(process_engine):
    engine = process_engine
    for n in range(2):
        assert not engine.gave_up.is_set()
        await eventually(lambda: engine.ready)
        os.kill(engine.client.pid, signal.SIGKILL)
        await eventually(lambda n=n: engine.counters["engine_deaths"] == n + 1)
    await asyncio.wait_for(engine.gave_up.wait(), 2)
    assert "died 2 times" in engine.gave_up_reason
    with pytest.raises(EngineDead, match="died 2 times"):
        await outputs_of(engine, request("late"))


async def test_poisoned_steps_end_the_engine_after_eight():
    engine = engine_of("thread", "poison", max_restarts=0)
    await engine.start()
    for i in range(8):
        (out,) = await outputs_of(engine, request(f"r{i}"))
        assert out.finish is Finish.ERROR
    assert out.error_code == "engine_dead"
    await asyncio.wait_for(engine.gave_up.wait(), 2)
    assert "with 8 requests, each alone" in engine.gave_up_reason
    await engine.close()


async def test_close_fails_what_still_runs(engine):
    task = asyncio.create_task(outputs_of(engine, request("a", max_tokens=4000)))
    await eventually(lambda: engine.stats().running == 1)
    await engine.close()
    assert (await task)[-1].error_code == "engine_dead"
    assert engine.counters["engine_deaths"] == 0
    with pytest.raises(NotReady):
        await outputs_of(engine, request("b"))


async def test_drain_waits_for_what_runs_and_refuses_the_rest(engine):
    r = request("a", max_tokens=30)
    task = asyncio.create_task(outputs_of(engine, r))
    await eventually(lambda: engine.n_active == 1)
    draining = asyncio.create_task(engine.drain(5.0))
    await asyncio.sleep(0)
    with pytest.raises(NotReady) as caught:
        await outputs_of(engine, request("b"))
    assert caught.value.code == "draining"
    assert await draining == 0
    assert tokens(await task) == expected(r)


async def test_drain_ends_what_runs_too_long(engine):
    task = asyncio.create_task(outputs_of(engine, request("a", max_tokens=4000)))
    await eventually(lambda: engine.stats().running == 1)
    assert await engine.drain(0.05) == 1
    assert (await task)[-1].error_code == "draining"
    assert await running_in_engine(engine) == 0


class ScriptedClient:
    """A client whose engine says what the test says, on the event loop's own thread."""

    info_of_next: ClassVar[dict[str, str]] = {}

    def __init__(self):
        self.alive, self.info = True, self.info_of_next
        self.submitted, self.cancelled, self.requests = [], [], {}
        self.asked = []
        self.closed = False

    def start(self, on_message):
        self.say = on_message
        self.say(Ready(info=self.info))

    def submit(self, request):
        self.submitted.append(request.id)
        self.requests[request.id] = request

    def ask(self, message):
        self.asked.append(message)

    def cancel(self, request_id, index=None):
        self.cancelled.append((request_id, index))

    def close(self, timeout_s=5.0):
        self.closed, self.alive = True, False

    def kill(self):
        self.alive = False


@pytest.fixture
async def scripted():
    """(engine, its client, its clock as a list of one number)."""
    clients, now = [], [0.0]

    def make():
        clients.append(ScriptedClient())
        return clients[-1]

    engine = AsyncEngine(
        make,
        stall_timeout_s=10.0,
        max_buffered_bytes=2000,
        slow_reader_s=30.0,
        backoff_s=0.0,
        max_restarts=2,
        clock=lambda: now[0],
    )
    await engine.start()
    yield engine, clients, now
    await engine.close()


def say(client, id, *ids, finish=None, step=1, index=0, attempt=0):
    out = Output(request_id=id, index=index, token_ids=ids, finish=finish, attempt=attempt)
    client.say(Outputs(step=step, outputs=[out]))


async def test_health_is_steps_while_work_waits(scripted):
    engine, (client,), now = scripted
    now[0] = 100.0
    assert engine.healthy(), "idle is healthy, however long"
    stream = engine.generate(request("a"))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    now[0] += 9.0
    assert engine.healthy()
    client.say(Stats(step=1, running=1))
    await asyncio.sleep(0.01)
    now[0] += 9.0
    assert engine.healthy(), "a step without outputs is progress"
    client.say(Stats(step=1, running=1))
    await asyncio.sleep(0.01)
    now[0] += 2.0
    assert not engine.healthy(), "a message without a step is not"
    say(client, "a", 1, finish=Finish.LENGTH, step=2)
    await first
    assert engine.healthy()
    now[0] += 100.0
    assert engine.healthy()


async def test_an_engine_is_degraded_by_its_statistics_and_the_next_one_starts_healthy(scripted):
    engine, clients, now = scripted
    said = {"step_faults_total": 7.0, "steps_failed_in_row": 7.0}
    assert engine.degraded_reasons() == []
    clients[0].say(Stats(step=1, values=said))
    await asyncio.sleep(0.01)
    assert engine.degraded_reasons() == ["7 steps failed in a row"]
    assert engine.healthy()
    assert engine.counters["degraded"] == 1
    clients[0].say(Gone(exit_code=1))
    while len(clients) < 2 or not engine.ready:
        await asyncio.sleep(0.01)
    assert engine.degraded_reasons() == []
    now[0] += 100.0
    assert engine.degraded_reasons() == [], "idle is fit, however long"
    stream = engine.generate(request("a"))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    now[0] += 31.0
    assert engine.degraded_reasons() == ["no step for 31 s while there is work"]
    say(clients[1], "a", 1, finish=Finish.LENGTH)
    await first


async def test_one_that_ends_every_engine_ends_itself(scripted):
    engine, clients, _ = scripted
    poison, innocent = (
        asyncio.create_task(outputs_of(engine, request(id, max_tokens=4)))
        for id in ("poison", "innocent")
    )
    await asyncio.sleep(0)
    for n in range(2):
        again = clients[n].requests["innocent"]
        assert (again.attempt, again.said) == (n, ((0,) * n,) if n else ())
        say(clients[n], "innocent", 0, attempt=n)
        clients[n].say(Gone(exit_code=1))
        await eventually(lambda n=n: len(clients) == n + 2 and engine.ready)
    assert clients[2].submitted == ["innocent"]
    assert finishes(await poison) == [(0, Finish.ERROR)]
    say(clients[2], "innocent", 5, finish=Finish.LENGTH, attempt=2)
    assert tokens(await innocent) == [0, 0, 5]


async def test_outputs_of_an_attempt_that_was_given_up_are_dropped(scripted):
    engine, clients, _ = scripted
    task = asyncio.create_task(outputs_of(engine, request("a")))
    await asyncio.sleep(0)
    say(clients[0], "a", 1)
    clients[0].say(Fault(message="malformed message", code="malformed"))
    await eventually(lambda: clients[0].submitted == ["a", "a"])
    assert clients[0].cancelled == [("a", None)]
    say(clients[0], "a", 2)
    say(clients[0], "a", finish=Finish.ABORT)
    say(clients[0], "a", 2, attempt=1, finish=Finish.LENGTH)
    assert tokens(await task) == [1, 2]
    assert engine.counters["dropped_outputs"] == 2


async def test_other_weights_go_on_with_nothing_that_was_told(scripted):
    engine, clients, _ = scripted
    tasks = [asyncio.create_task(outputs_of(engine, request(id))) for id in ("told", "untold")]
    await asyncio.sleep(0)
    say(clients[0], "told", 1)
    ScriptedClient.info_of_next = {"weights": "others"}
    try:
        clients[0].say(Gone(exit_code=1))
        await eventually(lambda: len(clients) == 2 and engine.ready)
    finally:
        ScriptedClient.info_of_next = {}
    assert clients[1].submitted == ["untold"]
    say(clients[1], "untold", 7, finish=Finish.LENGTH, attempt=1)
    told, untold = await asyncio.gather(*tasks)
    assert (tokens(told), told[-1].error_code) == ([1], "weights_changed")
    assert tokens(untold) == [7]


async def test_an_answer_of_updated_weights_does_not_go_on_with_those_of_the_start(scripted):
    engine, clients, _ = scripted
    tasks = [asyncio.create_task(outputs_of(engine, request(id))) for id in ("told", "untold")]
    await asyncio.sleep(0)
    say(clients[0], "told", 1)
    update = Control(id="u", action="update_weights", source="/w")
    updating = asyncio.create_task(engine.control(update))
    await asyncio.sleep(0)
    assert clients[0].asked == [update]
    clients[0].say(HandleReply(id="u", info={"version": "1", "weights": "updated"}))
    assert (await updating)["version"] == "1"
    say(clients[0], "told", 2)
    clients[0].say(Gone(exit_code=1))
    await eventually(lambda: len(clients) == 2 and engine.ready)
    assert clients[1].submitted == ["untold"]
    say(clients[1], "untold", 7, finish=Finish.LENGTH, attempt=1)
    told, untold = await asyncio.gather(*tasks)
    assert (tokens(told), told[-1].error_code) == ([1, 2], "weights_changed")
    assert tokens(untold) == [7]


async def test_outputs_after_the_terminal_one_are_dropped(scripted):
    engine, (client,), _ = scripted
    task = asyncio.create_task(outputs_of(engine, request("a")))
    await asyncio.sleep(0)
    for _ in range(2):
        say(client, "a", 1, finish=Finish.STOP)
    say(client, "a", 2, index=7)
    say(client, "stranger", 3)
    assert [o.token_ids for o in await task] == [(1,)]
    assert engine.counters["dropped_outputs"] == 3


async def test_a_reader_that_takes_nothing_for_too_long_is_ended(scripted):
    engine, (client,), now = scripted
    slow, quick = engine.generate(request("slow")), engine.generate(request("quick"))
    starts = [asyncio.create_task(anext(s)) for s in (slow, quick)]
    await asyncio.sleep(0)
    for id in ("slow", "quick"):
        say(client, id, 0)
    await asyncio.gather(*starts)
    for i in range(5):
        say(client, "slow", i)
        say(client, "quick", i)
        assert (await anext(quick)).token_ids == (i,)
    now[0] += 29.0
    say(client, "slow", 5)
    await asyncio.sleep(0.01)
    assert engine.counters["slow_readers"] == 0
    now[0] += 2.0
    say(client, "slow", 6)
    say(client, "slow", 7)
    await asyncio.sleep(0.01)
    assert engine.counters["slow_readers"] == 1
    assert client.cancelled == [("slow", None)]
    rest = [out async for out in slow]
    assert [t for o in rest for t in o.token_ids] == list(range(7))
    assert (rest[-1].finish, rest[-1].error_code) == (Finish.ERROR, "slow_reader")
    await quick.aclose()


async def test_a_reader_that_is_slow_but_reads_is_kept_and_gets_larger_pieces(scripted):
    """30 tokens come for each time it reads; it is never ended, and every token reaches it once."""
    engine, (client,), now = scripted
    stream = engine.generate(request("a", max_tokens=2000, n=2))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    told = {0: [], 1: []}
    n_pieces = 0
    for turn in range(20):
        for i in range(30):
            say(client, "a", turn * 30 + i)
        say(client, "a", turn, index=1)
        now[0] += 20.0
        await asyncio.sleep(0)
        for _ in range(2):
            out = await (first if turn == n_pieces == 0 else anext(stream))
            told[out.index] += out.token_ids
            n_pieces += 1
            assert len(out.token_ids) <= MERGED_TOKENS
    assert engine.counters["slow_readers"] == 0
    assert told == {0: list(range(600)), 1: list(range(20))}
    assert n_pieces == 40
    await stream.aclose()


async def test_what_waits_for_a_reader_is_bounded_in_bytes(scripted):
    engine, (client,), _ = scripted
    stream = engine.generate(request("a", max_tokens=4000))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    say(client, "a", 0)
    await first
    most = 0
    for i in range(1000):
        say(client, "a", i)
        await asyncio.sleep(0)
        most = max(most, engine.n_buffered_bytes)
    assert engine.counters["slow_readers"] == 1
    assert 2000 < most < 3000
    rest = [out async for out in stream]
    tokens = [t for out in rest for t in out.token_ids]
    assert tokens == list(range(len(tokens))), "what it gets before the end is whole"
    assert rest[-1].error_code == "slow_reader"


def test_merged_outputs_say_the_same():
    """Any pattern of puts and takes gives the same tokens, scores, drafts, cached tokens, seed and end per
    choice."""
    rng = random.Random(3)
    for _ in range(200):
        r = request("a", n=2, max_tokens=200)
        stream, now = Stream(r, clock=lambda: 0.0), {0: 0, 1: 0}
        sent, got = [], []
        for _ in range(rng.randrange(1, 120)):
            index = rng.randrange(2)
            n = rng.choice([1, 1, 1, 5, 70])
            ids = tuple(range(now[index], now[index] + n))
            finish = Finish.LENGTH if rng.random() < 0.01 else None
            out = Output(
                request_id="a",
                index=index,
                token_ids=ids,
                logprobs=tuple(TokenLogprob(token=t, logprob=-t) for t in ids),
                extra={"twice": tuple(2 * t for t in ids)},
                seed=9 if now[index] == 0 else None,
                n_cached=3 if now[index] == 0 else 0,
                n_drafted=n + 2,
                n_accepted=n - 1,
                finish=finish,
                stop_reason=7 if finish else None,
            )
            now[index] += n
            if stream.put(out):
                sent.append(out)
            while stream.n_bytes and rng.random() < 0.3:
                got.append(asyncio.run(stream.get()))
        while stream.n_bytes:
            got.append(asyncio.run(stream.get()))
        for index in range(2):
            assert _story(got, index) == _story(sent, index)


def _story(outputs, index):
    mine = [out for out in outputs if out.index == index]
    return (
        [t for out in mine for t in out.token_ids],
        [p for out in mine for p in out.logprobs or ()],
        [x for out in mine for x in (out.extra or {}).get("twice", ())],
        [out.seed for out in mine if out.seed is not None],
        [(out.finish, out.stop_reason) for out in mine if out.finish],
        (sum(out.n_drafted for out in mine), sum(out.n_accepted for out in mine)),
        max((out.n_cached for out in mine), default=0),
    )


def test_drafts_stay_with_their_tokens_where_a_stop_string_may_cut():
    stream = Stream(request("a", stop=("x",)), clock=lambda: 0.0)
    for n_drafted in (0, 0, 3, 3):
        stream.put(Output(request_id="a", index=0, token_ids=(1, 2), n_drafted=n_drafted))
    got = []
    while stream.n_bytes:
        got.append(asyncio.run(stream.get()))
    assert [(len(out.token_ids), out.n_drafted) for out in got] == [(4, 0), (2, 3), (2, 3)]


@pytest.mark.parametrize("error", [OSError("no processes"), RuntimeError("can't start new thread")])
async def test_a_restart_that_gets_no_process_or_thread_is_tried_again(
    scripted, monkeypatch, error
):
    engine, clients, _ = scripted
    start, refused = ScriptedClient.start, [error]

    def sometimes(client, on_message):
        if refused:
            raise refused.pop()
        start(client, on_message)

    monkeypatch.setattr(ScriptedClient, "start", sometimes)
    clients[0].say(Gone(exit_code=1))
    await eventually(lambda: engine.ready and len(clients) == 3)
    assert engine.counters["engine_deaths"] == 2
    assert not engine.gave_up.is_set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_gets_no_thread_leaves_nothing(monkeypatch, kind):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    client = client_of(kind)
    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", no_thread)
        with pytest.raises(RuntimeError):
            client.start(lambda message: None)
    assert not client.alive
    client.close()
    if isinstance(client, ProcClient):
        assert client._process is not None
        assert client._process.wait(5) == -signal.SIGKILL


async def test_messages_of_a_dead_engine_do_not_reach_the_next(scripted):
    engine, clients, _ = scripted
    clients[0].say(Gone(exit_code=1))
    await eventually(lambda: len(clients) == 2 and engine.ready)
    task = asyncio.create_task(outputs_of(engine, request("a")))
    await asyncio.sleep(0)
    say(clients[0], "a", 1)
    clients[0].say(Gone(exit_code=1))
    say(clients[1], "a", 2, finish=Finish.STOP)
    assert [o.token_ids for o in await task] == [(2,)]
    assert engine.counters["engine_deaths"] == 1


async def test_an_engine_that_ran_long_is_forgiven_its_restarts(scripted):
    engine, clients, now = scripted
    for n in range(6):
        await eventually(lambda n=n: len(clients) == n + 1 and engine.ready)
        now[0] += 601.0
        clients[-1].say(Gone(exit_code=-9))
        await eventually(lambda n=n: engine.counters["engine_deaths"] == n + 1)
    assert not engine.gave_up.is_set()


async def test_finished_requests_leave_nothing_behind(engine):
    await asyncio.gather(*(outputs_of(engine, request(f"r{i}")) for i in range(20)))
    gc.collect()
    left = [o for o in gc.get_objects() if type(o) is Stream]
    assert left == []


@pytest.mark.parametrize(
    ("model", "code"), [("ok", 0), ("hang at start", 1), ("hang in a step", 1)]
)
def test_the_engine_process_ends_with_its_parent(model, code):
    """A parent that dies without a word: its end of the socket closes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        process = subprocess.Popen(child.command(fd), pass_fds=[fd])
        theirs.close()
        link = SocketLink(ours, FromEngine)
        link.send(Start(config=EngineConfig.of(model=model).flat()))
        link.send(Submit(request=request("a", max_tokens=4000)))
        awaited = {"ok": Outputs, "hang at start": Progress}.get(model, Ready)
        while not any(isinstance(m, awaited) for m in link.receive(5.0)):
            pass
        time.sleep(0.3 if model == "hang in a step" else 0.0)
    assert process.wait(5.0) == code


@pytest.mark.parametrize("kind", KINDS)
async def test_close_ends_a_client_cleanly_and_twice(kind):
    client = client_of(kind)
    messages = []
    client.start(messages.append)
    await eventually(lambda: client.info)
    assert client.alive
    client.close()
    client.close()
    assert not client.alive
    await eventually(lambda: not {t.name for t in threading.enumerate()} & THREADS)
    assert [m.exit_code for m in messages if isinstance(m, Gone)] == [0]


async def test_a_prompt_too_large_for_the_boundary_is_the_clients_fault(monkeypatch):
    monkeypatch.setattr("jserve.engine.wire.MAX_MESSAGE_BYTES", 1000)
    client = client_of("process")
    with pytest.raises(BadRequest, match="exceeds the limit") as caught:
        client.submit(request("a", n_prompt=2000))
    assert caught.value.field == "prompt"
