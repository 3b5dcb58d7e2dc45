"""A drafter of the device that sleeps and wakes: what it pays, what it missed, and that nobody notices."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from jserve.config import SpeculativeOptions
from jserve.ports import RunnerLimits, StepTime
from jserve.speculation.policy.device_drafts import FIRST_STEPS, DeviceDraftPolicy
from jserve.speculation.policy.draft_kv_backfill import DraftKVBackfill
from jserve.speculation.policy.row_drafts import AcceptanceStats, StepLoad
from jserve.timing.host_gaps import HostGaps
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import Sequence
from tests.sched.sched_drive import VOCAB, Drive, limits, request

ALLOWED = tuple(range(VOCAB - 1))


def times(per_token: float = 0.02) -> tuple[StepTime, ...]:
    """Steps of 1 ms and a little per token; those that draft take a tenth of that per draft."""
    return tuple(
        StepTime(
            n_decode=d,
            n_prefill=p,
            n_context=400,
            width=w,
            n_draft=n,
            seconds=1e-3 * (1 + per_token * (d * w + p) + 0.1 * per_token * n),
        )
        for d in (1, 2, 4)
        for p in (0, 16)
        for w, n in ((1, 0), (4, 3), (8, 7))
    )


def sleepy(**changes) -> RunnerLimits:
    base = {
        "max_drafts": 7,
        "device_drafts": 7,
        "draft_rows": 2,
        "prefill_width": 4,
        "drafts_from_kv": True,
        "max_model_len": 400,
        "n_pages": 400,
        "step_times": times(),
    }
    return limits(**(base | changes))


class Watched(Drive):
    """Notes what rows tried and what stood, and tokens that were shown again."""

    def __init__(self, lim, **options):
        super().__init__(lim, **options)
        self.runner.acceptance = 1.0
        self.tried = self.stood = self.shown = self.asleep = self.active = 0

    def commit(self) -> None:
        plan = self.flight[0].plan
        n_ok_R = self.flight[0].handle[1].n_ok_R
        for row, n_ok in zip(plan.rows, n_ok_R.tolist(), strict=True):
            self.tried += len(row.drafts)
            self.stood += n_ok - 1 if row.drafts else 0
            self.shown += row.count if row.backfill else 0
        self.active += plan.n_draft > 0
        self.asleep += not plan.n_draft
        super().commit()


def long(id: str, n: int = 300, **more):
    return request(id, [1, 2, 3], max_tokens=n, allowed_token_ids=ALLOWED, **more)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_it_sleeps_through_a_crowd_and_catches_up_after_it(depth):
    drive = Watched(sleepy(), depth=depth)
    drive.add(long("a"))
    for _ in range(6):
        drive.step()
    assert drive.tried > 0
    for i in range(3):
        drive.add(long(f"b{i}", 20))
    before = drive.active
    for _ in range(12):
        drive.step()
    assert drive.active <= before + depth, "too many rows for any program that drafts"
    tried = drive.tried
    drive.run()
    assert drive.shown >= 10, "what it missed was not made up for"
    assert drive.tried > tried + 100
    assert drive.stood == drive.tried, "it drafted half blind"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("n_pages", [200, 30])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_every_draft_it_uses_was_made_with_open_eyes(seed, n_pages, depth):
    """Crowds come and go, prompts share prefixes that were computed while it slept, sequences give way
    and come back: with a perfect drafter every draft that is tried stands."""
    rng = random.Random(seed)
    drive = Watched(sleepy(n_pages=n_pages, max_model_len=100), depth=depth)
    for i in range(14):
        prompt = [1, 2, 3, 4] * rng.randrange(1, 6) + [rng.randrange(9) for _ in range(3)]
        n = rng.choice([4, 12, 40])
        drive.add(request(f"r{i}", prompt, max_tokens=n, allowed_token_ids=ALLOWED))
        for _ in range(rng.choice([0, 1, 9, 30])):
            drive.step()
        if rng.random() < 0.3:
            drive.preempt(rng.randrange(4))
        if i == 7 and seed == 0:
            drive.runner.fail_next = RuntimeError("the step raised")
    drive.run()
    assert drive.asleep
    assert drive.tried > 20
    assert drive.stood == drive.tried


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_it_missed_begins_at_what_is_known(depth):
    """Rows in flight whose drafts fall end before their bound, and there it falls asleep."""
    drive = Watched(sleepy(), depth=depth)
    drive.scheduler.speculation.fix(7)
    drive.runner.acceptance = 0.3
    drive.add(long("a"))
    for _ in range(9):
        drive.step()
    assert drive.stood < drive.tried
    for i in range(3):
        drive.add(long(f"b{i}", 20))
    for _ in range(8):
        drive.step()
    drive.runner.acceptance = 1.0
    tried, stood = drive.tried, drive.stood
    drive.run()
    assert drive.tried > tried + 100
    assert drive.stood - stood == drive.tried - tried


def test_the_times_of_steps_are_learned_with_what_they_drafted():
    drive = Watched(sleepy())
    seen, plans = [], []
    drive.scheduler.costs.observe = lambda *size: seen.append(size[4:])
    commit = drive.scheduler.commit
    drive.scheduler.commit = lambda plan, *rest: plans.append(plan) or commit(plan, *rest)
    drive.add(long("a", 40))
    drive.run()
    rows = [[row.count for row in plan.rows if row.from_slot] for plan in plans]
    assert seen == [(max(n, default=1), plan.n_draft) for n, plan in zip(rows, plans, strict=True)]
    assert {n for _, n in seen} >= {3, 7}


def test_without_kv_of_its_own_nothing_is_shown():
    drive = Watched(sleepy(drafts_from_kv=False))
    drive.add(long("a"))
    for i in range(3):
        drive.add(long(f"b{i}", 20))
    drive.run()
    assert not drive.shown
    assert not drive.scheduler.speculation.backfill._of
    assert drive.stood == drive.tried > 100


def test_a_request_that_says_no_is_never_shown():
    drive = Watched(sleepy())
    drive.add(dataclasses.replace(long("a"), speculative=False))
    drive.run()
    assert drive.tried == drive.shown == drive.active == 0


def test_nothing_is_kept_of_who_is_over():
    drive = Watched(sleepy(), depth=2)
    for i in range(6):
        drive.add(long(f"r{i}", 10))
    drive.cancel("r2")
    drive.run()
    assert not drive.scheduler.speculation.backfill._of
    assert not len(drive.scheduler.speculation)


# --- the choice alone


class Plain(DraftKVBackfill):
    """Says what is missing instead of counting."""

    def __init__(self, n_missing: int = 0) -> None:
        super().__init__(sleepy(), MeasuredCosts())
        self.n_missing = n_missing

    def missing(self, seq: Sequence) -> int:
        return self.n_missing


def rows(n: int) -> list[Sequence]:
    return [
        Sequence(request=long(f"s{i}"), index=0, seed=i, tokens=[1] * 50, n_prompt=50, max_len=400)
        for i in range(n)
    ]


def policy(
    acceptance: float,
    *,
    n_missing: int = 0,
    left: float = 100.0,
    per_token: float = 0.02,
    new: bool = False,
    **lim,
) -> DeviceDraftPolicy:
    """A choice over a proposer whose drafts stood with that chance so far, in an engine that has drafted
    before."""
    acceptance = AcceptanceStats(7)
    rng = random.Random(0)
    for seq in rows(1):
        for _ in range(500):
            n = next((j for j in range(7) if rng.random() >= acceptance), 7)
            acceptance.rates.add(7, n, seq.request.lane)
    made = DeviceDraftPolicy(
        sleepy(draft_rows=4, step_times=(), **lim),
        MeasuredCosts(times(per_token)),
        SpeculativeOptions(),
        acceptance,
        HostGaps(),
        Plain(n_missing),
        lambda seq, more: left - more,
    )
    made._all_steps = 0 if new else FIRST_STEPS
    return made


def load(n_prefill: int = 0, entering=()) -> StepLoad:
    return StepLoad(n_prefill, 100, False, entering)


def test_a_new_request_starts_with_what_stood_for_others():
    good, one = policy(0.95), rows(1)
    assert good.choose(one, load()) == 3, "narrow, since nothing of its own is known"
    good.acceptance.add(one[0], 3, 3)
    assert good.choose(one, load()) == 7
    assert policy(0.0).choose(rows(1), load()) == 0
    entering = rows(1)
    assert policy(0.95).choose([], load(16, entering)) == 3, "as wide as prompts are taken"
    assert policy(0.0).choose([], load(16, entering)) == 0


def test_too_many_rows_never_draft():
    drafts = policy(0.99)
    assert drafts.choose(rows(4), load()) > 0
    assert drafts.choose(rows(5), load()) == 0
    assert drafts.choose(rows(3), load(16, rows(2))) == 0


def test_it_wakes_only_for_what_the_rest_of_the_rows_pays_for():
    """80 tokens were missed: five steps of 16. They are worth it for many tokens, not for a few."""
    found = {n: policy(0.9, n_missing=80, left=n).choose(rows(1), load()) for n in (1, 2, 4, 100)}
    assert found[1] == found[2] == 0
    assert found[4] == found[100] > 0
    assert policy(0.9, left=2).choose(rows(1), load()) > 0, "nothing was missed"


def test_what_is_shown_beside_a_prompt_for_nothing_is_so_once():
    """A program of 16 has room for 15 beside a prompt of one; the other 65 take steps of their own."""

    def wakes(n_missing: int, n_prefill: int) -> bool:
        found = policy(0.9, n_missing=n_missing, left=1.0, per_token=0.05)
        return found.choose(rows(1), load(n_prefill)) > 0

    assert wakes(15, 1)
    assert not wakes(15, 0), "beside no prompt it takes a dearer program"
    assert not wakes(80, 1)


def test_an_engine_tries_its_drafter_before_it_counts():
    new = policy(0.9, n_missing=80, left=2, new=True)
    for _ in range(FIRST_STEPS):
        assert new.choose(rows(1), load()) > 0
        new.active = False
    assert new.choose(rows(1), load()) == 0


def test_it_stays_awake_beside_a_prompt_that_it_would_have_to_be_shown():
    """A prompt that is dearer than what the rows save until one of them ends, and dearer to be shown later."""
    found = policy(0.9, left=12, per_token=0.05)
    found.costs = MeasuredCosts(
        dataclasses.replace(t, seconds=t.seconds + 2e-3 * (t.n_draft > 0 < t.n_prefill))
        for t in times(0.05)
    )
    found._beside = 1e-4
    assert found.choose(rows(4), load()) > 0
    assert found.choose(rows(4), load(16)) > 0
    found._spell = 0.1
    assert found.choose(rows(4), load(16)) == 0, "it would soon sleep anyway"
    found = policy(0.9, left=6, per_token=0.05)
    found.costs = MeasuredCosts(
        dataclasses.replace(t, seconds=t.seconds + 5e-4 * (t.n_draft > 0)) for t in times(0.05)
    )
    found._beside = 1e-4
    assert found.choose(rows(4), load()) > 0
    assert found.choose(rows(4), load(16)) == 0, "to be shown it later is cheaper"


def test_one_row_alone_has_no_prompts_to_wait_for():
    def wakes(n_rows: int) -> bool:
        found = policy(0.9, n_missing=80 // n_rows, left=10)
        found._beside = 8e-3
        return found.choose(rows(n_rows), load()) > 0

    assert wakes(1)
    assert not wakes(2)


def test_where_it_was_soon_put_to_sleep_again_it_wakes_for_less():
    def wakes(n_steps: int) -> bool:
        found, four = policy(0.9, n_missing=80, left=100), rows(4)
        for _ in range(n_steps):
            found._wakes(True, four)
        found._wakes(False, four)
        return found.choose(four, load()) > 0

    assert wakes(40)
    assert not wakes(2)
    idle = policy(0.9, n_missing=80, left=100)
    idle._wakes(True, rows(4))
    idle._wakes(False, [])
    assert idle.choose(rows(4), load()) > 0, "nobody was left: that says nothing"


def test_what_a_prompt_costs_more_is_saved_until_the_next_one_comes():
    """Of four rows that draw as many tokens each, one ends four times as soon, and its place takes the
    next prompt, beside which drafting costs more."""

    def wakes(n_rows: int, left: float) -> bool:
        return policy(0.9, left=left, per_token=0.05).choose(rows(n_rows), load(16)) > 0

    assert wakes(1, 4)
    assert not wakes(4, 4)
    assert wakes(4, 100), "where answers are long it pays"


def test_beside_a_short_rest_it_is_narrow():
    """Wide steps would draw past the end. One that is about to end keeps no other from drafting."""
    found = {}
    for left in (1, 4, 200):
        drafts, one = policy(0.95, left=left, per_token=0.05), rows(1)
        drafts.acceptance.add(one[0], 3, 3)
        found[left] = drafts.choose(one, load())
    assert found == {1: 3, 4: 3, 200: 7}


def test_no_row_pays_for_others():
    """One row of four may not draft; its step would be slower for the sake of the others."""
    four = rows(4)
    assert policy(0.95).choose(four, load()) > 0
    four[0].request = dataclasses.replace(four[0].request, speculative=False)
    assert policy(0.95).choose(four, load()) == 0
    assert policy(0.95, per_token=1e-5).choose(four, load()) > 0, "where it costs nothing it may"


def test_looks_take_half_a_percent_of_the_time():
    """Nothing ever stands: steps that draft although it does not pay lose no more than the purse has."""
    drafts, costs = policy(0.0), Counter()
    one = rows(1)
    for _ in range(20000):
        n = drafts.choose(one, load())
        took = drafts.costs.seconds(1, 0, 100, 1 + n, n)
        costs["lost" if n else "plain"] += took - (drafts.costs.seconds(1, 0, 100) if n else 0.0)
        if not n:
            drafts.probe_budget.earn(took)
        else:
            drafts.acceptance.add(one[0], n, 0)
    assert 0.001 * costs["plain"] < costs["lost"] < 0.0051 * costs["plain"]


def test_a_look_pays_for_waking_once():
    drafts, one = policy(0.0, n_missing=80), rows(1)
    drafts.probe_budget.earn(1e3)
    assert [drafts.choose(one, load()) > 0 for _ in range(4)] == [True, True, True, False]


def test_what_is_shown_costs_least_per_token():
    """With programs of 16 prompt tokens, and of 64 that cost ten times as much."""
    table = [
        StepTime(n_decode=4, n_prefill=p, n_context=9, width=4, n_draft=3, seconds=s)
        for p, s in ((0, 1.0), (16, 2.0), (64, 11.0))
    ]
    backfill = DraftKVBackfill(sleepy(step_times=tuple(table)), MeasuredCosts(table))

    def step(n: int) -> float:
        return MeasuredCosts(table).seconds(1, n, 9, 4, 3)

    assert backfill.portion(100, 0, step) == (16, 1.0)
    assert backfill.portion(10, 0, step) == (10, 1.0)
    assert backfill.portion(100, 10, step) == (6, 0.0), "the rest of the small one is free"
    assert backfill.portion(100, 16, step) == (48, 9.0)
    assert backfill.portion(5, 64, step)[0] == 5, "beyond the largest: as many as there are"


def test_prompts_wait_where_no_program_takes_them_beside_wide_rows():
    """Whoever chose so many drafts and was wrong about the queue."""
    drive = Watched(sleepy(), depth=1)
    ahead = drive.scheduler.speculation.device_policy
    ahead.choose = lambda ready, load: {0: 3, 1: 7, 2: 3}.get(len(ready), 0)
    drive.add(long("a", 60))
    for i in range(3):
        for _ in range(3):
            drive.step()
        drive.add(long(f"b{i}", 9))
    drive.run()
    assert drive.tried > 20


def test_a_benchmark_may_fix_it():
    drafts = policy(0.0)
    drafts.fixed = 5
    assert drafts.choose(rows(1), load()) == 5
    assert drafts.choose(rows(1), load(16, rows(1))) == 3
    drafts.fixed = 0
    assert drafts.choose(rows(1), load()) == 0
