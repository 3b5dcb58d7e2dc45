"""Pages of groups of layers that look back differently far: invariants, hits, evictions, memory, planted bugs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from jserve.kv import cache as page_cache
from jserve.kv.groups import GroupedCache
from jserve.kv.pages import GroupTable, PageSets
from jserve.kv.prefix import Prefix
from jserve.kv_layout import Reach, Span
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import Diverged, replay
from jserve.window import PageDemand, Window, tokens_ahead
from tests.kv.group_machine import REACHES, GroupMachine
from tests.sched.sched_drive import Drive, config, limits, request

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
KEY = ("", "", None)
Z, W = 4, 9
MIXED = (Reach(Span(), 1), Reach(Span(W), 2))


def test_random_operations_keep_every_invariant():
    """The machine's invariants are asserted after every step."""
    fast = settings(max_examples=15, stateful_step_count=40, derandomize=True, **COMMON)
    run_state_machine_as_test(GroupMachine, settings=fast)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_operations_keep_every_invariant_nightly():
    nightly = settings(max_examples=150, stateful_step_count=60, derandomize=True, **COMMON)
    run_state_machine_as_test(GroupMachine, settings=nightly)


def cache_of(reaches=MIXED, n_pages: int = 200, n_ahead: int = 16) -> GroupedCache:
    demand = PageDemand.of(reaches, Z, n_ahead)
    return GroupedCache(reaches, demand, n_pages=n_pages, n_slots=4, pages_per_slot=32)


def computed(cache: GroupedCache, tokens: list[int], slot: int = 0):
    """A lease whose pages were all computed, published and slid, a page at a time."""
    lease = cache.match(KEY, tokens, slot=slot)
    for n in range(lease.capacity + Z, len(tokens) + 1, Z):
        assert cache.extend(lease, n)
        cache.publish(lease, tokens, n)
        cache.slide(lease, n)
    return lease


def n_held(lease) -> list[int]:
    return [sum(1 for page in part.pages if page) for part in lease.parts]


@pytest.mark.parametrize("name", sorted(REACHES))
def test_each_part_holds_what_it_still_reads(name):
    reaches = REACHES[name]
    cache = cache_of(reaches)
    lease = computed(cache, list(range(100)))
    for reach, held in zip(reaches, n_held(lease), strict=True):
        lowest = int(reach.span.lowest(np.int64(100)))
        assert held == 25 - lowest // Z
    cache.check([lease])
    cache.release(lease)
    cache.clear()
    cache.check([])
    assert cache.pool.n_free == cache.pool.n_usable


