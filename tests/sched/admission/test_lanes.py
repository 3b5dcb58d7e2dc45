"""Lanes, tenants, ageing: who enters next, how fairly, and that nobody starves."""

import dataclasses
import random

import pytest

from jserve.sched import policy
from jserve.sched.admission.fair import MOST, Shares
from jserve.sched.admission.queue import AGED_EVERY, PASSES, WaitQueue
from jserve.types import Lane, SeqState, Sequence
from tests.sched.sched_drive import Drive, limits, request

WEIGHTS = {Lane.INTERACTIVE: 16, Lane.STANDARD: 4, Lane.BULK: 1}


class Line:
    """A queue alone, with sequences that enter as soon as they are picked."""

    def __init__(self, ageing_s: float = 1e9) -> None:
        self.queue = WaitQueue(WEIGHTS, ageing_s)
        self.n, self.now = 0, 0.0
        self.entered: list[Sequence] = []

    def add(self, lane=Lane.STANDARD, tenant="", n_prompt=10, priority=0, due=float("inf")):
        self.n += 1
        req = dataclasses.replace(
            request(str(self.n), [1] * n_prompt, priority=priority), lane=lane, tenant=tenant
        )
        seq = Sequence(
            request=req,
            index=0,
            seed=0,
            tokens=list(req.prompt_ids),
            n_prompt=n_prompt,
            max_len=n_prompt + 8,
            order=policy.order_of(lane, priority, self.n),
            arrived=self.now,
            due=due,
        )
        self.queue.add(seq)
        return seq

    def take(self, n_out: int = 0) -> Sequence:
        """The first candidate enters."""
        seq = self.queue.candidates(self.now).next()
        assert seq is not None
        self.enter(seq, n_out)
        return seq

    def enter(self, seq: Sequence, n_out: int = 0) -> None:
        self.queue.remove(seq)
        seq.state = SeqState.RUNNING
        self.queue.entered(seq, seq.n_prompt, n_out)
        self.entered.append(seq)


def shares_of(seqs, key) -> dict:
    tokens: dict = {}
    for seq in seqs:
        tokens[key(seq)] = tokens.get(key(seq), 0) + seq.n_prompt
    return tokens


# -- shares


def test_lanes_that_always_wait_are_served_by_their_weights():
    rng, line = random.Random(1), Line()
    for _ in range(40):
        for lane in Lane:
            line.add(lane, n_prompt=rng.randrange(5, 50))
    for _ in range(2000):
        seq = line.take()
        line.add(seq.request.lane, n_prompt=rng.randrange(5, 50))
    tokens = shares_of(line.entered, lambda seq: seq.request.lane)
    total = sum(tokens.values())
    for lane, weight in WEIGHTS.items():
        assert tokens[lane] / total == pytest.approx(weight / 21, rel=0.05)


def test_tenants_share_a_lane_by_tokens_not_by_requests():
    """One sends large prompts and many of them, the other small ones."""
    line = Line()
    for _ in range(300):
        line.add(tenant="greedy", n_prompt=100)
    for _ in range(600):
        line.add(tenant="modest", n_prompt=10)
    for _ in range(500):
        line.take()
    tokens = shares_of(line.entered, lambda seq: seq.request.tenant)
    assert abs(tokens["greedy"] - tokens["modest"]) <= 100, "at most one request apart"


def test_a_tenant_is_charged_for_what_it_drew_not_for_what_was_guessed():
    line = Line()
    for _ in range(50):
        line.add(tenant="talks")
        line.add(tenant="listens")
    for _ in range(40):
        seq = line.take(n_out=0)
        if seq.request.tenant == "talks":
            seq.tokens += [1] * 15  # 30 charged on top of 10 for the prompt
        line.queue.settle(seq)
    counts = [sum(s.request.tenant == t for s in line.entered) for t in ("talks", "listens")]
    assert counts == [8, 32], "four times the cost, a quarter of the turns"


def test_what_was_guessed_too_high_is_given_back():
    line = Line()
    for _ in range(50):
        line.add(tenant="a")
        line.add(tenant="b")
    for _ in range(20):
        line.queue.settle(line.take(n_out=500))
    counts = [sum(s.request.tenant == t for s in line.entered) for t in ("a", "b")]
    assert counts == [10, 10]


def test_nobody_saves_up_a_share_by_staying_away():
    line = Line()
    for _ in range(100):
        line.add(tenant="worker")
    for _ in range(50):
        line.take()
    for _ in range(50):
        line.add(tenant="late")
    tenants = [line.take().request.tenant for _ in range(20)]
    assert tenants.count("late") in (10, 11), "half from now on, not all until it caught up"


def test_counters_of_the_idle_do_not_pile_up():
    shares = Shares()
    for i in range(5000):
        shares.join(f"t{i}")
        shares.serve(f"t{i}", 1.0)
    assert len(shares._served) <= MOST


