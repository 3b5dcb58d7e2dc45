"""What a drafter has yet to be shown, when its sequence starts over: nothing of before counts any more."""

from __future__ import annotations

import pytest

from tests.sched.sched_drive import request
from tests.speculation.policy.test_device_drafting import ALLOWED, Watched, device_limits, long


def half_shown(depth: int, **options) -> Watched:
    """A sequence that was off and was shown a part of what it missed; the rest, and all that
    starting over takes, would fit one step."""
    drive = Watched(device_limits(max_prefill_tokens=200), depth=depth, **options)
    drive.scheduler.speculation.fix(0)
    drive.add(long("a", 200))
    for _ in range(40):
        drive.step()
    assert not drive.n_drafting
    (seq,) = drive.scheduler.resources.running
    missing = drive.scheduler.speculation.backfill.missing
    drive.scheduler.speculation.fix(3)
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
def test_after_a_fault_while_off(depth: int) -> None:
    drive = half_shown(depth)
    drive.scheduler.speculation.fix(0)
    drive.step()
    drive.runner.fail_next = RuntimeError("the step raised")
    for _ in range(3 + depth):
        drive.step()
    assert drive.n_faults == 1
    drive.scheduler.speculation.fix(3)
    drive.run()
    assert drive.stood == drive.tried > 50


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_after_giving_way(depth: int, prefix_caching: bool) -> None:
    drive = half_shown(depth, prefix_caching=prefix_caching)
    drive.preempt(0)
    drive.run()
    assert drive.stood == drive.tried > 50


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_pages_come_back_from_host_memory_as_they_went(depth: int, drafting: bool) -> None:
    """A prefix that was computed ``drafting`` or not goes to host memory and comes back into pages of which
    the opposite held last."""
    drive = Watched(device_limits(n_pages=17, max_model_len=64, n_host_pages=40), depth=depth)
    prompt = [1, 2, 3, 4] * 6
    drive.scheduler.speculation.fix(3 if drafting else 0)
    drive.add(request("a", [*prompt, 5], max_tokens=2, allowed_token_ids=ALLOWED))
    drive.run()
    drive.scheduler.speculation.fix(0 if drafting else 3)
    drive.add(request("b", [6] * 40, max_tokens=24, allowed_token_ids=ALLOWED))
    drive.run()
    drive.scheduler.speculation.fix(3)
    drive.tried = drive.stood = drive.shown = 0
    drive.add(request("c", [*prompt, 7], max_tokens=20, allowed_token_ids=ALLOWED))
    drive.run()
    assert drive.scheduler.counters()["host_pages_loaded_total"] > 2
    assert drive.shown == 0 if drafting else drive.shown >= len(prompt) - 4
    assert drive.stood == drive.tried > 0
