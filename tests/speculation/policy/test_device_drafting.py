"""Drafts of the device that are made in some steps only: the backfill, the limits, and that no token changes."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jserve.ports import RunnerLimits, StepTime
from jserve.speculation.policy.acceptance import Odds
from jserve.speculation.policy.controller import StepLoad
from jserve.speculation.policy.draft_count import HOLD, PROBE_EVERY
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


def device_limits(**changes) -> RunnerLimits:
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
        self.tried = self.stood = self.shown = self.n_plain = self.n_drafting = 0

    def commit(self) -> None:
        plan = self.flight[0].plan
        n_ok_R = self.flight[0].handle[1].n_ok_R
        for row, n_ok in zip(plan.rows, n_ok_R.tolist(), strict=True):
            self.tried += len(row.drafts)
            self.stood += n_ok - 1 if row.drafts else 0
            self.shown += row.count if row.backfill else 0
        self.n_drafting += plan.n_draft > 0
        self.n_plain += not plan.n_draft
        super().commit()


def long(id: str, n: int = 300, **more):
    return request(id, [1, 2, 3], max_tokens=n, allowed_token_ids=ALLOWED, **more)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_crowd_is_not_drafted_for_and_the_backfill_follows_it(depth):
    drive = Watched(device_limits(), depth=depth)
    drive.add(long("a"))
    for _ in range(6):
        drive.step()
    assert drive.tried > 0
    for i in range(3):
        drive.add(long(f"b{i}", 20))
    before = drive.n_drafting
    for _ in range(12):
        drive.step()
    assert drive.n_drafting <= before + depth, "too many rows for any program that drafts"
    tried = drive.tried
    drive.run()
    assert drive.shown >= 10, "what was missing was not backfilled"
    assert drive.tried > tried + 100
    assert drive.stood == drive.tried, "a draft was used that was made without the whole text"


@pytest.mark.slow
def test_after_a_long_crowd_what_costs_more_than_it_saves_is_not_backfilled():
    """Also where drafting went on when the crowd came."""
    drive = Watched(device_limits(max_model_len=1000, n_pages=900, step_times=times(1.0)))
    drive.add(long("a", 900))
    for _ in range(6):
        drive.step()
    assert drive.tried > 0
    for i in range(2):
        drive.add(long(f"b{i}", 800))
    for _ in range(800):
        drive.step()
    tried = drive.tried
    drive.run()
    assert drive.shown == 0
    assert drive.tried == tried


@pytest.mark.one_in(4)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("n_pages", [200, 30])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_every_draft_it_uses_was_made_from_all_that_was_before(seed, n_pages, depth):
    """Crowds come and go, prompts share prefixes that were computed without the drafter, sequences are
    preempted and come back: with a perfect drafter every draft that is tried stands."""
    rng = random.Random(seed)
    drive = Watched(device_limits(n_pages=n_pages, max_model_len=100), depth=depth)
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
    assert drive.n_plain
    assert drive.tried > 20
    assert drive.stood == drive.tried


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_is_missing_begins_at_what_is_known(depth):
    """Rows in flight whose drafts are rejected end before their bound, and there drafting ends."""
    drive = Watched(device_limits(), depth=depth)
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
    drive = Watched(device_limits())
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
    drive = Watched(device_limits(drafts_from_kv=False))
    drive.add(long("a"))
    for i in range(3):
        drive.add(long(f"b{i}", 20))
    drive.run()
    assert not drive.shown
    assert not drive.scheduler.speculation.backfill._of
    assert drive.stood == drive.tried > 100


def test_a_request_that_says_no_is_never_shown():
    drive = Watched(device_limits())
    drive.add(dataclasses.replace(long("a"), speculative=False))
    drive.run()
    assert drive.tried == drive.shown == drive.n_drafting == 0


def test_nothing_is_kept_of_who_is_over():
    drive = Watched(device_limits(), depth=2)
    for i in range(6):
        drive.add(long(f"r{i}", 10))
    drive.cancel("r2")
    drive.run()
    assert not drive.scheduler.speculation.backfill._of
    assert not drive.scheduler.speculation._of


def total(drive, name: str) -> float:
    return sum(v for k, v in drive.scheduler.counters().items() if k.startswith(name))


def as_measured(plan) -> float:
    """Seconds of a step as ``times`` has them."""
    width = max((row.count for row in plan.rows if row.from_slot), default=1)
    n_prefill = sum(row.count for row in plan.rows if not row.from_slot)
    return 1e-3 * (1 + 0.02 * (4 * width + n_prefill + 0.1 * plan.n_draft))


@pytest.mark.slow
@pytest.mark.parametrize("from_kv", [False, True])
def test_rejected_drafts_are_probed_rarely(from_kv):
    drive = Watched(device_limits(drafts_from_kv=from_kv), depth=1, checks=False)
    drive.runner.acceptance, drive.took = 0.0, as_measured
    for i in range(8):
        drive.add(long(f"r{i}", 390))
        drive.run()
    assert drive.n_steps > 3000
    probes = drive.n_steps / PROBE_EVERY
    assert 0.5 * probes < drive.n_drafting < 6 * probes + 3 * HOLD


@pytest.mark.parametrize("n_rows", [2, 3])
def test_above_max_rows_nothing_is_drafted(n_rows):
    drive = Watched(device_limits(), depth=0)
    for i in range(n_rows):
        drive.add(long(f"r{i}", 100))
    for _ in range(30):
        drive.step()
    assert (drive.n_drafting > 0) == (n_rows <= 2)


def test_a_probe_after_a_change_finds_that_drafts_are_accepted_again():
    drive = Watched(device_limits(), depth=1)
    drive.runner.acceptance, drive.took = 0.0, as_measured
    drive.add(long("a", 390))
    drive.run()
    drive.runner.acceptance = 1.0
    tried = drive.tried
    for i in range(3):
        drive.add(long(f"b{i}", 390))
        drive.run()
    assert drive.tried - tried > 500


def test_the_backfill_takes_what_the_smallest_program_has_room_for():
    """The steps of the table take 16 tokens of prompts: a prompt of 3 leaves room for 13."""
    drive = Watched(device_limits(max_prefill_tokens=200), depth=0)
    drive.scheduler.speculation.fix(0)
    drive.add(long("a", 200))
    for _ in range(60):
        drive.step()
    drive.scheduler.speculation.fix(3)
    drive.step()
    drive.add(long("b", 5))
    shown = []
    while drive.step() and drive.scheduler.speculation.backfill.missing(
        next(iter(drive.scheduler.resources.running))
    ):
        shown.append(drive.shown)
    assert shown[0] == 13
    assert shown[1] - shown[0] == 16


def test_prompts_wait_where_no_program_takes_them_beside_wide_rows():
    """Whoever chose so many drafts and was wrong about the queue."""
    drive = Watched(device_limits(), depth=1)
    policy = drive.scheduler.speculation
    wanted = {0: 3, 1: 7, 2: 3}
    policy._k = lambda rows, odds, load: wanted.get(len(rows) - len(load.entering), 0)
    drive.add(long("a", 60))
    for i in range(3):
        for _ in range(3):
            drive.step()
        drive.add(long(f"b{i}", 9))
    drive.run()
    assert drive.tried > 20


def test_a_benchmark_may_fix_it():
    drive = Watched(device_limits(), depth=0)
    drafting = drive.scheduler.speculation
    drive.add(long("a"))
    drive.step()
    (one,) = drive.scheduler.resources.running
    for k in (5, 0):
        drafting.fix(k)
        drafting.choose([one], StepLoad(100, False))
        assert drafting.n_draft == k
    drafting.fix(5)
    drafting.choose([one], StepLoad(100, False, [one]))
    assert drafting.n_draft == 3, "as many as there are programs for beside prompts"


def test_what_it_costs_to_begin_is_spread_over_the_steps_that_drafting_lasts(monkeypatch):
    """Drafts make the step of one row 1.8 times as good; 200 tokens take as long as 14 steps."""
    drive = Watched(device_limits(), depth=0)
    drive.add(long("a"))
    drive.step()
    policy, (one,) = drive.scheduler.speculation, drive.scheduler.resources.running
    best = lambda: policy._best([one], [Odds(0.5, 1.0)], StepLoad(100, False))  # noqa: E731
    for running, missing, k in ((0, 16, 3), (0, 200, 0), (3, 200, 3)):
        policy.hysteresis.k = running
        monkeypatch.setattr(policy.backfill, "missing", lambda seq, missing=missing: missing)
        assert best() == k
