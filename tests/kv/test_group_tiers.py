"""Pages of groups of layers in host memory and on disk: what a hit needs of each group comes back, under names that
tell groups apart, and tokens betray a wrong page."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jserve.kv import cache as page_cache
from jserve.kv.groups import GroupedCache
from jserve.kv.prefix import Prefix
from jserve.kv.radix import RadixTree
from jserve.kv.tiers import HostTier, group_name, next_digest, root_digest
from jserve.kv_layout import Reach, Span
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.types import PageMove
from jserve.window import PageDemand, Window, tokens_ahead
from tests.kv.counting import CountingDrive
from tests.kv.disk_drive import DiskDrive
from tests.kv.group_machine import REACHES
from tests.kv.test_groups import KEY, MIXED, W, Z, computed, n_held
from tests.sched.sched_drive import config, limits, request

TEXT = list(range(60))
N = len(TEXT) // Z
N_SLID = (len(TEXT) - W + 1) // Z
N_PASSED = (len(TEXT) - 2 * W + 1) // Z
"""Pages that no tier keeps of a window."""
N_GROUPS = 3


def tiered(reaches=MIXED, n_pages: int = 200, n_host_pages: int = 200) -> GroupedCache:
    demand = PageDemand.of(reaches, Z, 16)
    return GroupedCache(
        reaches, demand, n_pages=n_pages, n_slots=4, pages_per_slot=32, n_host_pages=n_host_pages
    )


def moved(cache: GroupedCache, step: int = 0) -> tuple[list[PageMove], list[PageMove]]:
    """(what goes out, what comes in) with plan ``step``, which is committed at once."""
    moves = cache.moves(step)
    cache.landed(step)
    return [m for m in moves if m.out], [m for m in moves if not m.out]


def evicted(cache: GroupedCache, tokens: list[int] = TEXT) -> list[PageMove]:
    """All of ``tokens`` was computed and evicted; what was saved of it."""
    cache.release(computed(cache, tokens))
    cache.evict(10_000)
    return moved(cache)[0]


def test_windows_keep_their_last_pages_and_full_groups_all():
    cache = tiered()
    assert len(evicted(cache)) == N + 2 * (N - N_PASSED)
    assert not any(part.tree.roots for part in cache.parts), "nothing of it is on the device"
    lease = cache.match(KEY, [*TEXT, 1], slot=0)
    assert lease.capacity == len(TEXT)
    assert cache.admit(lease, [len(TEXT) + 1] * 2)
    assert n_held(lease) == [N + 1, N - N_SLID + 1]
    out, back = moved(cache, 1)
    assert (len(out), len(back)) == (0, N + 2 * (N - N_SLID))
    cache.check([lease])
    cache.release(lease)
    cache.check([])


def test_where_a_prefix_parts_its_window_is_kept_too():
    """Two texts share 8 pages: the window before page 8 serves a third one."""
    cache, other = tiered(), [*TEXT[:32], *range(100, 128)]
    for tokens in (TEXT, other):
        cache.release(computed(cache, tokens))
    cache.evict(10_000)
    moved(cache)
    lease = cache.match(KEY, [*TEXT[:32], 7, 7, 7], slot=0)
    assert lease.capacity == 32
    cache.release(lease)
    cache.check([])


def test_a_host_page_goes_to_the_page_of_its_group():
    """By place: what left page p of a group comes back to that position of that group."""
    cache = tiered()
    cache.release(computed(cache, TEXT))
    at = {
        page: (group, node.depth - 1)
        for part in cache.parts
        for _, node in part.tree.nodes()
        for group, page in zip(part.groups, part.pool.pages_of(node.page), strict=True)
    }
    cache.evict(10_000)
    out, _ = moved(cache)
    held = {move.host: at[move.page] for move in out}
    lease = cache.match(KEY, [*TEXT, 1], slot=2)
    assert cache.admit(lease, [len(TEXT)] * 2)
    _, back = moved(cache, 1)
    place = {
        page: (group, number)
        for part, own in zip(cache.parts, lease.parts, strict=True)
        for number, one in enumerate(own.pages)
        if one
        for group, page in zip(part.groups, part.pool.pages_of(one), strict=True)
    }
    assert {move.page: held[move.host] for move in back} == place


def test_a_window_may_be_partly_on_the_device():
    cache = tiered()
    cache.release(computed(cache, TEXT))
    full, window = cache.parts
    cache.evict(2 * (N_SLID + 1))  # one page of the last window went with what slid
    assert (full.tree.n_nodes, window.tree.n_nodes) == (N, N - N_SLID - 1)
    out, _ = moved(cache)
    assert len(out) == 2 * (N_SLID + 1 - N_PASSED), "what slid long ago is not kept"
    assert cache.n_known(KEY, [*TEXT, 1]) == 0
    lease = cache.match(KEY, [*TEXT, 1], slot=0)
    assert cache.admit(lease, [len(TEXT)] * 2)
    _, back = moved(cache, 1)
    assert len(back) == 2
    assert {move.host for move in back} == {move.host for move in out[-2:]}
    cache.check([lease])
    # It is found by others now, who wait for the same plan.
    other = cache.match(KEY, [*TEXT, 2], slot=1)
    assert not any(part.absent for part in other.parts)
    cache.check([lease, other])
    for held in (lease, other):
        cache.release(held)
    assert cache.n_known(KEY, [*TEXT, 1]) == N
    cache.check([])


@pytest.mark.parametrize("group", range(N_GROUPS))
def test_a_page_that_lacks_in_one_group_is_no_hit(group):
    cache = tiered()
    evicted(cache)  # of page N - 5 on, a window of N - 4 pages begins before
    for number, n_hit in ((N - 1, N - 1), (N - 2, N - 2), (N - 3, N - 3), (N - 4, 0)):
        lost = group_name(digests()[number + 1], group)
        cache.tier._remove(cache.tier._pages[lost])
        lease = cache.match(KEY, [*TEXT, 1], slot=0)
        assert lease.capacity == n_hit * Z
        cache.release(lease)
    cache.check([])


def digests() -> list[bytes]:
    """Of the first 0, 1, ... pages of ``TEXT``."""
    found = [root_digest(KEY)]
    for i in range(N):
        found.append(next_digest(found[-1], TEXT[i * Z : (i + 1) * Z]))
    return found


def test_names_tell_groups_positions_and_prefixes_apart():
    found = digests()
    names = {group_name(digest, group) for digest in found for group in range(N_GROUPS)}
    assert len(names | set(found)) == (N_GROUPS + 1) * len(found)
    assert {len(name) for name in names} == {16}


def test_an_admission_that_fails_leaves_no_trace():
    cache = tiered(n_pages=60)
    evicted(cache)
    pool = cache.pool
    held = pool.take(pool.n_free - 10)
    lease = cache.match(KEY, [*TEXT, 1], slot=0)
    assert lease.capacity == len(TEXT)
    assert not cache.admit(lease, [len(TEXT)] * 2)
    cache.release(lease)
    assert moved(cache, 1) == ([], [])
    assert not any(part.tree.roots for part in cache.parts)
    cache.check([], held)


def test_pages_evicted_before_their_load_was_planned_are_still_in_host_memory():
    cache = tiered()
    evicted(cache)
    for step in (1, 2):
        lease = cache.match(KEY, [*TEXT, 1], slot=0)
        assert cache.admit(lease, [len(TEXT)] * 2)
        cache.check([lease])
        cache.release(lease)
        if step == 1:  # nobody planned: what would be loaded belongs to others now
            cache.evict(10_000)
            assert moved(cache, step) == ([], [])
    out, back = moved(cache, 2)
    assert (len(out), len(back)) == (0, N + 2 * (N - N_SLID))
    cache.check([])


def tight(n_host_pages: int, reaches=MIXED, n_more: int = 4, **changes):
    """Limits whose pool holds one sequence of 64 tokens and little else."""
    ahead = tokens_ahead(config().scheduler, 16, 0)
    n_pages = 1 + n_more + PageDemand.of(reaches, Z, ahead).most(64)
    base = {"max_model_len": 64, "page_move_s": 1e-4, "n_pages": n_pages, "reaches": reaches}
    return limits(n_host_pages=n_host_pages, **base | changes)


def until_done(drive, id: str, tokens, **fields) -> int:
    """Tokens of the prompt that were computed. A disk answers at once: a read a step would take too long."""
    drive.add(request(id, tokens, **{"max_tokens": 2} | fields))
    if isinstance(drive, DiskDrive):
        drive.launch()
        while drive.deliver():
            pass
    drive.run()
    return drive.computed[id]


A, B = [i % 7 for i in range(49)], [i % 5 + 3 for i in range(49)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(REACHES))
def test_what_was_evicted_comes_back_instead_of_being_computed(name, depth):
    drive = CountingDrive(tight(300, REACHES[name]), depth=depth)
    cache = drive.scheduler.resources.cache
    for id, tokens in (("a", A), ("b", B)):
        assert until_done(drive, id, tokens) == 49
    cache.evict(10_000)
    until_done(drive, "c", [8, 8, 8])  # a plan that carries the saves
    for id, tokens in (("a2", A), ("b2", B), ("a3", A)):
        assert until_done(drive, id, tokens) == 1
    assert drive.scheduler.counters()["host_pages_loaded_total"] > 0
    drive.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["one full, two of a window", "chunks", "three reaches"])
def test_a_restart_finds_what_was_on_disk(name, depth):
    disk: dict = {}
    lim = tight(100, REACHES[name])
    drive = DiskDrive(lim, disk=disk, depth=depth)
    until_done(drive, "a", A)
    drive.scheduler.resources.cache.evict(10_000)
    until_done(drive, "b", B[:9])  # a plan that carries the saves
    n_files = len(disk)

    drive = DiskDrive(lim, disk=disk, depth=depth)
    assert until_done(drive, "again", A) == 1
    n_read = drive.scheduler.counters()["disk_pages_read_total"]
    assert 0 < n_read <= n_files
    demand = drive.scheduler.resources.cache
    assert n_read <= demand.hit_pages(48 // Z), "no more than a hit needs is read"

    # With one file less, of any group, it is computed; never are wrong tokens drawn.
    for lost in list(disk):
        kept = {name: page for name, page in disk.items() if name != lost}
        drive = DiskDrive(lim, disk=kept, depth=depth)
        until_done(drive, "again", A)


def test_a_disk_whose_prefix_host_memory_does_not_hold_gives_what_fits():
    """Only a full group's prefix and its window together are worth reading."""
    disk: dict = {}
    drive = DiskDrive(tight(100), disk=disk)
    for n in (49, 25):
        until_done(drive, f"a{n}", A[:n], max_tokens=8)
    drive.scheduler.resources.cache.evict(10_000)
    until_done(drive, "b", B[:9])
    drive = DiskDrive(tight(13), disk=disk)
    assert until_done(drive, "again", A) == 25
    assert not drive.runner.asked


