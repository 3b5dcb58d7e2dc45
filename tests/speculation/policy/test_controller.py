"""Speculation in the scheduler: same tokens, k that follows acceptance, waits that pay, exact counts."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re

import pytest

from jserve.config import SpeculativeOptions
from jserve.ports import StepTime
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import Diverged, replay
from jserve.speculation.host.lookup import Lookup
from jserve.speculation.host.ngram import NgramIndex
from jserve.speculation.host.suffix import SuffixIndex
from jserve.speculation.policy import controller as policy
from jserve.speculation.policy.controller import SpeculationController, StepLoad
from jserve.timing.host_gaps import HostGaps
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import Lane
from tests.sched.sched_drive import (
    VOCAB,
    Drive,
    MixedDrafts,
    RightDrafts,
    WrongDrafts,
    drafting,
    limits,
    request,
)

ALLOWED = tuple(range(VOCAB - 1))


def timed(per_token: float, n_context: int = 64) -> tuple[StepTime, ...]:
    """Step times where every token beyond a row's first costs ``per_token`` of a step of 1 ms, and
    every draft of the device half of that."""
    return tuple(
        StepTime(
            n_decode=4,
            n_prefill=p,
            n_context=n_context,
            width=w,
            n_draft=n,
            seconds=1e-3 * (1 + per_token * (w - 1 + n / 2) + p / 16),
        )
        for w in (1, 2, 4, 8)
        for p in (0, 16)
        for n in {0, w - 1}
    )


def lookup(name: str = "ngram") -> Lookup:
    if name == "ngram":
        return Lookup(name, lambda: (NgramIndex(1, 3, 64),))
    return Lookup(name, lambda: (SuffixIndex(1, 64),))


def asked(n: int = 6, **extra) -> list:
    rng = random.Random(3)
    return [
        request(
            f"r{i}",
            [rng.randrange(3) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.choice([1, 2, 9, 17]),
            temperature=rng.choice([0.0, 1.0]),
            n=rng.choice([1, 2]),
            **extra,
        )
        for i in range(n)
    ]


def run(reqs, lim=None, **kw) -> tuple[Drive, dict]:
    drive = Drive(lim or limits(), **kw)
    for req in reqs:
        drive.add(req)
        drive.step()
    return drive, drive.run()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("n_pages", [33, 12])
@pytest.mark.parametrize("kind", ["ngram", "suffix", "device", "copied", "right", "mixed", "wrong"])
def test_drafts_change_no_token(kind, n_pages, depth):
    """The drive compares every token with the definition; acceptance is real for copies of 3 words."""
    lim = limits(max_drafts=7, n_pages=n_pages, vocab_size=VOCAB, step_times=timed(0.01))
    reqs = [*asked(), request("few", [0, 1] * 6, max_tokens=20, allowed_token_ids=(0, 1))]
    if kind in ("ngram", "suffix"):
        drive, _ = run(reqs, lim, depth=depth, proposer=lookup(kind))
    elif kind == "device":
        lim = dataclasses.replace(lim, device_drafts=5)
        drive, _ = run(reqs, lim, depth=depth)
    elif kind == "copied":
        lim = dataclasses.replace(lim, device_drafts=7, drafts_from_text=True)
        drive, _ = run(reqs, lim, depth=depth, proposer=lookup())
    else:
        fake = {"right": RightDrafts, "mixed": MixedDrafts, "wrong": WrongDrafts}[kind]
        drive = drafting(fake(blind=depth % 2 == 0), lim, depth=depth)
        for req in reqs:
            drive.add(req)
        drive.run()
    counters = drive.scheduler.counters()
    drafted = sum(
        v for k, v in counters.items() if k.startswith("spec_decode_num_draft_tokens_total")
    )
    assert drafted > 0
    said = sum(len(told.tokens) for told in drive.told.values())
    assert counters["decode_tokens_total"] <= said + drive.scheduler.n_prefilled


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_usage_counts_the_drafts_of_an_output(depth):
    """Over all outputs: accepted are among the tokens, and rows say what they tried."""
    lim = limits(max_drafts=3, step_times=timed(0.01))
    drive = drafting(MixedDrafts(), lim, depth=depth)
    for req in asked(stop_token_ids=(4, 5)):
        drive.add(req)
    drive.run()
    outputs = [out for told in drive.told.values() for out in told.outputs]
    assert sum(out.n_accepted for out in outputs) > 0
    for out in outputs:
        assert 0 <= out.n_accepted <= min(out.n_drafted, len(out.token_ids))
    seen = drive.scheduler.counters()
    by_lane = "spec_decode_num_{}_tokens_total{{proposer=fake,lane=standard}}"
    assert sum(out.n_drafted for out in outputs) <= seen[by_lane.format("draft")]
    assert sum(out.n_accepted for out in outputs) <= seen[by_lane.format("accepted")]
    per_place = [
        seen[
            f"spec_decode_num_accepted_tokens_per_pos_total{{proposer=fake,lane=standard,position={j}}}"
        ]
        for j in range(3)
    ]
    assert per_place == sorted(per_place, reverse=True)
    assert sum(per_place) == seen[by_lane.format("accepted")]


def test_a_request_may_say_no():
    lim = limits(max_drafts=3, step_times=timed(0.0))
    drive = drafting(RightDrafts(), lim, depth=0)
    drive.add(dataclasses.replace(request("a", [1, 2], max_tokens=17), speculative=False))
    drive.run()
    assert all(out.n_drafted == 0 for out in drive.told["a", 0].outputs)
    assert drive.n_steps >= 17


@pytest.mark.parametrize("kind", ["host", "blind", "device"])
def test_k_grows_with_acceptance_and_goes_where_nothing_stands(kind):
    n_steps = {}
    for name, fake in (("right", RightDrafts), ("wrong", WrongDrafts)):
        lim = limits(max_drafts=7, max_model_len=400, n_pages=120, step_times=timed(0.05, 400))
        if kind == "device":
            drive = Drive(dataclasses.replace(lim, device_drafts=7), depth=1)
            drive.runner.acceptance = 1.0 if name == "right" else 0.0
        else:
            drive = drafting(fake(blind=kind == "blind"), lim, depth=1)
        drive.add(request("a", [1, 2], max_tokens=300, allowed_token_ids=ALLOWED))
        found = {}
        while drive.scheduler.has_work:
            drive.step()
            found |= {flight.plan.id: flight.plan.rows[0].count for flight in drive.flight}
        counts = list(found.values())
        n_steps[name] = len(counts)
        late = counts[20:]
        if name == "right":
            assert max(late) == 8
            assert len(counts) < 300 / 5
        else:
            assert sum(c - 1 for c in late) < 0.2 * len(late), "it keeps drafting in vain"
            assert max(late, default=1) <= 4
    assert n_steps["right"] < 0.3 * n_steps["wrong"]


class Clocked:
    """Runs a drive in virtual time: a step takes what the table says, the host ``host_s`` per step,
    hidden where a step is in flight."""

    def __init__(self, drive: Drive, per_token: float, host_s: float) -> None:
        self.drive, self.per_token, self.host_s = drive, per_token, host_s
        drive.tick = 0.0
        self.n_ahead: list[int] = []
        """Steps in flight when one was launched."""

    def seconds(self, plan) -> float:
        width = max((row.count for row in plan.rows if row.from_slot), default=1)
        width = next(w for w in (1, 2, 4, 8) if w >= width)
        n_prefill = sum(row.count for row in plan.rows if not row.from_slot)
        drafting = self.per_token * plan.n_draft * 0.5
        return 1e-3 * (1 + self.per_token * (width - 1) + drafting + (n_prefill > 0))

    def run(self) -> float:
        drive, scheduler, free = self.drive, self.drive.scheduler, 0.0
        while scheduler.has_work:
            before = len(drive.flight)
            planned = drive.launch()
            if planned:
                self.n_ahead.append(before)
                begins = drive.now + self.host_s if not before else max(free, drive.now)
                free = begins + self.seconds(drive.flight[-1].plan)
            if drive.flight and (not planned or len(drive.flight) > drive.depth):
                flight = drive.flight.popleft()
                took = self.seconds(flight.plan)
                ends = free if not drive.flight else free - self.seconds(drive.flight[-1].plan)
                drive.now = max(drive.now, ends)
                result = dataclasses.replace(drive.runner.collect(flight), device_us=took * 1e6)
                drive.committed.add(flight.plan.id)
                drive._hear(scheduler.commit(flight.plan, result, drive.now))
        return drive.now


def virtual_seconds(kind: str, acceptance: str, n: int, per_token: float, host_s: float) -> float:
    lim = limits(max_drafts=7, max_model_len=1600, n_pages=2000, step_times=timed(per_token, 1600))
    fake = {"right": RightDrafts, "wrong": WrongDrafts}[acceptance]
    if kind == "off":
        drive = Drive(dataclasses.replace(lim, max_drafts=0), depth=1, checks=False)
    elif kind == "device":
        drive = Drive(dataclasses.replace(lim, device_drafts=7), depth=1, checks=False)
        drive.runner.acceptance = 1.0 if acceptance == "right" else 0.0
    else:
        drive = drafting(fake(blind=kind == "blind"), lim, depth=1, checks=False)
    for i in range(n):
        drive.add(request(f"r{i}", [1 + i, 2], max_tokens=900, allowed_token_ids=ALLOWED))
    return Clocked(drive, per_token, host_s).run()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", ["host", "blind", "device"])
@pytest.mark.parametrize("per_token", [0.02, 0.3])
def test_drafts_that_never_stand_cost_less_than_two_percent(kind, n, per_token):
    """Virtual time of 900 tokens a row, the host's 0.2 ms per step hidden only by overlap."""
    off = virtual_seconds("off", "wrong", n, per_token, 2e-4)
    on = virtual_seconds(kind, "wrong", n, per_token, 2e-4)
    assert off <= on * 1.0001
    assert on < 1.02 * off


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", ["host", "blind", "device"])
def test_drafts_that_stand_are_worth_the_wait(kind, n):
    off = virtual_seconds("off", "right", n, 0.05, 2e-4)
    assert virtual_seconds(kind, "right", n, 0.05, 2e-4) < 0.35 * off


