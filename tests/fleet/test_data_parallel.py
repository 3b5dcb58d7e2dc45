"""Several engines in one process under one face, with a fake device: the same tokens, places, commands, turns."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import pytest

from jserve.config import EngineConfig
from jserve.engine.client import InprocClient
from jserve.engine.engine import Engine
from jserve.engine.wire import Control, HandleCommand, HandleReply, Outputs
from jserve.errors import BadRequest, EngineDead
from jserve.fleet.data_parallel import DataParallelEngine
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.types import Finish, Output, Request
from tests.fleet.fakes import LIMITS, OPTIONS


class LiveRunner(FakeRunner):
    """One whose weights can be replaced."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__(LIMITS)
        self.fault, self.sources = fault, []

    def weights_fault(self) -> str:
        return ""

    def update_weights(self, source, *, partial=False, donate=False, alias=False, beside=False):
        if self.fault:
            raise BadRequest("params: it does not fit", field="params")
        self.sources.append(source)

    def end_beside(self) -> None: ...

    def sleep(self, parts) -> None: ...

    def wake(self, parts) -> None: ...


def engine(runner: FakeRunner | None = None, **limits: Any) -> Engine:
    own = replace(LIMITS, **limits)
    return Engine(Scheduler(own, EngineConfig.of(**OPTIONS)), runner or FakeRunner(own))


def several(*runners: FakeRunner) -> DataParallelEngine:
    return DataParallelEngine([engine(runner) for runner in runners or (None, None)])


def request(i: int, prompt: tuple[int, ...] | None = None, n: int = 1, **kw) -> Request:
    params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=5 + i % 7, n=n)
    return Request(id=f"r{i}", prompt_ids=prompt or tuple(range(i % 11 + 1)), params=params, **kw)