def test_what_the_disk_lacks_at_the_end_is_what_a_hit_needs():
    disk: dict = {}
    drive = DiskDrive(tight(100), disk=disk)
    until_done(drive, "a", A)
    cache = drive.scheduler.resources.cache
    named = cache.unstored_pages()
    assert len(named) == len(dict(named)) == len({name for _, name in named})
    n_passed = (48 - 2 * W + 1) // Z
    assert len(named) == 12 + 2 * (12 - n_passed)
    assert 0 not in dict(named)


def test_a_sequence_that_gives_way_takes_its_pages_of_every_group_along():
    drive = CountingDrive(
        tight(200, n_more=40), depth=1, preemption="swap", prefix_caching=False, max_prefill_chunk=8
    )
    drive.add(request("other", [9, 9, 9], max_tokens=40))
    drive.add(request("a", A[:30], max_tokens=20))
    while len(drive.told["a", 0].tokens) < 6:
        drive.step()
    resources = drive.scheduler.resources
    (seq,) = [s for s in resources.running if s.request.id == "a"]
    resources.preempt(seq)
    n_private = sum(len(kept) for kept in seq.swapped.pages.values())
    assert n_private > len(seq.swapped.pages) > 0, "two groups of the window have a page each"
    assert {part for part, _ in seq.swapped.pages} == {0, 1}
    pool = resources.cache.pool
    drive.hold(
        pool.n_free - 6
    )  # enough for the other one, so that nobody comes back in this very plan
    drive.step()
    drive.let_go()
    drive.run()
    counters = drive.scheduler.counters()
    assert (counters["swaps_out_total"], counters["swaps_back_total"]) == (1, 1)
    assert drive.computed["a"] <= 30 + 2
    drive.check_idle()


