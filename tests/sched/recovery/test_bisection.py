"""Steps that raise: exactly the requests at fault end, everyone else gets the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from jserve.engine.engine import Engine
from jserve.errors import EngineDead
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.types import Finish
from tests.engine.test_with_scheduler import CONFIG, LIMITS, by_choice, run, workload


class Poisoned(FakeRunner):
    """Raises in every step that holds a row of a request in ``poison`` from position ``at`` on."""

    def __init__(self, poison: set[str], *, where: str, at: int = 0) -> None:
        self.poison, self.where, self.at = poison, where, at
        self.n_resets = -1
        super().__init__(LIMITS)

    def reset(self) -> None:
        self.n_resets += 1
        super().reset()

    def launch(self, plan):
        self._look("launch", plan)
        return super().launch(plan)

    def collect(self, flight):
        self._look("collect", flight.plan)
        return super().collect(flight)

    def _look(self, where, plan):
        for row in plan.rows:
            poisoned = self.where == where and row.choice.request.id in self.poison
            if poisoned and row.start + row.count > self.at:
                raise RuntimeError("device words")


class Tick:
    """A clock of 10 ms per look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def check(engine, requests, outputs, poison):
    """Each choice has one end; the poisoned ones' is an error, the others' tokens are exact."""
    found = by_choice(outputs)
    for r in requests:
        for i in range(r.params.n):
            tokens, ends = found[r.id, i]
            expected = engine.runner.expected(r, i)
            if r.id in poison:
                assert ends == [Finish.ERROR]
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, ends) == (expected, [Finish.LENGTH]), r.id
    engine.scheduler.resources.check()
    stats = engine.scheduler.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert not engine.busy


@pytest.mark.one_in(4)
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("n_poison", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_exactly_the_culprits_end(overlap, where, n_poison, seed, tmp_path: Path):
    rng = random.Random(seed)
    requests = workload(rng, n=14)
    poison = {r.id for r in rng.sample(requests, n_poison)}
    with (tmp_path / "journal").open("wb") as file:
        scheduler = Scheduler(LIMITS, CONFIG, journal=JournalFile(file))
        engine = Engine(scheduler, Poisoned(poison, where=where), overlap=overlap, clock=Tick())
        outputs = run(engine, requests, rng)
    check(engine, requests, outputs, poison)
    assert scheduler.counters()["requests_faulty_total"] == n_poison
    assert replay(tmp_path / "journal", LIMITS, CONFIG).outputs == outputs


@pytest.mark.parametrize("n_poison", range(1, 6))
def test_all_but_one_of_those_who_run_together(n_poison):
    """Every subset size of six that run in one step, in every arrangement of who arrives first."""
    for seed in range(8):
        rng = random.Random(seed)
        requests = [r for r in workload(rng, n=12) if r.params.n == 1]
        poison = {r.id for r in rng.sample(requests, n_poison)}
        engine = Engine(Scheduler(LIMITS, CONFIG), Poisoned(poison, where="collect"), clock=Tick())
        for r in requests:
            engine.submit(r)
        check(engine, requests, engine.drain(), poison)


@pytest.mark.parametrize("at", [3, 9, 14, 20])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_culprit_at_a_later_position_keeps_what_it_said(at, overlap):
    """It passes while it is recomputed to where it was, and is found there."""
    rng = random.Random(at)
    requests = workload(rng, n=8)
    reaching = [r.id for r in requests if len(r.prompt_ids) + r.params.max_tokens > at + 1]
    poison = {reaching[0]}
    runner = Poisoned(poison, where="collect", at=at)
    engine = Engine(Scheduler(LIMITS, CONFIG), runner, overlap=overlap, clock=Tick())
    for r in requests:
        engine.submit(r)
    check(engine, requests, engine.drain(), poison)


def test_one_culprit_among_many_costs_few_steps_that_raise():
    requests = workload(random.Random(1), n=6)
    runner = Poisoned({"r3"}, where="collect")
    engine = Engine(Scheduler(LIMITS, CONFIG), runner, clock=Tick())
    for r in requests:
        engine.submit(r)
    engine.drain()
    assert runner.n_resets <= 5, "halving six takes a first fault and at most four more"


def test_a_fault_that_does_not_come_back_is_nobodys():
    class Once(Poisoned):
        def _look(self, where, plan):
            if where == "collect" and self.n_resets == 0 and plan.id == 3:
                raise RuntimeError("device words")

    (r,) = requests = workload(random.Random(2), n=1)
    engine = Engine(Scheduler(LIMITS, CONFIG), Once(set(), where=""), clock=Tick())
    engine.submit(r)
    check(engine, requests, engine.drain(), set())


class Broken(Poisoned):
    """A device on which nothing works any more from step ``first`` on."""

    def __init__(self, first: int) -> None:
        self.first = first
        super().__init__(set(), where="")

    def _look(self, where, plan):
        if plan.id >= self.first:
            raise RuntimeError("device words")


@pytest.mark.parametrize("first", [0, 7])
def test_a_device_on_which_nothing_works_ends_the_engine(first):
    engine = Engine(Scheduler(LIMITS, CONFIG), Broken(first), clock=Tick())
    for r in workload(random.Random(3), n=12):
        engine.submit(r)
    with pytest.raises(EngineDead, match="RuntimeError, with 8 requests"):
        engine.drain()


@pytest.mark.parametrize(("gap_s", "dies"), [(1.0, True), (70.0, False)])
def test_faults_without_a_culprit_end_the_engine_when_they_come_close(gap_s, dies):
    class Flaky(Poisoned):
        due = 0

        def _look(self, where, plan):
            if where == "collect" and self.due == plan.rows[0].choice.request.id:
                self.due = 0
                raise RuntimeError("device words")

    clock, runner = Tick(), Flaky(set(), where="")
    engine = Engine(Scheduler(LIMITS, CONFIG), runner, clock=clock)

    def one(r):
        clock.now += gap_s
        runner.due = r.id
        engine.submit(r)
        return engine.drain()

    first, second, third, after = workload(random.Random(4), n=4)
    assert one(first)[-1].finish is Finish.LENGTH
    assert one(second)[-1].finish is Finish.LENGTH
    if dies:
        one(third)  # the third verdict of "nobody"; the fourth fault finds it
        with pytest.raises(EngineDead, match="no request is to blame"):
            one(after)
    else:
        assert one(third)[-1].finish is Finish.LENGTH
        assert one(after)[-1].finish is Finish.LENGTH


def test_new_requests_wait_while_others_are_on_trial_and_cancels_do_not():
    requests = workload(random.Random(5), n=8)
    runner = Poisoned({"r1"}, where="collect")
    engine = Engine(Scheduler(LIMITS, CONFIG), runner, clock=Tick())
    for r in requests[:4]:
        engine.submit(r)
    outputs = []
    while not runner.n_resets:
        outputs += engine.step()
    bisection = engine.scheduler.bisection
    held = [seq for seq in engine.scheduler.resources.waiting if bisection.holds(seq)]
    assert held, "someone must wait while the first half is tried"
    for id in {
        seq.request.id for seq in engine.scheduler.resources.waiting if not bisection.holds(seq)
    }:
        engine.cancel(id)  # everyone on trial leaves: the next ones' turn
    for r in requests[4:]:
        engine.submit(r)
    outputs += engine.drain()
    ends = [out.finish for out in outputs if out.finish]
    assert len(ends) == sum(r.params.n for r in requests)
    assert not engine.busy