# -- order inside a tenant


def test_priority_then_deadline_then_arrival():
    line = Line()
    a = line.add()
    b = line.add(due=9.0)
    c = line.add(due=5.0)
    d = line.add(priority=-1)
    e = line.add()
    assert [line.take() for _ in range(5)] == [d, c, b, a, e]


def test_priority_does_not_buy_another_tenants_share():
    line = Line()
    for _ in range(20):
        line.add(tenant="pushy", priority=-100)
        line.add(tenant="polite")
    tenants = [line.take().request.tenant for _ in range(20)]
    assert tenants.count("polite") == 10


def test_who_came_back_goes_first_in_its_lane_and_is_not_charged_again():
    line = Line()
    first = line.take(n_out=0) if line.add() else None
    line.add()
    first.state = SeqState.PREEMPTED
    line.queue.add(first)
    before = line.queue.shares.at(Lane.STANDARD)
    assert line.take() is first
    assert line.queue.shares.at(Lane.STANDARD) == before


# -- nobody starves


@pytest.mark.parametrize("seed", range(5))
def test_an_aged_arrival_enters_within_the_stated_bound(seed):
    """Against everything: a flood of a higher lane, other tenants, priorities, deadlines."""
    rng, line = random.Random(seed), Line(ageing_s=10.0)
    ahead = [line.add(Lane.BULK, "x", priority=-5) for _ in range(rng.randrange(6))]
    poor = line.add(Lane.BULK, "poor", priority=100)
    line.now = 11.0
    n_before = 0
    while poor not in line.entered:
        for lane in (Lane.INTERACTIVE, Lane.STANDARD, Lane.BULK):
            line.add(lane, rng.choice("abc"), n_prompt=1, priority=-10, due=line.now + 1)
        line.take()
        n_before += 1
        assert n_before <= (AGED_EVERY + PASSES) * (len(ahead) + 1), "starved"


def test_without_ageing_it_would_wait_much_longer():
    """The test above means something: order alone does not do it."""
    line = Line(ageing_s=1e9)
    poor = line.add(Lane.BULK, "poor", priority=100)
    for _ in range(200):
        for tenant in ("poor", "abc"):
            line.add(Lane.BULK, tenant, n_prompt=1, priority=-10)
        line.take()
    assert poor not in line.entered


def test_who_cannot_get_in_is_passed_by_higher_lanes_only_and_not_for_ever():
    line = Line()
    big = line.add(Lane.BULK, n_prompt=1000)
    passed = 0
    for _ in range(3 * PASSES):
        line.add(Lane.INTERACTIVE, n_prompt=1)
        line.add(Lane.BULK, n_prompt=1)
        candidates, entered = line.queue.candidates(0.0), 0
        while (seq := candidates.next()) is not None:
            assert seq is big or seq.request.lane is not Lane.BULK or not candidates._seen
            if seq is big:
                if not candidates.skip_blocked(seq):
                    break
            elif seq.request.lane is Lane.BULK:
                raise AssertionError("a later one of its lane went before it")
            else:
                line.enter(seq)
                seq.lease = object()  # what tells the walk that it got in
                entered += 1
        passed += entered
        if not entered:
            break
    assert passed <= PASSES + 1


def test_a_holder_that_was_passed_often_enough_comes_before_all():
    line = Line()
    line.enter(line.add(Lane.BULK, n_prompt=100))  # bulk has had its share: order speaks against it
    big = line.add(Lane.BULK, n_prompt=1000)
    candidates = line.queue.candidates(0.0)
    assert candidates.next() is big
    assert candidates.skip_blocked(big)
    for _ in range(PASSES):
        line.enter(line.add(Lane.INTERACTIVE, n_prompt=1))
    line.add(Lane.INTERACTIVE, priority=-9)
    candidates = line.queue.candidates(0.0)
    assert candidates.next() is big
    assert not candidates.skip_blocked(big)


def test_every_candidate_is_offered_once_though_none_gets_in():
    line = Line(ageing_s=0.0)
    seqs = [line.add(lane, t) for lane in Lane for t in "ab" for _ in range(3)]
    candidates, offered = line.queue.candidates(5.0), []
    while (seq := candidates.next()) is not None:
        offered.append(seq)
    assert set(map(id, offered)) == set(map(id, seqs))
    assert len(offered) == len(seqs)


# -- with the whole scheduler


def order_of_first_tokens(drive: Drive) -> list[str]:
    seen: list[str] = []
    while drive.step():
        seen += [k[0] for k, t in drive.told.items() if t.tokens and k[0] not in seen]
    return seen