def test_waiting_is_for_those_who_gain_by_it():
    """A proposer of the host that finds nothing leaves the overlap alone."""
    lim = limits(max_drafts=7, max_model_len=200, n_pages=80, step_times=timed(0.05, 200))
    ahead = {}
    for name, fake in (("right", RightDrafts), ("wrong", WrongDrafts)):
        drive = drafting(fake(blind=False), lim, depth=1)
        drive.add(request("a", [1, 2], max_tokens=150, allowed_token_ids=ALLOWED))
        clocked = Clocked(drive, 0.05, 2e-4)
        clocked.run()
        ahead[name] = clocked.n_ahead
    assert set(ahead["wrong"][20:]) == {1}, "one step is always ahead"
    assert set(ahead["right"][20:]) == {0}, "each waits for the last"


def test_the_gap_is_learned_apart_for_steps_that_waited():
    gaps = HostGaps()
    now = 0.0
    for step in range(400):
        behind = step % 2 == 0
        gaps.planned(step, behind)
        now += 1e-3 + (4e-4 if behind else 1e-4)
        gaps.landed(step, now, 1e-3)
    assert gaps.seconds(True) == pytest.approx(4e-4, rel=0.01)
    assert gaps.seconds(False) == pytest.approx(1e-4, rel=0.01)
    gaps.idle()
    gaps.planned(400, False)
    gaps.landed(400, now + 60.0, 1e-3)
    assert gaps.seconds(False) == pytest.approx(1e-4, rel=0.01), "idle time is no gap"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", ["ngram", "suffix", "device", "mixed"])