def test_a_chunk_is_given_back_whole_where_the_next_begins():
    window = Window(page_size=Z, tokens=8, chunked=True)
    gone = [len(window.gone(n)) for n in range(33)]
    assert gone == [2 * (n // 8) for n in range(33)]


def test_a_hit_needs_every_page_of_full_groups_and_the_last_window_of_others():
    tokens = list(range(60))
    cache = cache_of()
    cache.release(computed(cache, tokens))
    full, window = cache.parts
    assert cache.n_known(KEY, [*tokens, 1]) == 15
    # What slid out of the window is least worth keeping, and nobody lacks it.
    n_slid = (60 - W + 1) // Z
    assert window.n_evictable == 15
    assert cache.evict(2 * n_slid) == 2 * n_slid
    assert (full.tree.n_nodes, window.tree.n_nodes) == (15, 15 - n_slid)
    assert cache.n_known(KEY, [*tokens, 1]) == 15
    assert cache.n_known(KEY, tokens[:40]) == 0, "the window before token 36 is gone"
    lease = cache.match(KEY, [*tokens, 1], slot=1)
    assert n_held(lease) == [15, 15 - n_slid]
    cache.check([lease])
    cache.release(lease)
    # One page of the last window less: no hit, though all of the full group is there.
    cache.evict(1)
    assert full.tree.n_nodes == 15
    assert cache.n_known(KEY, [*tokens, 1]) == 0
    cache.check([])


def test_what_was_used_last_is_evicted_last_whatever_its_group():
    old, new = list(range(40)), list(range(100, 140))
    cache = cache_of()
    for tokens in (old, new):
        cache.release(computed(cache, tokens))
    n_last = 10 - (40 - W + 1) // Z
    slid = 2 * 2 * (10 - n_last)
    assert cache.evict(slid + 2 * n_last + 10) == slid + 2 * n_last + 10
    assert cache.n_known(KEY, [*old, 1]) == 0
    assert cache.n_known(KEY, [*new, 1]) == 10


def test_pages_of_one_group_serve_another():
    """The pool is one: full groups take what windows left, and the other way round."""
    cache = cache_of(n_pages=46)
    lease = computed(cache, list(range(100)))
    most = cache.demand.most(100)
    assert 45 - cache.pool.n_free >= 25 + 2 * 3
    cache.release(lease)
    short = [computed(cache, list(range(i, i + 8)), slot=i // 8) for i in (0, 8, 16)]
    cache.check(short)
    assert most == 25 + 2 * cache.demand.parts[1][1]


def test_handles_pin_the_last_window_and_all_of_full_groups():
    tokens = list(range(60))
    cache = cache_of()
    lease = computed(cache, tokens)
    pin = cache.pin(lease, 15)
    assert pin is not None
    cache.release(lease)
    n_slid = (60 - W + 1) // Z
    assert cache.evict(1000) == 2 * n_slid
    assert cache.pool.n_usable - cache.pool.n_free <= cache.hit_pages(15)
    assert cache.n_known(KEY, [*tokens, 1]) == 15
    cache.check([], pinned=[pin])
    cache.unpin(pin)
    assert cache.evict(1000) == 15 + 2 * (15 - n_slid)
    cache.check([])


def test_a_pin_that_lacks_a_window_holds_nothing():
    tokens = list(range(60))
    cache = cache_of()
    cache.release(computed(cache, tokens))
    lease = cache.match(KEY, [*tokens, 1], slot=0)
    cache.evict(1000)
    assert cache.pin(lease, 6) is None, "the window before page 6 was evicted"
    cache.check([lease])


def test_other_weights_find_nothing_and_take_nothing():
    tokens = list(range(60))
    cache = cache_of()
    lease = computed(cache, tokens)
    cache.clear(weights="others")
    assert (lease.n_weights, cache.n_weights) == (0, 1)
    assert cache.n_known(KEY, [*tokens, 1]) == 0
    other = cache.match(KEY, [*tokens, 1], slot=1)
    assert other.capacity == 0
    cache.check([lease, other])
    for held in (lease, other):
        cache.release(held)
    cache.clear()
    assert cache.pool.n_free == cache.pool.n_usable


def test_a_long_sequence_holds_its_reach_on_the_real_scheduler():
    """Decoding far beyond the window, the pool holds all pages of the full group and a window of the others."""
    lim = limits(max_model_len=400, n_pages=200, reaches=MIXED)
    drive = Drive(lim)
    drive.add(request("r", range(5), max_tokens=300))
    resources, most = drive.scheduler.resources, 0
    bound = resources.demand.parts[1][1]
    while drive.scheduler.has_work:
        drive.step()
        for seq in resources.running:
            held = n_held(seq.lease)
            assert held[0] == -(-seq.lease.parts[0].capacity // Z)
            most = max(most, held[1])
    assert -(-W // Z) <= most <= bound < 300 // Z
    drive.check_idle()


def test_who_gave_way_thrice_never_asks_again():
    """A protected sequence rolls through its windows' pages while others fill the pool."""
    lim = limits(max_model_len=200, n_pages=130, reaches=MIXED)
    drive = Drive(lim, max_prefill_chunk=8)
    drive.add(request("r", range(5), max_tokens=150))
    for _ in range(3):
        for _ in range(6):
            drive.step()
        drive.preempt(0)
    others = [request(f"o{i}", [*range(i, 10)], max_tokens=60) for i in range(6)]
    for other in others:
        drive.add(other)
    drive.run()
    assert drive.scheduler.resources.n_preemptions >= 3


def test_a_journal_replays_to_the_same_tables(tmp_path):
    lim = limits(max_model_len=200, n_pages=60, reaches=MIXED)
    path = tmp_path / "journal"
    with path.open("wb") as file:
        drive = Drive(lim, journal=JournalFile(file))
        for i in range(4):
            drive.add(request(f"r{i}", [*range(7 + i)], max_tokens=40))
        drive.run()
    assert replay(path, lim, drive.config).n_steps > 40
    wider = replace(lim, reaches=(MIXED[0], Reach(Span(W + Z), 2)))
    with pytest.raises(Diverged):
        replay(path, wider, drive.config)


def torture(reaches: tuple[Reach, ...], seed: int) -> int:
    """Requests that share prefixes, in a pool too small for them, under all oracles; the answers."""
    rng = random.Random(seed)
    lim = limits(max_model_len=64, max_prefill_tokens=6, reaches=reaches)
    ahead = tokens_ahead(config().scheduler, 6, 0)
    n_pages = PageDemand.of(reaches, Z, ahead).most(64) + rng.choice([2, 12])
    lim = replace(lim, n_pages=n_pages)
    drive = Drive(lim, depth=rng.choice([0, 1, 2]), max_prefill_chunk=rng.choice([0, 5]))
    for i in range(8):
        head = [n % 9 for n in range(rng.choice([0, 8, 20]))]
        tail = [rng.randrange(9) for _ in range(rng.randrange(1, 8))]
        drive.add(request(f"r{i}", [*head, *tail], max_tokens=rng.choice([3, 25, 36])))
        for _ in range(rng.randrange(8)):
            drive.step()
        if rng.random() < 0.2:
            drive.preempt(rng.randrange(4))
    return sum(map(bool, drive.run().values()))


def all_tortures() -> int:
    names = ("two full, one of a window", "one full, two of a window", "chunks")
    return sum(torture(REACHES[name], seed) for name in names for seed in range(2))


def given_back_one_token_early(patch):
    gone = Window.gone
    patch.setattr(Window, "gone", lambda self, n: gone(self, n + 1 if self.tokens else n))


def a_hit_without_the_last_window(patch):
    longest = Window.longest
    patch.setattr(
        Window, "longest", lambda self, n, there: n if self.tokens else longest(self, n, there)
    )
    patch.setattr(Prefix, "missing", lambda self, n: [])


def the_page_of_another_group(patch):
    groups, turns = GroupTable.groups, itertools.cycle([1, 1, 1, -1])
    patch.setattr(GroupTable, "groups", lambda self, *a: groups(self, *a)[:: next(turns)])


def a_column_too_few(patch):
    columns = PageDemand.columns
    patch.setattr(
        PageDemand,
        "columns",
        lambda self, most: tuple(max(2, n - 6) if n < most else n for n in columns(self, most)),
    )


def freed_while_others_hold_it(patch):
    drop = PageSets.drop

    def early(self, ids):
        ids = list(ids)
        for one in ids:
            self.refs[one] = 1
        return drop(self, dict.fromkeys(ids))

    patch.setattr(PageSets, "drop", early)


def one_part_hits_further(patch):
    lease = page_cache.PageCache.lease

    def further(self, slot, prefix, n_pages, **kw):
        return lease(self, slot, prefix, n_pages - bool(self.window and n_pages), **kw)

    patch.setattr(page_cache.PageCache, "lease", further)


BUGS = [
    given_back_one_token_early,
    a_hit_without_the_last_window,
    the_page_of_another_group,
    a_column_too_few,
    freed_while_others_hold_it,
    one_part_hits_further,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        all_tortures()


@pytest.mark.parametrize(
    "bug",
    [given_back_one_token_early, a_hit_without_the_last_window, the_page_of_another_group],
    ids=lambda bug: bug.__name__,
)
def test_the_tokens_alone_betray_it(bug, monkeypatch):
    bug(monkeypatch)
    monkeypatch.setattr(Drive, "check", lambda self: None)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        all_tortures()


def test_without_a_bug_nothing_is_caught():
    assert all_tortures() == 3 * 2 * 8


def test_room_is_the_longest_sequence_that_fits():
    demand = PageDemand.of(MIXED, Z, 16)
    for n_pages in (30, 50, 77):
        room = demand.room(n_pages, 10_000)
        assert demand.most(room) <= n_pages < demand.most(room + 1)
    assert demand.room(10_000, 400) == 400
    plain = replace(demand, parts=((1, 0),))
    assert plain.room(10, 1000) == 10 * Z