def test_interactive_overtakes_what_is_waiting():
    drive = Drive(limits(n_slots=1), depth=0)
    drive.add(request("running", [1], max_tokens=2))
    drive.step()
    for i in range(3):
        drive.add(request(f"bulk{i}", [1] * 8, lane=Lane.BULK, max_tokens=1))
    drive.add(request("chat", [1] * 8, lane=Lane.INTERACTIVE, max_tokens=1))
    assert order_of_first_tokens(drive)[:2] == ["running", "chat"]


@pytest.mark.parametrize("short_of", ["slots", "pages"])
def test_bulk_gives_way_to_interactive_that_finds_no_room(short_of):
    lim = limits(n_slots=2) if short_of == "slots" else limits(n_pages=11)
    drive = Drive(lim, depth=1)
    for i in range(2):
        drive.add(request(f"bulk{i}", [i] * 14, lane=Lane.BULK, max_tokens=20))
    for _ in range(4):
        drive.step()
    drive.add(request("chat", [7] * 6, lane=Lane.INTERACTIVE, max_tokens=2))
    for _ in range(4):
        drive.step()
    assert drive.told["chat", 0].tokens, "it did not wait for them to end"
    assert drive.scheduler.resources.n_preemptions >= 1
    drive.run()


def test_standard_is_not_pushed_out_by_interactive():
    drive = Drive(limits(n_slots=1), depth=0)
    drive.add(request("std", [1], max_tokens=20, ignore_eos=True))
    drive.step()
    drive.add(request("chat", [1], lane=Lane.INTERACTIVE, max_tokens=1))
    drive.run()
    assert drive.scheduler.resources.n_preemptions == 0


def test_nobody_gives_way_where_that_makes_no_room():
    """The chat needs more pages than bulk could give back; standard holds the others."""
    drive = Drive(limits(n_pages=17), depth=0)
    drive.add(request("std", [1] * 30, max_tokens=30, ignore_eos=True))
    drive.add(request("bulk", [2] * 4, lane=Lane.BULK, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        drive.step()
    drive.add(request("chat", [3] * 40, lane=Lane.INTERACTIVE, max_tokens=1))
    drive.step()
    assert drive.scheduler.resources.n_preemptions == 0
    drive.run()


def test_the_victim_wastes_least():
    drive = Drive(limits(max_prefill_rows=4), depth=0)
    for id, lane in (
        ("a", Lane.STANDARD),
        ("b", Lane.BULK),
        ("c", Lane.BULK),
        ("d", Lane.STANDARD),
    ):
        drive.add(request(id, [ord(id) % 11] * (7 if id == "b" else 5), lane=lane))
    for _ in range(3):
        drive.step()
    running = {seq.request.id: seq for seq in drive.scheduler.resources.running}
    # Computed 7, 9, 6 and 6 tokens, of which 1, 2, 1 and 1 pages of four can be found again.
    assert [policy.waste(running[id]) for id in "abcd"] == [3, 1, 2, 2]
    everyone = list(drive.scheduler.resources.running)
    assert policy.victim(everyone) is running["b"], "bulk first, then the least to recompute"
    running["b"].n_preempted = policy.MAX_PREEMPTIONS
    assert policy.victim(everyone) is running["c"], "bulk before standard"
    running["c"].n_preempted = policy.MAX_PREEMPTIONS
    assert policy.victim(everyone) is running["d"]
    assert policy.victim([]) is None
    drive.run()


def test_a_need_for_pages_never_takes_from_a_higher_lane():
    drive = Drive(limits(n_pages=9), depth=0)
    # Bulk is the first to need the ninth page: for its 17th token, when the chat has 15.
    drive.add(request("bulk", [1] * 8, lane=Lane.BULK, max_tokens=22, ignore_eos=True))
    drive.add(request("chat", [2] * 6, lane=Lane.INTERACTIVE, max_tokens=22, ignore_eos=True))
    resources = drive.scheduler.resources
    victims = []
    preempt = resources.preempt
    resources.preempt = lambda seq: (victims.append(seq.request.id), preempt(seq))
    drive.run()
    assert victims
    assert set(victims) == {"bulk"}


def test_cached_tokens_are_counted_in_the_lane_that_found_them():
    """Whole pages of 4 tokens, of the second request of each lane only."""
    drive = Drive(limits())
    hits = {Lane.INTERACTIVE: [1] * 13, Lane.BULK: [2] * 6}
    for lane, prompt in hits.items():
        for turn in range(2):
            drive.add(request(f"{lane}-{turn}", prompt, lane=lane))
            drive.run()
    found = drive.scheduler.stats().lanes
    told = {lane: drive.told[f"{lane}-1", 0].outputs[0].n_cached for lane in hits}
    assert told == {Lane.INTERACTIVE: 12, Lane.BULK: 4}
    for lane in Lane:
        assert found[f"{lane}_cached_tokens"] == told.get(lane, 0)
        assert found[f"{lane}_prompt_tokens"] == 2 * len(hits.get(lane, ()))
