"""Drafts that the device copies, and the proposer of the host that shadows it."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.ports import RunnerLimits
from jserve.speculation.host.lookup import Lookup
from jserve.speculation.host.ngram import NgramIndex
from tests.sched.sched_drive import request
from tests.speculation.policy.test_device_drafting import Watched, device_limits


def copying(**changes) -> RunnerLimits:
    return device_limits(drafts_from_kv=False, drafts_from_text=True, **changes)


def shadow() -> Lookup:
    return Lookup("ngram", lambda: (NgramIndex(2, 4, 1000),))


def repeats(id: str = "a", n: int = 200, **more):
    """One token is allowed: the text copies itself from the third on."""
    return request(id, [1, 2, 3], max_tokens=n, allowed_token_ids=(4,), **more)


def wanders(id: str = "w", n: int = 200, **more):
    return request(id, [1, 2, 3], max_tokens=n, **more)


def total(drive, name: str) -> float:
    return sum(v for k, v in drive.scheduler.counters().items() if k.startswith(name))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_waits_and_what_repeats_is_drafted(depth):
    drive = Watched(copying(), depth=depth, proposer=shadow())
    drive.add(repeats())
    waits = []
    while drive.scheduler.has_work:
        drive.step()
        waits.append(drive.scheduler.speculation.waits(drive.scheduler.resources.running, None))
    assert not any(waits), "a step waited for the host"
    assert drive.stood > 120
    assert drive.stood > 0.8 * drive.tried
    assert drive.n_steps < 100
    told = [k for k in drive.scheduler.counters() if "num_accepted_tokens_total" in k]
    assert told
    assert all("ngram" in k for k in told)
    assert total(drive, "spec_decode_num_accepted_tokens_total") == drive.stood


@pytest.mark.slow
def test_it_drafts_at_once_when_a_text_begins_to_copy_and_never_probes():
    """What drafts would have brought is seen in every text: no step is spent to find out."""
    drive = Watched(copying(step_times=slow()), depth=1, proposer=shadow())
    for i in range(8):
        drive.add(wanders(f"w{i}", 390))
        drive.run()
    assert drive.n_steps > 3000
    assert drive.tried == 0, "a probe although a shadow tells"
    drive.add(repeats(n=60))
    before = drive.n_steps
    while not drive.n_drafting:
        drive.step()
    assert drive.n_steps <= before + 2 * 7, "the second round of seven drafts that stood was enough"
    drive.run()
    assert drive.stood > 30


def slow():
    """Verify steps that a few drafts in a hundred do not pay for."""
    times = []
    for t in device_limits().step_times:
        times.append(dataclasses.replace(t, seconds=t.seconds * (1.6 if t.n_draft else 1.0)))
    return tuple(times)


def test_a_prompt_is_not_made_dearer_for_one_step_sooner():
    """Beside prompts a drafter that keeps nothing can as well begin a step later."""
    times = tuple(
        dataclasses.replace(t, seconds=t.seconds * (3.0 if t.n_draft and t.n_prefill else 1.0))
        for t in device_limits().step_times
    )
    drive = Watched(copying(step_times=times), depth=1, proposer=shadow())
    drive.add(repeats())
    drive.step()
    assert drive.flight[0].plan.n_draft == 0
    drive.run()
    assert drive.stood > 100


def test_every_sequence_brings_its_text_also_after_it_gave_way():
    drive = Watched(copying(n_pages=60), depth=1, proposer=shadow())
    for i in range(2):
        drive.add(repeats(f"a{i}", 60))
        drive.step()
    for _ in range(6):
        drive.step()
    drive.preempt(0)
    drive.run()  # the fake compares the slot's text with the sequence's at every draft
    assert drive.stood > 60
