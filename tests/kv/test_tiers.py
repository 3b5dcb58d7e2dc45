"""Evicted pages in host memory: what comes back is what went out, and nothing comes too soon."""

import pytest

from jserve.kv.cache import PageCache
from jserve.kv.radix import RootKey
from jserve.kv.tiers import HostTier, digest_of, next_digest
from jserve.sched.cache.retention import root_of
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from tests.kv.counting import CountingDrive, limits, request, with_fields

KEY: RootKey = ("", "", None)
A, B = [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9, 8, 8, 8, 8]


def tiered(n_pages=9, n_host_pages=6, **changes):
    return limits(
        n_pages=n_pages,
        n_host_pages=n_host_pages,
        max_prefill_tokens=64,
        max_model_len=32,
        **changes,
    )


def test_digests_name_whole_prefixes():
    cache = PageCache(n_pages=9, page_size=4, n_slots=2, pages_per_slot=8, n_host_pages=2)
    lease = cache.match(KEY, A, slot=0)
    cache.extend(lease, 8)
    cache.publish(lease, A, 8)
    first = next_digest(digest_of(cache.tree.root(KEY)), A[:4])
    assert digest_of(lease.node) == next_digest(first, A[4:])
    others = [("t", "", None), ("", "s", None), ("", "", "lora")]
    digests = {next_digest(digest_of(cache.tree.root(key)), A[:4]) for key in (KEY, *others)}
    assert len(digests) == 4, "tenant, salt and adapter are part of the name"
    assert next_digest(first, A[:4]) != first
    assert len(first) == 16


def test_a_host_page_is_found_only_when_its_save_was_committed():
    tier = HostTier(2)
    tier.save(b"a", 5)
    assert not tier.holds(b"a")
    (move,) = tier.drain(7)
    assert (move.page, move.out) == (5, True)
    assert not tier.holds(b"a")
    tier.check()
    tier.landed(7)
    assert tier.holds(b"a")
    assert tier.drain(8) == ()


def test_the_oldest_host_page_goes_first_and_use_counts():
    tier = HostTier(2)
    for step, name in enumerate([b"a", b"b"]):
        tier.save(name, 3)
        tier.drain(step)
        tier.landed(step)
    tier.load(tier.hold(b"a"), 4)
    tier.save(b"c", 5)
    tier.check()
    assert (tier.holds(b"a"), tier.holds(b"b")) == (True, False)
    kinds = [move.out for move in tier.drain(2)]
    assert kinds == [True, False], "what goes out comes first"


def test_a_host_page_whose_bytes_are_on_the_way_is_not_given_away():
    tier = HostTier(1)
    tier.save(b"a", 3)
    tier.save(b"b", 4)  # no room: forgotten
    tier.check()
    assert [move.page for move in tier.drain(0)] == [3]
    tier.save(b"b", 4)
    assert tier.drain(1) == ()
    tier.landed(0)
    tier.load(tier.hold(b"a"), 7)
    tier.save(b"b", 4)
    assert [(move.page, move.out) for move in tier.drain(2)] == [(7, False)]
    tier.save(b"b", 4)
    assert [(move.page, move.out) for move in tier.drain(3)] == [(4, True)]
    tier.check()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_was_evicted_comes_back_instead_of_being_computed(depth):
    drive = CountingDrive(tiered(), depth=depth)
    drive.add(request("a", [*A, 1], max_tokens=2))
    drive.run()
    drive.add(request("b", [*B, *B, *B, 1], max_tokens=7))
    drive.run()
    resources = drive.scheduler.resources
    key = root_of(request("x", A))
    assert resources.cache.n_known(key, [*A, 0]) == 0, "its pages are gone from the device"
    drive.add(request("again", [*A, 2], max_tokens=2))
    drive.run()
    assert drive.computed["again"] == 1
    assert drive.told["again", 0].outputs[0].n_cached == 8
    assert drive.scheduler.counters()["host_pages_loaded_total"] == 2


def test_a_tier_of_another_tenant_is_not_read():
    drive = CountingDrive(tiered(), depth=0)
    drive.add(request("a", [*A, 1], max_tokens=1))
    drive.run()
    drive.add(request("b", [*B, *B, *B, 1], max_tokens=7))
    drive.run()
    drive.add(with_fields(request("c", [*A, 1], max_tokens=1), tenant="t"))
    drive.run()
    assert drive.computed["c"] == 9


def test_skipping_and_scoring_take_nothing_from_the_host():
    drive = CountingDrive(tiered(), depth=0)
    drive.add(request("a", [*A, 1], max_tokens=1))
    drive.run()
    for i, fields in enumerate([{"skip": True}, {"prompt_logprobs": 1}]):
        drive.add(request(f"b{i}", [*B, *B, *B, 1], max_tokens=7))
        drive.run()
        drive.add(request(f"c{i}", [*A, 1], max_tokens=1, **fields))
        drive.run()
        assert drive.computed[f"c{i}"] == 9


def test_a_lost_device_loses_the_host_pages_too():
    drive = CountingDrive(tiered(), depth=0)
    for id, tokens in (("a", A), ("b", [*B, *B, *B])):
        drive.add(request(id, [*tokens, 1], max_tokens=4))
        drive.run()
    assert len(drive.scheduler.resources.cache.tier)
    drive.scheduler.recover((), "", drive.now)
    drive.runner.reset()
    assert len(drive.scheduler.resources.cache.tier) == 0
    drive.add(request("c", [*A, 1], max_tokens=4))
    drive.run()
    assert drive.computed["c"] == 9


def test_a_journal_with_moves_replays(tmp_path):
    path = tmp_path / "journal"
    with path.open("wb") as file:
        drive = CountingDrive(tiered(n_host_pages=3), depth=1, journal=JournalFile(file))
        for i, tokens in enumerate([A, [*B, *B, *B], A, [*B, *A, *B], B, A]):
            drive.add(request(f"r{i}", [*tokens, i], max_tokens=5))
            drive.run()
    assert b'"moves":[[' in path.read_bytes()
    replay(path, drive.limits, drive.config)


def test_without_a_tier_a_plan_moves_nothing():
    drive = CountingDrive(limits(n_pages=9, max_model_len=32), depth=0)
    assert drive.scheduler.resources.cache.tier is None
    assert "host_pages" not in drive.scheduler.counters()
    drive.add(request("a", A))
    plan = drive.scheduler.plan(1.0)
    assert plan.moves == ()
