"""The work of requests in device seconds: one a second is what a full engine can do."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.sched.admission.demand import FIRST_GUESS
from jserve.sched.scheduler import Scheduler
from jserve.sim import traffic
from jserve.sim.costs import Device
from jserve.sim.simulate import Run, simulate
from jserve.types import Finish, Lane
from tests.sched.sched_drive import config, limits, request, step_times
from tests.sim.test_simulate import setup


class Roofline:
    """Reads its weights in 20 ms, and adds what rows, context and prompt tokens take."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        return 0.02 + n_decode * (2e-4 + 1e-7 * n_context) + 1e-4 * n_prefill


def served(text: str) -> Run:
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "page_size": 16}
    options |= {"max_queue_s": 0, "max_waiting": 10_000}
    device = Device(name="x", costs=Roofline(), n_pages=4000, max_model_len=8192)
    made = dataclasses.replace(setup(options=options), device=device)
    return simulate(traffic.generate(traffic.parse(text), 2), made)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "text",
    [
        "prompt=200,output=100,rate=40,n=800",
        "prompt=200,output=100,rate=40,n=800,limit=2000",
        "prompt=16,output=300,rate=20,n=500",
        "prompt=2000,output=20,rate=10,n=300",
        "prefixes=4,prefix=600,prompt=50,output=60,rate=40,n=800",
    ],
)
def test_an_engine_that_cannot_keep_up_is_offered_a_second_a_second(text):
    """Long answers, short ones, prompts that fill all steps, prefixes; lengths that are stated and that are not."""
    run = served(text)
    assert run.busy_s == pytest.approx(run.seconds, rel=0.05)
    assert run.counters["offered_seconds_total"] == pytest.approx(run.busy_s, rel=0.2)


def test_a_quiet_engine_is_busy_and_has_room():
    run = served("prompt=200,output=100,rate=4,n=200")
    assert run.busy_s > 0.8 * run.seconds
    assert run.counters["offered_seconds_total"] < 0.45 * run.seconds


def test_what_the_cache_saves_is_not_offered():
    many, few = (f"prefixes={n},prefix=600,prompt=50,output=60,rate=5,n=200" for n in (200, 2))
    cold, warm = served(many).counters, served(few).counters
    assert warm["offered_seconds_total"] < 0.8 * cold["offered_seconds_total"]
    assert warm["saved_seconds_total"] > 1.5 * cold["saved_seconds_total"] > 0
    sums = [one["offered_seconds_total"] + one["saved_seconds_total"] for one in (cold, warm)]
    assert sums[0] == pytest.approx(sums[1], rel=0.1), "priced alike"


def scheduler_of() -> Scheduler:
    return Scheduler(limits(step_times=step_times()), config())


def offered(scheduler: Scheduler) -> float:
    return scheduler.counters()["offered_seconds_total"]


def test_an_answer_that_ends_early_is_taken_off_what_follows():
    scheduler = scheduler_of()
    assert scheduler.resources.lengths.expected(Lane.STANDARD, 400, FIRST_GUESS) == FIRST_GUESS
    scheduler.submit(request("a", range(8), max_tokens=40), 0.0)
    first = offered(scheduler)
    assert scheduler.plan(0.0) is not None
    [out] = scheduler.cancel("a")
    assert out.finish is Finish.ABORT
    assert offered(scheduler) == first, "a counter never falls"
    scheduler.submit(request("b", range(8), max_tokens=40), 0.0)
    assert 1.01 * first < offered(scheduler) < 1.5 * first, "its prompt was computed"
    assert not scheduler.demand._counted.keys() - {("b", 0)}


def test_what_is_cancelled_while_it_waits_is_no_work():
    """As a request that goes to another replica, which counts it there."""
    scheduler = scheduler_of()
    scheduler.submit(request("a", range(8), max_tokens=40), 0.0)
    first = offered(scheduler)
    scheduler.cancel("a")
    scheduler.submit(request("b", range(8), max_tokens=40), 0.0)
    assert offered(scheduler) == pytest.approx(first)


def test_choices_share_their_prompt():
    one, four = scheduler_of(), scheduler_of()
    one.submit(request("a", [1] * 40, max_tokens=1), 0.0)
    four.submit(request("a", [1] * 40, max_tokens=1, n=4), 0.0)
    assert offered(one) < offered(four) < 2 * offered(one)