def test_a_journal_with_moves_of_groups_replays(tmp_path):
    path = tmp_path / "journal"
    with path.open("wb") as file:
        drive = DiskDrive(tight(30), depth=1, journal=JournalFile(file))
        for i, tokens in enumerate([A, B, A, B[:30], A]):
            until_done(drive, f"r{i}", tokens, max_tokens=5)
    assert b'"moves":[[' in path.read_bytes()
    replay(path, drive.limits, drive.config)


def torture(seed: int) -> int:
    """Turns of a few texts through a pool too small for them, under all oracles; loads."""
    rng = random.Random(seed)
    reaches = REACHES[rng.choice(["one full, two of a window", "chunks", "three reaches"])]
    lim = tight(rng.choice([30, 100]), reaches, rng.choice([2, 12]), max_prefill_tokens=6)
    drive = DiskDrive(lim, depth=rng.choice([0, 1, 2]), preemption="swap")
    for i in range(10):
        text = rng.choice([A, B])[: rng.choice([20, 33, 41])]
        drive.add(request(f"r{i}", [*text, rng.randrange(9)], max_tokens=rng.choice([1, 3, 20])))
        for _ in range(rng.randrange(12)):
            drive.step()
        if rng.random() < 0.3:
            drive.scheduler.resources.cache.evict(rng.randrange(40))
        if rng.random() < 0.2:
            drive.preempt(rng.randrange(4))
    drive.run()
    return int(drive.scheduler.counters()["host_pages_loaded_total"])