def test_a_replay_decides_the_same_drafts(tmp_path, kind, depth):
    """With the proposer of the run everything is decided anew; without it the journal says it."""
    path = tmp_path / "journal.jsonl"
    lim = limits(max_drafts=7, n_pages=12, step_times=timed(0.02))
    if kind == "device":
        lim = dataclasses.replace(lim, device_drafts=4)
    proposer = {"device": None, "mixed": MixedDrafts()}.get(kind, 0)
    proposer = lookup(kind) if proposer == 0 else proposer
    with path.open("wb") as file:
        drive = Drive(lim, depth=depth, proposer=proposer, journal=JournalFile(file))
        if kind == "mixed":
            proposer.drive = drive
        for req in asked(8):
            drive.add(dataclasses.replace(req, lane=random.Random(req.id).choice(list(Lane))))
            drive.step()
        drive.run()
    assert replay(path, drive.limits, drive.config).n_steps == drive.scheduler.n_steps
    if kind != "mixed":
        same = None if kind == "device" else lookup(kind)
        again = replay(path, drive.limits, drive.config, proposer=same, anew=True)
        assert again.n_steps == drive.scheduler.n_steps
        if kind == "device":
            other = {"limits": dataclasses.replace(lim, device_drafts=1)}
            assert re.search(rb'"n_draft":[1-4]', path.read_bytes())
        else:
            other = {"proposer": Lookup("other", lambda: (NgramIndex(4, 5, 64),))}
        with pytest.raises(Diverged):
            replay(path, config=drive.config, anew=True, **{"limits": drive.limits} | other)


def test_long_prompts_are_read_a_little_per_step(monkeypatch):
    monkeypatch.setattr(policy, "READ_PER_STEP", 5)
    lim = limits(max_drafts=7, step_times=timed(0.0))
    proposer = lookup()
    drive = Drive(lim, depth=0, proposer=proposer)
    drive.add(request("a", [1, 2, 3, 4] * 9, max_tokens=20))
    n_read = []
    while drive.scheduler.has_work:
        drive.step()
        n_read += [reader.n_read for reader in proposer._readers.values()]
    assert max(b - a for a, b in itertools.pairwise([0, *n_read])) <= 5
    assert n_read[-1] > 36


@pytest.mark.parametrize("on", [False, True])
def test_nothing_is_kept_of_steps_that_are_over(on):
    """Also of a row that runs once more after its sequence ended, and of steps that were lost."""
    lim = limits(max_drafts=3 if on else 0, step_times=timed(0.0))
    drive = drafting(RightDrafts(), lim, depth=2)
    for i, req in enumerate(asked(8, stop_token_ids=(1, 2))):
        drive.add(req)
        drive.step()
        if i == 4:
            drive.runner.fail_next = RuntimeError("the step raised")
    drive.run()
    kept = drive.scheduler.speculation
    assert not kept._of
    assert not kept.gaps._behind
    assert not any("proposer=}" in key or "proposer=," in key for key in kept.counters())


def test_the_policy_alone_without_steps():
    """No proposer, no device: nothing is chosen whatever the limits."""
    lim = limits(max_drafts=7)
    alone = SpeculationController(lim, MeasuredCosts(), SpeculativeOptions())
    assert alone.choose([], StepLoad(0, True)) == []
    assert not alone.waits([], StepLoad(0, False))
    assert not SpeculationController(limits(), MeasuredCosts(), SpeculativeOptions()).on
