"""Pages that slide out of the window: given back, findable, evicted from the middle, never read."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jserve.errors import ContextTooLong
from jserve.kv.cache import PageCache
from jserve.kv.radix import RootKey
from jserve.kv.retention import Keep
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.window import Window
from tests.kv.counting import CountingDrive, limits, request

KEY: RootKey = ("", "", None)
Z, W = 4, 9


@pytest.mark.parametrize("sinks", [0, 1, 4, 6])
@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 16])
@pytest.mark.parametrize("page_size", [1, 4])
def test_gone_is_what_no_later_token_reads(page_size: int, tokens: int, sinks: int):
    window = Window(page_size=page_size, tokens=tokens, sinks=sinks)
    for n in range(60):
        read = {p for at in range(n, 80) for p in range(80) if at - tokens < p <= at or p < sinks}
        gone = [i for i in range(n) if not read & set(range(i * page_size, (i + 1) * page_size))]
        assert list(window.gone(n)) == [i for i in gone if (i + 1) * page_size <= n]


def test_without_a_window_nothing_is_gone():
    assert not Window(page_size=4)
    assert list(Window(page_size=4, sinks=3).gone(100)) == []


def windowed(n_pages: int = 65, **changes):
    changes = {"window": W, "max_model_len": 256, "max_prefill_tokens": 16} | changes
    return limits(n_pages=n_pages, page_size=Z, **changes)


def held(drive, id: str) -> int:
    (seq,) = [s for s in drive.scheduler.resources.running if s.request.id == id]
    return sum(1 for page in seq.lease.pages if page)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("sinks", [0, 6])
def test_a_long_generation_holds_a_window_of_pages(depth: int, sinks: int):
    drive = CountingDrive(windowed(sinks=sinks), depth=depth)
    drive.add(request("long", range(3), max_tokens=200))
    most = 0
    while drive.step():
        if drive.scheduler.resources.running.snapshot():
            most = max(most, held(drive, "long"))
    assert drive.told["long", 0].end.finish == "length"
    assert most <= -(-W // Z) + 2 + -(-sinks // Z)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_long_prompt_never_holds_more_than_window_and_chunks(depth: int):
    drive = CountingDrive(windowed(max_prefill_tokens=8), depth=depth, overlap=depth)
    drive.add(request("p", [i % 7 for i in range(180)], max_tokens=4))
    most = 0
    while drive.step():
        if drive.scheduler.resources.running.snapshot():
            most = max(most, held(drive, "p"))
    assert most <= drive.scheduler.resources.demand.parts[0][1] < 180 // Z // 3
    assert drive.computed["p"] == 180


def test_many_long_ones_share_a_small_pool_without_giving_way():
    drive = CountingDrive(windowed(n_pages=65, max_prefill_tokens=8), depth=1)
    for i in range(4):
        drive.add(request(f"r{i}", [(i + k) % 7 for k in range(60)], max_tokens=150))
    drive.run()
    assert drive.scheduler.resources.n_preemptions == 0, (
        "4 * 210 tokens went through 256 tokens of pages"
    )


ROLLING = {"max_prefill_tokens": 4, "n_slots": 4}
"""With these a sequence holds at most 2 + (9 + 3 * 4) / 4, rounded up, pages: 8 of them, 32 tokens."""


def give_way_thrice(drive, id: str) -> None:
    resources = drive.scheduler.resources
    for _ in range(3):
        while all(s.request.id != id for s in resources.running):
            assert drive.step()
        (seq,) = [s for s in resources.running if s.request.id == id]
        resources.preempt(seq)
        drive.check()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("sinks", [0, 6])
def test_contexts_longer_than_the_pool_are_served(depth: int, sinks: int):
    drive = CountingDrive(windowed(n_pages=13, sinks=sinks, **ROLLING), depth=depth)
    assert drive.scheduler.resources.demand.parts[0][1] <= 12
    for i in range(3):
        drive.add(request(f"r{i}", [(i + k) % 7 for k in range(90)], max_tokens=100))
    drive.run()
    assert all(told.end.finish == "length" for told in drive.told.values())


def test_who_gave_way_thrice_rolls_through_a_pool_that_is_full_beside_it():
    drive = CountingDrive(windowed(n_pages=10, **ROLLING), depth=1)
    resources = drive.scheduler.resources
    drive.add(request("a", [k % 7 for k in range(90)], max_tokens=60))
    give_way_thrice(drive, "a")
    drive.add(request("b", [k % 5 for k in range(60)], max_tokens=40))
    most = 0
    while drive.step():
        for seq in resources.running:
            if seq.request.id == "a":
                assert seq.lease.n_own == resources.demand.parts[0][1] or seq.lease.capacity >= 149
                most = max(most, held(drive, "a"))
    drive.run()
    assert most == resources.demand.parts[0][1] == 8
    assert resources.n_preemptions == 3, "nobody was asked for a page again"


def test_who_rolls_shares_pages_where_there_is_room():
    drive = CountingDrive(windowed(n_pages=33, **ROLLING), depth=1)
    drive.add(request("a", [k % 7 for k in range(90)], max_tokens=60))
    while not drive.told["a", 0].tokens:
        drive.step()
    computed = drive.computed["a"]
    give_way_thrice(drive, "a")
    drive.run()
    assert drive.computed["a"] <= computed + 3 * (4 + Z)


def test_who_rolls_owes_nothing_to_those_who_begin_alike():
    """Another with the same beginning holds no page of it, so it can give each of them back."""
    drive = CountingDrive(windowed(n_pages=14, n_slots=4), depth=0, max_prefill_chunk=4)
    resources, text = drive.scheduler.resources, [k % 7 for k in range(90)]
    drive.add(request("a", text, max_tokens=20))
    give_way_thrice(drive, "a")
    resources.cache.evict(99)
    while not resources.running.snapshot() or resources.running.snapshot()[0].scheduled < 12:
        drive.step()
    drive.add(request("b", [*text[:12], 5], max_tokens=20))
    while len(resources.running) < 2:
        drive.step()
    resources.cache.evict(99)
    drive.hold(resources.cache.n_available)
    for _ in range(30):
        drive.step()
    drive.run()


def test_handles_leave_room_for_a_window_of_pages():
    drive = CountingDrive(windowed(n_pages=41, **ROLLING), depth=0)
    resources = drive.scheduler.resources
    assert resources.retention.handles.quota == 20 < 64, (
        "half, not nothing: a full context has 64 pages"
    )


def test_many_more_are_admitted_than_their_lengths_would_let_in():
    """12 sequences of 200 tokens, a pool of 400."""
    lim = windowed(n_pages=101, max_prefill_tokens=4, n_slots=12, max_rows=12, max_decode_rows=12)
    drive, most = CountingDrive(lim, depth=1), 0
    for i in range(12):
        drive.add(request(f"r{i}", [(i + k) % 7 for k in range(20)], max_tokens=180))
    while drive.step():
        most = max(most, len(drive.scheduler.resources.running))
    assert most == 12
    drive.run()
    assert drive.scheduler.resources.n_preemptions == 0


@pytest.mark.parametrize(("n_pages", "fits"), [(8, False), (9, True)])
def test_a_request_longer_than_the_pool_needs_a_window_of_pages(n_pages: int, fits: bool):
    drive = CountingDrive(windowed(n_pages=n_pages, **ROLLING), depth=1)
    long = request("long", [k % 7 for k in range(100)], max_tokens=50)
    if fits:
        drive.add(long)
        drive.run()
    else:
        with pytest.raises(ContextTooLong, match="pool"):
            drive.add(long)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(12))
def test_long_ones_in_a_pool_that_barely_holds_one_window(seed: int):
    """Whoever gives way whenever: nobody more than three times, all end, every token as alone."""
    rng = random.Random(seed)
    lim = windowed(n_pages=rng.choice([9, 12, 17]), sinks=rng.choice([0, 2]), **ROLLING)
    lim = dataclasses.replace(lim, n_pages=lim.n_pages + (lim.sinks > 0), n_host_pages=seed % 3 * 9)
    drive = CountingDrive(lim, depth=rng.choice([0, 1]), preemption="swap")
    for i in range(6):
        text = [rng.randrange(3) for _ in range(rng.choice([5, 40, 90]))]
        drive.add(request(f"r{i}", text, max_tokens=rng.choice([3, 70]), skip=rng.random() < 0.2))
        for _ in range(rng.randrange(30)):
            drive.step()
            if rng.random() < 0.3:
                drive.preempt(rng.randrange(4))
    drive.run()


def test_full_models_keep_all():
    drive = CountingDrive(windowed(window=0), depth=1)
    drive.add(request("long", range(3), max_tokens=200))
    for _ in range(150):
        drive.step()
    assert held(drive, "long") >= 150 // Z


# -- hits


def lease_of(cache: PageCache, tokens, *, slot: int = 0, keeps=()):
    """A sequence that computed ``tokens`` page by page, as a scheduler would have it."""
    lease = cache.match(KEY, tokens, slot=slot, keeps=keeps)
    for n in range(lease.capacity + Z, len(tokens) + 1, Z):
        assert cache.extend(lease, n)
        cache.publish(lease, tokens, n)
        cache.slide(lease, n)
    cache.check([lease])
    return lease


def make(n_pages: int = 33, **changes) -> PageCache:
    return PageCache(
        n_pages=n_pages, page_size=Z, n_slots=3, pages_per_slot=64, window=W, **changes
    )


def test_a_hit_needs_only_the_last_window():
    cache, text = make(), list(range(80))
    lease = lease_of(cache, text)
    assert list(lease.gone) == list(range((80 - W + 1) // Z))
    assert cache.tree.n_evictable == len(lease.gone)
    cache.release(lease)
    cache.evict(17)  # the front goes first
    cache.check([])
    assert (cache.tree.n_nodes, cache.tree.n_hollow) == (3, 17)
    again = cache.match(KEY, [*text, 1], slot=1)
    assert again.capacity == 80
    assert [i for i, page in enumerate(again.pages) if page] == [18, 19]
    assert cache.n_known(KEY, text[:60]) == 0, "what a hit of 56 tokens needs is gone"
    cache.check([again])
    cache.release(again)
    cache.evict(3)
    assert (cache.tree.n_nodes, cache.tree.n_hollow, len(cache.tree.roots)) == (0, 0, 0)


def test_a_hollow_prefix_is_filled_again_by_who_computes_it():
    cache, text = make(), list(range(60))
    cache.release(lease_of(cache, text))
    cache.evict(12)
    assert cache.n_known(KEY, text[:40]) == 0
    branch = [*text[:40], *range(100, 112)]
    lease = lease_of(cache, branch, slot=1)
    assert cache.n_known(KEY, text[:40]) == 9
    cache.release(lease)
    cache.check([])
    assert cache.n_known(KEY, [*text, 0]) == 15
    assert cache.n_known(KEY, [*branch, 0]) == 13


def test_a_longer_hit_may_be_gone_while_a_shorter_one_stays():
    cache, text = make(), list(range(40))
    cache.release(lease_of(cache, text[:16]))
    cache.release(lease_of(cache, text, slot=1))
    path = cache.tree.match(cache.tree.root(KEY), text, 10)
    cache.tree.lock_path(path[3])
    cache.evict(20)
    assert cache.n_known(KEY, [*text, 0]) == 4
    cache.tree.unlock_path(path[3])
    cache.check([])


def test_a_pin_keeps_the_window_of_its_own_end():
    cache, text = make(), list(range(80))
    lease = lease_of(cache, text[:40])
    node = lease.node
    assert cache.tree.pinnable(node)
    cache.tree.pin(node)
    cache.release(lease)
    cache.evict(40)
    cache.check([], pinned=[node])
    assert cache.tree.n_nodes == cache.tree.n_pinned == 2
    assert cache.n_known(KEY, text) == 10
    cache.tree.unpin(node, 0.0)
    cache.evict(2)
    assert not cache.tree.roots


def test_a_pin_of_a_window_that_is_gone_is_refused():
    cache, text = make(), list(range(80))
    lease = lease_of(cache, text)
    above = lease.node.parent.parent.parent.parent.parent
    cache.evict(17)
    assert not cache.tree.pinnable(above)
    cache.release(lease)


def test_sinks_stay_and_a_hit_needs_them():
    cache, text = make(sinks=6), list(range(80))
    lease = lease_of(cache, text)
    assert [i for i, page in enumerate(lease.pages) if page][:2] == [0, 1]
    cache.release(lease)
    cache.evict(16)
    assert cache.n_known(KEY, [*text, 0]) == 20
    cache.evict(3)
    assert cache.tree.n_nodes == 1, "a sink goes last"
    assert cache.n_known(KEY, [*text, 0]) == 0
    again = lease_of(cache, text)
    cache.tree.evict(1)
    assert cache.n_known(KEY, [*text, 0]) == 20
    cache.release(again)


def test_a_window_without_its_sinks_is_no_hit():
    cache, text = make(sinks=6), list(range(80))
    keeps = (Keep(priority=100, seconds=60.0, first=15),)
    cache.release(lease_of(cache, text, keeps=keeps))
    cache.evict(15)
    kept = [node.depth for _, node in cache.tree.nodes() if node.page]
    assert sorted(kept) == [16, 17, 18, 19, 20], "the hint keeps the end, nobody the sinks"
    assert cache.n_known(KEY, [*text, 0]) == 0
    again = cache.match(KEY, [*text, 0], slot=1)
    cache.check([again])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_turns_of_a_long_conversation_are_hits_although_the_front_is_gone(depth: int):
    drive = CountingDrive(windowed(n_pages=65, max_prefill_tokens=8), depth=depth)
    drive.add(request("t0", [1, 2, 3], max_tokens=60))
    drive.run()
    for turn in range(1, 4):
        drive.add(drive.next_turn(f"t{turn}", f"t{turn - 1}", [5, turn], max_tokens=45))
        drive.run()
        assert drive.computed[f"t{turn}"] <= 2 + Z
        drive.add(request(f"x{turn}", [turn] * 100, max_tokens=40))  # pushes the front out
        drive.run()
    assert drive.scheduler.resources.cache.tree.n_evicted > 30


def test_pages_of_a_windowed_model_come_back_from_the_host():
    lim = windowed(n_pages=65, n_host_pages=200, max_prefill_tokens=8)
    drive = CountingDrive(lim, depth=1)
    text = [i % 5 for i in range(100)]
    drive.add(request("a", text, max_tokens=2))
    drive.run()
    for i in range(3):
        drive.add(request(f"b{i}", [i + 6] * 200, max_tokens=2))
        drive.run()
    loaded = drive.scheduler.counters()["host_pages_loaded_total"]
    drive.add(request("again", [*text, 3], max_tokens=2))
    drive.run()
    assert drive.computed["again"] <= 1 + Z
    n = drive.scheduler.counters()["host_pages_loaded_total"] - loaded
    assert 0 < n <= -(-W // Z) + 1, "what is behind the window is not brought back"


def test_a_journal_of_a_windowed_run_replays(tmp_path):
    path, lim = tmp_path / "journal", windowed(n_pages=65, max_prefill_tokens=8)
    with path.open("wb") as file:
        drive = CountingDrive(lim, depth=1, journal=JournalFile(file))
        for i in range(6):
            drive.add(request(f"r{i}", [(i % 3 + k) % 7 for k in range(70)], max_tokens=60))
            drive.step()
        drive.run()
    replay(path, drive.limits, drive.config)
