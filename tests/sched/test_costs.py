"""Step costs: the program that covers a step says its time, and steps correct it."""

import pytest
from sched_drive import Drive, request, seconds_of, step_times

from jserve.ports import StepTime
from jserve.sched.costs import ENOUGH, MeasuredCosts


def test_a_step_costs_what_the_smallest_program_around_it_costs():
    costs = MeasuredCosts(step_times())
    assert costs.known
    assert costs.rungs == (4, 8, 16)
    assert costs.seconds(1, 0, 10) == seconds_of(2, 0)
    assert costs.seconds(3, 5, 64) == seconds_of(4, 8)
    assert costs.seconds(0, 0, 10) == 0.0


def test_above_the_table_time_grows_with_the_tokens():
    costs = MeasuredCosts(step_times())
    assert costs.seconds(4, 36, 64) == pytest.approx(2 * seconds_of(4, 16))


def test_a_table_with_holes_takes_the_cheapest_that_covers():
    t = [
        StepTime(n_decode=2, n_prefill=32, n_context=64, seconds=3e-3),
        StepTime(n_decode=8, n_prefill=64, n_context=64, seconds=9e-3),
        StepTime(n_decode=8, n_prefill=128, n_context=64, seconds=12e-3),
    ]
    costs = MeasuredCosts(t)
    assert costs.seconds(5, 10, 1) == 9e-3, "(8, 32) was not measured"
    assert costs.seconds(2, 10, 1) == 3e-3


def test_steps_correct_their_program_and_the_others_they_have_not_seen():
    costs = MeasuredCosts(step_times())
    for _ in range(5):
        costs.observe(2, 4, 64, 2 * seconds_of(2, 4))
    assert costs.seconds(2, 4, 64) == pytest.approx(2 * seconds_of(2, 4))
    assert costs.seconds(4, 16, 64) == pytest.approx(2 * seconds_of(4, 16)), "never seen: the mean"
    for _ in range(60):
        costs.observe(4, 16, 64, seconds_of(4, 16))
    assert costs.seconds(4, 16, 64) == pytest.approx(seconds_of(4, 16), rel=0.05)
    assert costs.seconds(2, 4, 64) == pytest.approx(2 * seconds_of(2, 4)), "its own is kept"


def test_one_wild_step_moves_little():
    costs = MeasuredCosts(step_times())
    for _ in range(20):
        costs.observe(2, 4, 64, seconds_of(2, 4))
    costs.observe(2, 4, 64, 30.0)
    assert costs.seconds(2, 4, 64) < 1.4 * seconds_of(2, 4)


def test_without_a_measurement_it_learns_from_the_steps():
    costs = MeasuredCosts()
    assert not costs.known
    assert costs.seconds(8, 0, 100) > 0
    for _ in range(ENOUGH):
        costs.observe(8, 0, 100, 0.05)
        costs.observe(8, 256, 100, 0.4)
    assert costs.known
    assert costs.seconds(8, 0, 100) == pytest.approx(0.05, rel=0.01)
    assert costs.seconds(8, 256, 100) == pytest.approx(0.4, rel=0.01)


def test_a_step_that_took_no_time_teaches_nothing():
    costs = MeasuredCosts()
    for _ in range(2 * ENOUGH):
        costs.observe(8, 0, 100, 0.0)
    assert not costs.known


def test_the_scheduler_learns_the_size_of_its_steps():
    """Decode rows and prefill tokens are told apart, whatever the order of the requests."""
    seen = []
    drive = Drive(depth=1)
    drive.scheduler.costs.observe = lambda *size: seen.append(size)
    drive.add(request("a", [1] * 5, max_tokens=6))
    drive.step()
    drive.add(request("b", [2] * 7, max_tokens=2))
    drive.run()
    sizes = [size[:2] for size in seen]
    assert sizes[:2] == [(0, 5), (1, 7)]
    assert all(
        took == pytest.approx(seconds_of(1 + (p > 0 and d > 0), p)) for d, p, _, took, _ in seen[:2]
    )
    assert {p for d, p in sizes[2:]} == {0}
