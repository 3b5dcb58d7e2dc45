"""A device that is slower than it was is told from steps that have more to do."""

from __future__ import annotations

import pytest

from jserve.timing.slowness import FIRST, Slowness
from tests.sched.sched_drive import Drive, limits, request, step_times


def run(
    slowness: Slowness, seconds: float, n: int, *, program: str = "a", n_kv: int = 100
) -> float:
    for i in range(n):
        slowness.observe(program, n_kv, seconds * (1.0 + 0.1 * (i % 3)))
    return slowness.value


def test_it_follows_the_machine_and_comes_back():
    slowness = Slowness()
    assert run(slowness, 1.0, FIRST) == 0.0, "nothing is usual yet"
    assert run(slowness, 1.0, 100) == pytest.approx(1.0, abs=0.1)
    assert run(slowness, 8.0, 100) == pytest.approx(8.0, rel=0.2)
    assert run(slowness, 8.0, 5000) > 7.0, "what is slow does not become usual"
    assert run(slowness, 1.0, 100) == pytest.approx(1.0, abs=0.2)


def test_one_step_is_no_trend():
    slowness = Slowness()
    run(slowness, 1.0, 100)
    slowness.observe("a", 100, 1e4)
    assert slowness.value < 2.5
    slowness.observe("a", 100, 0.0)
    assert slowness.value < 2.5, "a step of no time says nothing"


def test_other_programs_and_longer_contexts_are_another_matter():
    slowness = Slowness()
    run(slowness, 1.0, 100)
    assert run(slowness, 30.0, 50, program="b") < 1.5
    assert run(slowness, 30.0, 50, n_kv=4000) < 1.5
    assert run(slowness, 5.0, 50, n_kv=127) > 3.0, "within a factor of two it is the same"


def test_a_little_slower_becomes_usual():
    slowness = Slowness()
    run(slowness, 1.0, 100)
    run(slowness, 1.6, 2000)
    assert slowness.value == pytest.approx(1.0, abs=0.1)


def test_the_scheduler_tells_it():
    drive = Drive(limits(step_times=step_times()), depth=0)
    drive.add(request("a", [1, 2, 3], max_tokens=40, ignore_eos=True))
    drive.run()
    assert drive.scheduler.counters()["step_slowness"] == drive.scheduler.slowness.value > 0.0