def all_tortures() -> list[int]:
    return [torture(seed) for seed in range(6)]


def everything() -> None:
    test_pages_evicted_before_their_load_was_planned_are_still_in_host_memory()
    all_tortures()


def a_windows_page_comes_back_one_position_off(patch):
    held = Prefix.held

    def off(self, number):
        before = self.names(number - 1) if self.part.window and number else [b""]
        return held(self, number - all(map(self.part.tier.holds, before)))

    patch.setattr(Prefix, "held", off)


def a_name_without_the_group(patch):
    patch.setattr(page_cache, "group_name", lambda digest, group: digest)


def a_hit_without_the_last_page_of_a_window(patch):
    longest = Window.longest
    patch.setattr(
        Window,
        "longest",
        lambda self, n, there: longest(self, n, lambda i: i == n - 1 or there(i)),
    )
    some = HostTier.hold

    def hold(self, name):
        return some(self, name) or next(iter(self._pages.values()))

    patch.setattr(HostTier, "hold", hold)


def a_load_is_not_forgotten_with_its_page(patch):
    patch.setattr(HostTier, "forget_loads", lambda self, pages: None)


def what_slid_is_what_is_kept(patch):
    passed = RadixTree.passed
    patch.setattr(
        RadixTree, "passed", lambda self, node: bool(self.window) and not passed(self, node)
    )


WRONG = [
    a_windows_page_comes_back_one_position_off,
    a_name_without_the_group,
    a_hit_without_the_last_page_of_a_window,
    a_load_is_not_forgotten_with_its_page,
]


@pytest.mark.parametrize("bug", WRONG, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        everything()


@pytest.mark.parametrize("bug", WRONG[:2], ids=lambda bug: bug.__name__)
def test_the_tokens_alone_betray_it(bug, monkeypatch):
    bug(monkeypatch)
    monkeypatch.setattr(DiskDrive, "check", lambda self: None)
    with pytest.raises(AssertionError):
        all_tortures()


def test_keeping_what_slid_and_not_what_is_needed_finds_less(monkeypatch):
    what_slid_is_what_is_kept(monkeypatch)
    cache = tiered()
    evicted(cache)
    assert cache.match(KEY, [*TEXT, 1], slot=0).capacity == N_PASSED * Z


@pytest.mark.one_in(3)
def test_without_a_bug_nothing_is_caught_and_pages_come_back():
    assert sum(all_tortures()) > 50


def test_the_search_is_that_of_brute_force():
    """Windows, chunks, sinks and none, with holes anywhere."""
    rng = random.Random(0)
    for _ in range(400):
        window = Window(
            page_size=Z,
            tokens=rng.choice([0, 3, 9, 17]),
            sinks=rng.choice([0, 0, 5]),
            chunked=rng.random() < 0.3,
        )
        if window.chunked or not window.tokens:
            window = replace(window, sinks=0)
        n = rng.randrange(13)
        there = [rng.random() < 0.8 for _ in range(n)]
        best = max(m for m in range(n + 1) if all(there[i] for i in window.needed(m)))
        assert window.longest(n, lambda i, there=there: there[i]) == best


def test_reaches_of_equal_spans_have_names_of_their_own():
    """Also where the parts see alike: a group is its number."""
    cache = tiered((Reach(Span(), 2), Reach(Span(W), 1)))
    out = evicted(cache)
    assert len(out) == 2 * N + (N - N_PASSED)
    assert len(cache.tier) == len(out), "two groups share a name"