def told(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for out in outputs:
        found.setdefault((out.request_id, out.index), []).extend(out.token_ids)
    return found


def ask(of: DataParallelEngine, message: Control | HandleCommand) -> list[HandleReply]:
    of.ask(message)
    answers = of.take_answers()
    while of.busy and not answers:
        of.step()
        answers = of.take_answers()
    return answers


def test_every_request_has_the_tokens_of_one_engine_and_all_engines_work() -> None:
    requests = [request(i, n=1 + i % 3) for i in range(40)]
    one, two = engine(), several()
    for each in (one, two):
        for asked in requests:
            each.submit(asked)
    want, got = one.drain(), two.drain()
    assert told(got) == told(want)
    ends = [(out.request_id, out.index) for out in got if out.finish is not None]
    assert sorted(ends) == sorted((r.id, i) for r in requests for i in range(r.params.n))
    assert all(each.n_steps > 0 for each in two.engines)
    assert not two._placed
    assert not two.busy


@pytest.mark.parametrize("short_context", [0, 60])
def test_a_prefix_meets_its_pages(short_context: int) -> None:
    """Those of long texts, too."""
    two = DataParallelEngine([engine(short_context=short_context) for _ in range(2)])
    prefix = tuple(range(64))
    two.submit(request(1, (*prefix, 1)))
    two.drain()
    for i in range(2, 6):
        two.submit(request(i, (*prefix, i)))
    two.drain()
    hits = [each.stats().values["cache_hit_tokens"] for each in two.engines]
    assert min(hits) == 0
    assert max(hits) >= 4 * 48


def test_equal_requests_spread() -> None:
    two = several()
    for i in range(16):
        two.submit(request(i, tuple(range(100 * i, 100 * i + 40))))
    assert min(each.n_unread for each in two.engines) >= 5


def test_a_cancelled_request_ends_where_it_is() -> None:
    two = several()
    for i in range(4):
        two.submit(request(i))
    two.cancel("r3")
    two.cancel("nobody")
    ends = {out.request_id: out.finish for out in two.drain() if out.finish is not None}
    assert ends.pop("r3") is Finish.ABORT
    assert set(ends) == {"r0", "r1", "r2"}
    assert Finish.ABORT not in ends.values()


def test_named_caches_are_found_where_they_are() -> None:
    two = several()
    for name in ("a", "b", "c"):
        two.create(request(0, tuple(range(40)), cache=name), 60.0)
        two.drain()
    (every,) = ask(two, HandleCommand(id="1", action="find"))
    assert sorted(info.name for info in every.handles) == ["a", "b", "c"]
    (one,) = ask(two, HandleCommand(id="2", action="renew", name="b", ttl_s=5.0))
    assert [info.name for info in one.handles] == ["b"]
    (gone,) = ask(two, HandleCommand(id="3", action="drop", name="b"))
    assert gone.error is None
    (lacking,) = ask(two, HandleCommand(id="4", action="find", name="b"))
    assert lacking.error_code == "cache_not_found"
    two.submit(request(1, (*range(40), 7), cache="a"))
    two.drain()
    assert sum(each.stats().values["cache_hit_tokens"] for each in two.engines) > 0


def test_a_command_is_answered_once_when_all_have_carried_it_out() -> None:
    runners = LiveRunner(), LiveRunner()
    two = several(*runners)
    two.submit(request(1))
    (answer,) = ask(two, Control(id="u", action="update_weights", source="w", version="two"))
    assert answer.info["version"] == "two"
    assert [r.sources for r in runners] == [["w"], ["w"]]
    assert two.carry_out(Control(id="p", action="pause"))
    assert two.closed
    assert two.carry_out(Control(id="r", action="resume"))
    assert not two.closed
    two.drain()


def test_a_command_that_waits_for_all_is_answered_once() -> None:
    two = several(LiveRunner(), LiveRunner())
    two.submit(request(6))
    two.step()
    waits = Control(id="p", action="pause", running="finish")
    assert two.carry_out(waits) is None
    ends = [out.request_id for out in two.drain() if out.finish is not None]
    assert ends == ["r6"]
    assert [reply.id for reply in two.take_answers()] == ["p"]
    assert two.take_answers() == []
    assert two.closed


def test_engines_that_disagree_are_dead_and_what_all_refuse_is_refused() -> None:
    two = several(LiveRunner(), LiveRunner(fault=True))
    update = Control(id="u", action="update_weights", source="w")
    with pytest.raises(EngineDead, match="some engines"):
        ask(two, update)
    with pytest.raises(EngineDead, match="some engines"):
        several(LiveRunner(), LiveRunner(fault=True)).carry_out(update)
    both = several(LiveRunner(fault=True), LiveRunner(fault=True))
    (answer,) = ask(both, update)
    assert answer.error_field == "params"
    (refused,) = ask(both, Control(id="d", action="update_weights", source="w", alias=True))
    assert refused.error_field == "alias"
    (refused,) = ask(both, Control(id="d", action="update_weights", source="w", donate=True))
    assert refused.error_field == "donate"
    (refused,) = ask(both, Control(id="d", action="update_weights", source="w", running="beside"))
    assert refused.error_field == "running"
    with pytest.raises(BadRequest, match="donate"):
        both.carry_out(Control(id="d", action="update_weights", source="w", donate=True))


def test_an_engine_of_short_steps_does_not_wait_for_one_of_long_steps() -> None:
    slow, fast = FakeRunner(LIMITS), FakeRunner(LIMITS)
    slow.step_s = 0.05
    two = several(slow, fast)
    long = SamplingParams(max_tokens=200, temperature=0.0)
    for i, each in enumerate(two.engines):
        each.submit(Request(id=f"r{i}", prompt_ids=(1, 2), params=long))
    while two.engines[1].busy:
        two.step()
    assert fast.n_collected >= 200 > 10 * slow.n_collected


def test_a_client_drives_it_as_any_engine() -> None:
    messages: queue.SimpleQueue = queue.SimpleQueue()
    two = several(LiveRunner(), LiveRunner())
    client = InprocClient(EngineConfig.of(), lambda config, progress: (two, {}))
    client.start(messages.put)
    for i in range(4):
        client.submit(request(i))
    client.ask(Control(id="p", action="pause", running="finish"))
    client.ask(Control(id="i", action="weight_info"))
    heard = []
    while sum(isinstance(m, HandleReply) for m in heard) < 2:
        heard.append(messages.get(timeout=30.0))
    client.close()
    outputs = [out for m in heard if isinstance(m, Outputs) for out in m.outputs]
    assert len({out.request_id for out in outputs if out.finish is not None}) == 4
    assert all(each.n_steps for each in two.engines)
