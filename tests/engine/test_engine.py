"""The loop: order of calls at each overlap depth, the inbox, and steps that raise."""

from __future__ import annotations

import pytest

from jserve.engine.engine import Engine
from jserve.errors import EngineDead
from jserve.types import Finish
from tests.engine.fakes import FakeRunner, FakeScheduler, ResettableRunner, expected, request


def engine_of(runner=None, **options):
    return Engine(FakeScheduler(), runner or FakeRunner(), **options)  # type: ignore[arg-type]


def tokens_of(outputs, id, index=0):
    return [
        t for out in outputs if (out.request_id, out.index) == (id, index) for t in out.token_ids
    ]


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_every_overlap_gives_the_same_tokens(overlap):
    engine = engine_of(overlap=overlap)
    requests = [request(f"r{i}", n_prompt=i + 1, max_tokens=3 + i, n=2) for i in range(5)]
    for r in requests:
        engine.submit(r)
    outputs = engine.drain()
    for r in requests:
        for index in range(2):
            assert tokens_of(outputs, r.id, index) == expected(r, index)
    assert not engine.busy
    assert engine.n_in_flight == 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_steps_ahead_of_the_awaited_one_are_as_many_as_asked_for(overlap):
    runner = FakeRunner()
    engine = engine_of(runner, overlap=overlap)
    engine.submit(request("a", max_tokens=6))
    engine.drain()
    ahead = most = 0
    for what, _ in runner.log:
        ahead += 1 if what == "launch" else -1
        most = max(most, ahead)
    assert most == overlap + 1
    assert [n for what, n in runner.log if what == "collect"] == list(range(6))


def test_step_returns_what_it_committed():
    engine = engine_of(overlap=0)
    engine.submit(request("a", max_tokens=1))
    assert engine.busy
    (out,) = engine.step()
    assert (out.token_ids, out.finish) == ((expected(request("a"))[0],), Finish.LENGTH)
    assert engine.step() == []
    assert engine.n_steps == 1


@pytest.mark.parametrize(("id", "code"), [("full", "overloaded"), ("long", "invalid_value")])
def test_a_refused_request_is_answered_once_per_choice(id, code):
    engine = engine_of()
    engine.submit(request(id, n_prompt=5000 if id == "long" else 1, n=3))
    outputs = engine.drain()
    assert [o.index for o in outputs] == [0, 1, 2]
    assert {(o.finish, o.error_code) for o in outputs} == {(Finish.ERROR, code)}
    assert all(o.error for o in outputs)


def test_cancel_ends_a_request_in_flight():
    engine = engine_of(overlap=1)
    engine.submit(request("a", max_tokens=100))
    engine.submit(request("b", max_tokens=5))
    engine.step()
    engine.cancel("a")
    outputs = engine.drain()
    assert [o.finish for o in outputs if o.request_id == "a" and o.finish] == [Finish.ABORT]
    assert tokens_of(outputs, "b") == expected(request("b", max_tokens=5))


def test_cancel_of_one_choice_leaves_the_others():
    engine = engine_of(overlap=0)
    engine.submit(request("a", max_tokens=4, n=2))
    engine.step()
    engine.cancel("a", 1)
    outputs = engine.drain()
    assert [(o.index, o.finish) for o in outputs if o.finish] == [
        (1, Finish.ABORT),
        (0, Finish.LENGTH),
    ]


def test_cancel_of_an_unknown_id_is_nothing():
    engine = engine_of()
    engine.cancel("nobody")
    assert engine.drain() == []


def fault_runner(*calls):
    """A resettable runner whose ``calls`` ("launch 3", ...) raise, each once."""
    left = list(calls)

    def before(what, n):
        if f"{what} {n}" in left:
            left.remove(f"{what} {n}")
            raise RuntimeError("device fault")

    return ResettableRunner(before=before)


def end_of(outputs, id):
    (end,) = [o.finish for o in outputs if o.request_id == id and o.finish]
    return end


@pytest.mark.parametrize("what", ["launch", "collect"])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_first_fault_while_all_decode_is_tried_again(what, overlap):
    runner = fault_runner(f"{what} 5")
    engine = engine_of(runner, overlap=overlap)
    requests = [request("a", max_tokens=20), request("b", max_tokens=9)]
    for r in requests:
        engine.submit(r)
    outputs = engine.drain()
    assert (runner.n_resets, engine.scheduler.n_resets) == (1, 1)
    for r in requests:
        assert tokens_of(outputs, r.id) == expected(r)
        assert end_of(outputs, r.id) is Finish.LENGTH


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("what", ["launch", "collect"])
def test_every_plan_is_committed_or_given_up_once(what, overlap):
    engine = engine_of(fault_runner(f"{what} 3"), overlap=overlap)
    engine.submit(request("a", max_tokens=9))
    engine.drain()
    scheduler = engine.scheduler
    assert sorted([*scheduler.committed, *scheduler.lost]) == scheduler.planned
    assert 1 <= len(scheduler.lost) <= overlap + 1


def test_a_runner_without_reset_dies_with_its_step():
    def before(what, n):
        raise RuntimeError("device fault")

    engine = engine_of(FakeRunner(before=before))
    engine.submit(request("a"))
    with pytest.raises(EngineDead, match="RuntimeError"):
        engine.drain()


def test_a_runner_that_cannot_be_reset_dies():
    runner = fault_runner("collect 1")
    runner.reset = lambda: 1 / 0  # type: ignore[method-assign,assignment]
    engine = engine_of(runner)
    engine.submit(request("a"))
    with pytest.raises(EngineDead, match="reset after it with ZeroDivisionError"):
        engine.drain()


def test_a_fault_of_the_scheduler_is_not_survived():
    engine = engine_of(ResettableRunner())
    engine.scheduler.commit = lambda *a: 1 / 0  # type: ignore[method-assign,assignment]
    engine.submit(request("a"))
    with pytest.raises(ZeroDivisionError):
        engine.drain()


def test_stats_are_those_of_the_scheduler():
    engine = engine_of(overlap=1)
    engine.submit(request("a"))
    engine.step()
    stats = engine.stats()
    assert (stats.step, stats.running, stats.in_flight) == (0, 1, 1)
    updates = {"weight_updates_total": 0, "weight_update_seconds_total": 0}
    assert stats.values == {"resets_total": 0, "paused": 0} | updates
