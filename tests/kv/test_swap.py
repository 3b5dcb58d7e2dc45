"""Preemption by swap: the KV goes to host memory and comes back, by cost, and no token changes."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.kv.tiers import HostTier
from jserve.ports import StepTime
from jserve.sched.cache import handles as caching
from jserve.sched.cache.swap import SwapPolicy
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from tests.kv.counting import CountingDrive, Told, limits, request
from tests.sched.sched_drive import MixedDrafts, drafting

Z = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]


def swap_policy(
    *, depth: int = 1, n_host_pages: int = 60, mode: str = "swap", drive=CountingDrive, **changes
):
    options = {k: changes.pop(k) for k in ("prefix_caching", "journal") if k in changes}
    lim = limits(n_host_pages=n_host_pages, page_size=Z, **changes)
    return drive(lim, depth=depth, preemption=mode, **options)


def until_preempted(drive, id: str = "a", n_out: int = 6) -> None:
    """``id`` gives way once it has said ``n_out`` tokens."""
    while len(drive.told[id, 0].tokens) < n_out:
        drive.step()
    (seq,) = [s for s in drive.scheduler.resources.running if s.request.id == id]
    drive.scheduler.resources.preempt(seq)
    away(drive)
    drive.check()


def away(drive) -> None:
    """Pages are short for a moment, so nobody comes back in the very plan that he gave way in."""
    pool = drive.scheduler.resources.cache.pool
    drive.hold(pool.n_free - 1)
    drive.step()
    drive.let_go()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_comes_back_computes_one_token(depth: int, prefix_caching: bool):
    drive = swap_policy(depth=depth, prefix_caching=prefix_caching)
    drive.add(request("other", [9, 9, 9], max_tokens=40))
    drive.add(request("a", PROMPT, max_tokens=20))
    until_preempted(drive, n_out=8)
    drive.run()
    # 11 for the prompt, then what was drawn in the steps that were in flight
    assert drive.computed["a"] <= 11 + 1 + depth
    counters = drive.scheduler.counters()
    assert (counters["swaps_out_total"], counters["swaps_back_total"]) == (1, 1)
    tier = drive.scheduler.resources.cache.tier
    assert counters["host_pages_private"] == 0
    assert len(tier._free) + len(tier) == 60
    tier.check()


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_that_other_weights_made_is_found(depth: int):
    """Weights are in no key: on the device, in a handle, a session and the host tier nothing of theirs
    stays, nor comes anything back with those who were running, or had given way with their KV."""
    drive = swap_policy(depth=depth, max_prefill_tokens=64)
    resources = drive.scheduler.resources
    made = dataclasses.replace(request("make", [1] * 9, max_tokens=0), cache="doc")
    caching.create(drive.scheduler, made, 500.0, drive.now)
    drive.requests["make"] = made
    drive.told["make", 0] = Told()
    talk = dataclasses.replace(request("talk", [2] * 9, max_tokens=2), session="s")
    told = [talk, request("host", [4] * 9, max_tokens=2)]
    for each in told:
        drive.add(each)
        drive.until_done(each.id)
    resources.cache.evict(5)
    for id, prompt in (("away", PROMPT), ("runs", PROMPT[::-1])):
        drive.add(request(id, prompt, max_tokens=20))
    until_preempted(drive, "away", n_out=8)
    while drive.flight:
        drive.commit()
    tree, tier = resources.cache.tree, resources.cache.tier
    assert tree.n_nodes
    assert tree.n_pinned
    assert len(tier)
    assert [seq.swapped is not None for seq in resources.waiting] == [True]
    assert len(resources.running) == 1
    drive._hear(drive.scheduler.recover((), "", drive.now))
    drive.runner.reset()
    assert (tree.n_nodes, tree.n_hollow, tree.n_pinned, tree.roots) == (0, 0, 0, {})
    assert len(tier) == 0
    before = drive.computed.copy()
    drive.run()
    for id in ("away", "runs"):
        assert drive.computed[id] - before[id] >= len(PROMPT)


def test_without_a_swap_all_is_computed_again():
    drive = swap_policy(mode="recompute", prefix_caching=False)
    drive.add(request("other", [9, 9, 9], max_tokens=40))
    drive.add(request("a", PROMPT, max_tokens=20))
    until_preempted(drive)
    drive.run()
    assert drive.computed["a"] >= 11 + 17
    assert drive.scheduler.counters()["swaps_out_total"] == 0


def test_in_the_middle_of_a_prompt_too():
    drive = swap_policy(prefix_caching=False, max_prefill_tokens=5, max_model_len=128, n_pages=60)
    drive.add(request("other", [9, 9, 9], max_tokens=60))
    drive.add(request("a", [i % 7 for i in range(40)], max_tokens=3))
    while not drive.computed["a"] >= 18:
        drive.step()
    (seq,) = [s for s in drive.scheduler.resources.running if s.request.id == "a"]
    drive.scheduler.resources.preempt(seq)
    drive.run()
    assert drive.computed["a"] == 40


def test_a_host_without_room_means_computing_again():
    drive = swap_policy(n_host_pages=2, prefix_caching=False)
    drive.add(request("other", [9, 9, 9], max_tokens=40))
    drive.add(request("a", PROMPT, max_tokens=20))
    until_preempted(drive)
    drive.run()
    assert drive.computed["a"] > 20
    assert drive.scheduler.counters()["swaps_out_total"] == 0


def test_private_pages_are_never_dropped_for_cached_ones():
    drive = swap_policy(n_host_pages=6, n_pages=18, prefix_caching=True)
    drive.add(request("other", [9, 9, 9], max_tokens=20))
    drive.add(request("a", PROMPT, max_tokens=20, skip=True))
    until_preempted(drive)
    for i in range(4):
        drive.add(request(f"x{i}", [i] * 17, max_tokens=9))
    drive.run()
    assert drive.computed["a"] <= 13


def test_scored_prompts_and_lost_devices_compute_again():
    drive = swap_policy(prefix_caching=False)
    drive.add(request("other", [9, 9, 9], max_tokens=50))
    drive.add(request("a", PROMPT, max_tokens=20))
    until_preempted(drive)
    while drive.flight:
        drive.commit()
    drive._hear(drive.scheduler.recover((), "", drive.now))
    drive.runner.reset()
    drive.run()
    assert drive.computed["a"] > 20
    drive = swap_policy(prefix_caching=False, max_prefill_tokens=4)
    drive.add(request("a", PROMPT * 3, max_tokens=2, prompt_logprobs=1))
    for _ in range(3):
        drive.step()
    drive.preempt(0)
    drive.run()
    assert drive.scheduler.counters()["swaps_out_total"] == 0


@pytest.mark.parametrize("when", range(4))
def test_cancelled_at_any_moment_nothing_is_lost(when: int):
    drive = swap_policy(prefix_caching=False)
    drive.add(request("other", [9, 9, 9], max_tokens=40))
    drive.add(request("a", PROMPT, max_tokens=20))
    until_preempted(drive)
    for _ in range(when):
        drive.launch()
        if len(drive.flight) > 1:
            drive.commit()
    drive.cancel("a")
    drive.run()
    tier = drive.scheduler.resources.cache.tier
    tier.check()
    assert sorted(tier._free) == list(range(60))


def test_a_place_given_up_on_its_way_is_not_given_away():
    tier = HostTier(1)
    (kept,) = tier.stow([7])
    tier.drain(3)
    assert tier.landing(kept)
    tier.discard(kept)
    tier.check()
    assert tier.stow([8]) is None, "its bytes are still to land there"
    tier.landed(3)
    tier.check()
    assert tier.stow([8]) is not None


def test_back_in_the_very_plan_it_gave_way_in_it_computes_again():
    drive = swap_policy(depth=0, prefix_caching=False)
    drive.add(request("a", PROMPT, max_tokens=20))
    for _ in range(5):
        drive.step()
    drive.preempt(0)
    drive.run()
    swaps = drive.scheduler.resources.swap_policy
    assert (swaps.n_out, swaps.n_back, swaps.n_lost) == (1, 0, 1)
    assert len(drive.scheduler.resources.cache.tier._free) == 60


def test_a_windowed_one_comes_back_with_its_window():
    drive = swap_policy(
        prefix_caching=False, window=9, max_model_len=200, n_pages=40, max_prefill_tokens=8
    )
    drive.add(request("other", [9, 9, 9], max_tokens=90))
    drive.add(request("a", range(1, 11), max_tokens=80))
    until_preempted(drive, n_out=50)
    assert drive.scheduler.counters()["host_pages_stowed_total"] <= 5
    drive.run()
    assert drive.computed["a"] <= 12


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("k", range(2, 12))
def test_with_drafts_in_flight_it_goes_on_at_the_true_length(depth: int, k: int):
    lim = limits(n_host_pages=60, max_drafts=3)
    drive = drafting(MixedDrafts(), lim, depth=depth, preemption="swap", prefix_caching=False)
    drive.add(request("other", [9, 9, 9], max_tokens=30))
    drive.add(request("a", PROMPT, max_tokens=30))
    for _ in range(k):
        drive.step()
    for seq in [s for s in drive.scheduler.resources.running if s.request.id == "a"]:
        drive.scheduler.resources.preempt(seq)
        away(drive)
    drive.run()
    assert drive.scheduler.resources.swap_policy.n_out == 1


# -- the choice


class Untaught(CountingDrive):
    """Its scheduler believes the step times that it was given, whatever steps take."""

    def took(self, plan) -> float:
        return 0.0


def cost_of_a_token(seconds: float) -> tuple[StepTime, ...]:
    return tuple(
        StepTime(n_decode=d, n_prefill=p, n_context=64, seconds=0.001 + seconds * p)
        for d in (0, 4)
        for p in (0, 4, 16)
        if d + p
    )


@pytest.mark.parametrize(
    ("token_s", "page_s", "swaps"),
    [(1e-3, 1e-4, 1), (1e-3, 1e-1, 0), (1e-6, 1e-2, 0), (1e-3, 0, 0)],
)
def test_auto_takes_what_is_faster(token_s: float, page_s: float, swaps: int):
    drive = swap_policy(
        mode="auto",
        drive=Untaught,
        prefix_caching=False,
        page_move_s=page_s,
        step_times=cost_of_a_token(token_s),
    )
    drive.add(request("other", [9, 9, 9], max_tokens=40))
    drive.add(request("a", PROMPT, max_tokens=20))
    for _ in range(3):
        drive.step()
    (seq,) = [s for s in drive.scheduler.resources.running if s.request.id == "a"]
    drive.scheduler.resources.preempt(seq)
    assert drive.scheduler.resources.swap_policy.n_out == swaps
    drive.run()


def test_what_the_tree_knows_is_not_worth_a_swap():
    drive = swap_policy(mode="auto", page_move_s=1e-2, step_times=cost_of_a_token(1e-4))
    drive.add(request("other", [9, 9, 9], max_tokens=40))
    drive.add(request("a", PROMPT, max_tokens=20))
    until_preempted(drive)
    assert drive.scheduler.resources.swap_policy.n_out == 0
    drive.run()
    assert drive.computed["a"] < 11 + 2 * Z


def test_unknown_costs_mean_computing_again():
    drive = swap_policy(mode="auto")
    choice = drive.scheduler.resources.swap_policy
    assert isinstance(choice, SwapPolicy)
    assert not choice._pays(None, 1)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_crowded_small_pools_with_swaps_draw_the_same_and_replay(depth: int, tmp_path):
    path = tmp_path / "journal"
    with path.open("wb") as file:
        drive = swap_policy(
            depth=depth, n_pages=14, prefix_caching=False, journal=JournalFile(file)
        )
        for i in range(9):
            drive.add(request(f"r{i}", [(i + k) % 9 for k in range(3 + i)], max_tokens=25))
            drive.step()
        drive.run()
    counters = drive.scheduler.counters()
    assert counters["swaps_back_total"] >= 2
    replay(path, drive.limits, dataclasses.replace(drive.config))
