"""Step costs: the program that covers a step says its time, and steps correct it."""

import itertools
import random

import pytest

from jserve.ports import StepTime
from jserve.timing.step_costs import ENOUGH, MeasuredCosts
from tests.sched.sched_drive import Drive, request, seconds_of, step_times


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
    for _ in range(9):
        costs.observe(2, 4, 64, 2 * seconds_of(2, 4))
    now = costs.seconds(2, 4, 64)
    assert now == pytest.approx(2 * seconds_of(2, 4), rel=0.1)
    ratio = seconds_of(4, 16) / seconds_of(2, 4)
    assert costs.seconds(4, 16, 64) == pytest.approx(now * ratio), "never seen: as the others"
    for _ in range(60):
        costs.observe(4, 16, 64, seconds_of(4, 16))
    assert costs.seconds(4, 16, 64) == pytest.approx(seconds_of(4, 16), rel=0.05)
    assert costs.seconds(2, 4, 64) == pytest.approx(now, rel=0.25), "its own is kept"


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
        took == pytest.approx(seconds_of(1 + (p > 0 and d > 0), p))
        for d, p, _, took, *_ in seen[:2]
    )
    assert {p for d, p in sizes[2:]} == {0}


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_entry_that_covers_is_found_whatever_is_missing(seed):
    rng = random.Random(seed)
    axes = [sorted(rng.sample(range(1, 20), 3)) for _ in range(3)]
    sizes = rng.sample(list(itertools.product(*axes)), rng.randrange(1, 20))
    table = {size: rng.choice([1.0, 2.0, 3.0, 4.0]) for size in sizes}
    times = [
        StepTime(n_decode=d, n_prefill=p, n_context=c, seconds=s) for (d, p, c), s in table.items()
    ]
    costs = MeasuredCosts(times)
    for size in itertools.product(range(1, 20, 2), repeat=3):
        top = [max(entry[i] for entry in table) for i in range(3)]
        cut = [min(n, most) for n, most in zip(size, top, strict=True)]
        inside = [
            (s, e) for e, s in table.items() if all(a >= b for a, b in zip(e, cut, strict=True))
        ]
        entry = min(inside)[1] if inside else max(table, key=lambda e: (e[0] + e[1], e[2]))
        over = max(1.0, (size[0] + size[1]) / (entry[0] + entry[1]))
        assert costs.seconds(*size) == pytest.approx(table[entry] * over)


def test_a_step_that_drafts_is_another_program():
    """Of one that does not, however cheap; the table says its whole time, making of drafts included."""
    plain = [StepTime(n_decode=d, n_prefill=0, n_context=64, seconds=d * 1e-3) for d in (2, 8)]
    drafts = StepTime(n_decode=4, n_prefill=0, n_context=64, width=4, n_draft=3, seconds=1e-4)
    costs = MeasuredCosts([*plain, drafts])
    assert costs.seconds(1, 0, 64, 1) == 2e-3
    assert costs.seconds(1, 0, 64, 2, 1) == costs.seconds(3, 0, 64, 4, 3) == 1e-4
    for _ in range(60):
        costs.observe(2, 0, 64, 3e-4, 4, 3)
        costs.observe(2, 0, 64, 2e-3, 1, 0)
    assert costs.seconds(2, 0, 64, 4, 3) == pytest.approx(3e-4, rel=0.05)
    assert costs.seconds(2, 0, 64) == pytest.approx(2e-3, rel=0.05)


def test_where_no_drafting_was_measured_it_is_still_learned_apart():
    costs = MeasuredCosts(step_times())
    for _ in range(100):
        costs.observe(2, 0, 64, seconds_of(2, 0))
        costs.observe(2, 0, 64, 5 * seconds_of(2, 0), 1, 3)
    assert costs.seconds(2, 0, 64) == pytest.approx(seconds_of(2, 0), rel=0.02)
    assert costs.seconds(2, 0, 64, 1, 3) == pytest.approx(5 * seconds_of(2, 0), rel=0.02)


def test_a_machine_that_slows_down_slows_programs_that_do_not_run():
    """Else one that rests would look fast for the time it last ran at."""
    costs = MeasuredCosts(step_times())
    for _ in range(20):
        costs.observe(2, 0, 64, seconds_of(2, 0))
        costs.observe(4, 0, 64, seconds_of(4, 0))
    for _ in range(100):
        costs.observe(2, 0, 64, 1.5 * seconds_of(2, 0))
    assert costs.seconds(2, 0, 64) == pytest.approx(1.5 * seconds_of(2, 0), rel=0.01)
    assert 1.15 < costs.seconds(4, 0, 64) / seconds_of(4, 0) < 1.5


def test_a_wild_first_step_is_forgotten():
    """Also where only one program runs from then on: what it was off by was never the machine's."""
    costs = MeasuredCosts(step_times())
    costs.observe(2, 0, 64, 30.0)
    for _ in range(40):
        costs.observe(2, 0, 64, seconds_of(2, 0))
    assert costs.seconds(2, 0, 64) == pytest.approx(seconds_of(2, 0), rel=0.05)
    assert costs.seconds(4, 0, 64) == pytest.approx(seconds_of(4, 0), rel=0.2)
