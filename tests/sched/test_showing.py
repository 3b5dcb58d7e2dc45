"""What a drafter has yet to be shown, when its sequence starts over: nothing of before counts any more."""

from __future__ import annotations

import pytest
from test_ahead import Watched, long, sleepy


def half_shown(depth: int, **options) -> Watched:
    """A sequence whose drafter slept and was shown a part of what it missed; the rest, and all that
    starting over takes, would fit one step."""
    drive = Watched(sleepy(max_prefill_tokens=200), depth=depth, **options)
    drive.scheduler.drafting.fix(0)
    drive.add(long("a", 200))
    for _ in range(40):
        drive.step()
    assert not drive.awake
    (seq,) = drive.scheduler.floor.running
    missing = drive.scheduler.drafting.showing.missing
    drive.scheduler.drafting.fix(3)
    while missing(seq) > 30:
        drive.step()
    assert missing(seq) > 8
    return drive


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_after_a_fault(depth: int) -> None:
    drive = half_shown(depth)
    drive.runner.fail_next = RuntimeError("the step raised")
    drive.run()
    assert drive.n_faults == 1
    assert drive.stood == drive.tried > 50


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_after_a_fault_asleep(depth: int) -> None:
    drive = half_shown(depth)
    drive.scheduler.drafting.fix(0)
    drive.step()
    drive.runner.fail_next = RuntimeError("the step raised")
    for _ in range(3 + depth):
        drive.step()
    assert drive.n_faults == 1
    drive.scheduler.drafting.fix(3)
    drive.run()
    assert drive.stood == drive.tried > 50


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_after_giving_way(depth: int, prefix_caching: bool) -> None:
    drive = half_shown(depth, prefix_caching=prefix_caching)
    drive.preempt(0)
    drive.run()
    assert drive.stood == drive.tried > 50
