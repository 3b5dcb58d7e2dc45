"""The disk tier seen from the scheduler: restarts, misses, waits that block nobody."""

import pytest

from jserve.sched.cache import handles as caching
from jserve.sched.cache.disk_wait import PATIENCE_S
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from tests.kv.counting import Told, limits, request, with_fields
from tests.kv.disk_drive import DiskDrive

A, B = [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9, 8, 8, 8, 8]


def tiered(n_host_pages=8, **changes):
    base = {"n_pages": 9, "n_host_pages": n_host_pages, "max_model_len": 32}
    return limits(**(base | {"max_prefill_tokens": 64} | changes))


def warm_disk(**options) -> dict:
    """What a server left on disk that had computed and evicted A."""
    disk: dict = {}
    drive = DiskDrive(tiered(), disk=disk, **options)
    for id, tokens in (("a", A), ("b", [*B, *B, *B]), ("c", [*B, *A, *B])):
        drive.add(request(id, [*tokens, 1], max_tokens=4))
        drive.run()
    assert len(disk) >= 2
    return disk


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_restart_finds_what_was_on_disk(depth):
    drive = DiskDrive(tiered(), disk=warm_disk(), depth=depth)
    drive.add(request("again", [*A, 1, 2, 3], max_tokens=5))
    drive.run()
    assert drive.computed["again"] == 3
    assert drive.told["again", 0].outputs[0].n_cached == 8
    assert drive.scheduler.counters()["disk_pages_read_total"] == 2


def test_another_tenant_does_not_find_it():
    drive = DiskDrive(tiered(), disk=warm_disk())
    drive.add(with_fields(request("again", [*A, 1, 2, 3]), tenant="t"))
    drive.run()
    assert drive.computed["again"] == 11


def test_a_read_that_fails_is_a_miss_and_is_not_tried_again():
    drive = DiskDrive(tiered(), disk=warm_disk())
    drive.lag = 99
    drive.add(request("x", [*A, 1, 2, 3], max_tokens=2))
    drive.launch()
    assert len(drive.runner.asked) == 2
    drive.deliver(0, fail=True)
    drive.deliver(0)
    drive.lag = 0
    drive.run()
    assert drive.computed["x"] == 11
    drive.scheduler.resources.cache.evict(99)
    assert len(drive.scheduler.resources.cache.tier.on_disk) >= 1


def test_who_waits_for_the_disk_blocks_nobody():
    drive = DiskDrive(tiered(), disk=warm_disk(), depth=1)
    drive.lag = 3
    drive.add(request("waits", [*A, 1, 2, 3], max_tokens=2))
    drive.add(request("goes", [5, 5, 5], max_tokens=2))
    drive.step()
    assert drive.computed == {"goes": 3}
    drive.run()
    assert drive.computed["waits"] == 3


def test_a_disk_that_does_not_answer_is_given_up():
    drive = DiskDrive(tiered(), disk=warm_disk(), depth=0)
    drive.lag = 10**6
    drive.add(request("x", [*A, 1, 2, 3], max_tokens=2))
    for _ in range(int(PATIENCE_S) + 3):
        drive.launch()
        if drive.flight:
            drive.commit()
    assert drive.computed["x"] == 11
    drive.lag = 0
    drive.run()


def test_an_answer_that_comes_after_the_device_was_lost_harms_nobody():
    drive = DiskDrive(tiered(n_host_pages=3), disk=warm_disk(), depth=0)
    drive.lag = 10**6
    drive.add(request("x", [*A, 1, 2, 3], max_tokens=2))
    drive.launch()
    assert drive.runner.asked
    asked = list(drive.runner.asked)
    drive.scheduler.recover((), "boom", drive.now)
    drive.runner.reset()
    drive.check()
    drive.lag = 0
    drive.add(request("y", [*B, *B, *A, 1], max_tokens=4))
    drive.run()
    assert len(asked) == 2
    assert drive.computed["x"] == 11
    assert not drive.runner.asked


def test_a_fault_of_the_device_leaves_the_disk_as_it_was():
    drive = DiskDrive(tiered(), disk=warm_disk())
    drive.add(request("x", [7, 7, 7], max_tokens=4))
    drive.runner.fail_next = RuntimeError("the step raised")
    drive.run()
    assert drive.n_faults == 1
    drive.add(request("again", [*A, 1, 2, 3], max_tokens=2))
    drive.run()
    assert drive.computed["again"] == 3
    assert drive.scheduler.resources.cache.unstored_pages(), "what comes later is written too"


def test_what_other_weights_left_on_disk_is_not_read():
    drive = DiskDrive(tiered(), disk=warm_disk())
    drive.scheduler.recover((), "", drive.now)
    drive.add(request("again", [*A, 1, 2, 3], max_tokens=2))
    drive.run()
    assert drive.computed["again"] == 11
    assert drive.scheduler.resources.cache.unstored_pages() == []


def test_a_handle_comes_back_from_disk():
    drive = DiskDrive(tiered(n_pages=17), disk=warm_disk())
    made = with_fields(request("make", [*A, 7], max_tokens=0), cache="doc")
    caching.create(drive.scheduler, made, 500.0, drive.now)
    drive.requests["make"] = made
    drive.told["make", 0] = Told()
    drive.until_done("make")
    assert drive.computed["make"] == 1
    assert caching.find(drive.scheduler, "", "doc")[0].pinned


def test_a_journal_with_reads_replays(tmp_path):
    path = tmp_path / "journal"
    disk = warm_disk()
    with path.open("wb") as file:
        drive = DiskDrive(tiered(n_host_pages=4), disk=disk, depth=1, journal=JournalFile(file))
        for i, tokens in enumerate([A, [*B, *A], A, [*B, *A, *B]]):
            drive.add(request(f"r{i}", [*tokens, i, i], max_tokens=3))
            drive.run()
    assert b'"type":"fetched"' in path.read_bytes()
    replay(path, drive.limits, drive.config)


def test_farewell_names_what_the_disk_lacks():
    disk: dict = {}
    drive = DiskDrive(tiered(), disk=disk)
    drive.add(request("a", [*A, 1], max_tokens=1))
    drive.run()
    cache = drive.scheduler.resources.cache
    assert len(cache.unstored_pages()) == 2
    cache.tier.on_disk.update(digest for _, digest in cache.unstored_pages())
    assert cache.unstored_pages() == []
