"""Named prefixes: pinned once computed, found by name, gone in time, within their quota."""

import contextlib

import pytest
from hypothesis import given, settings, strategies as st

from jserve.errors import BadRequest, CacheFull, CacheNotFound, ContextTooLong, Overloaded
from jserve.kv.handles import quota_of
from jserve.sched.cache import handles as caching
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.types import Finish
from tests.kv.counting import CountingDrive, Told, limits, request, with_fields
from tests.sched.sched_drive import Drive

DOCUMENT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4]
Z = 4


def wide(**changes):
    return limits(max_prefill_tokens=64, **changes)


def create(drive, name="doc", tokens=DOCUMENT, ttl_s=1000.0, id=None, **fields):
    """Hand in the request that makes a handle."""
    made = with_fields(request(id or f"make-{name}", tokens, max_tokens=0), cache=name, **fields)
    caching.create(drive.scheduler, made, ttl_s, drive.now)
    drive.requests[made.id] = made
    drive.told[made.id, 0] = Told()
    drive.check()


def use(drive, id, rest, name="doc", **fields):
    """A request that sends only what comes after the handle's tokens."""
    short = with_fields(request(id, rest, max_tokens=3), cache=name, **fields)
    drive.scheduler.submit(short, drive.now)
    handle = drive.scheduler.resources.retention.handles.find(short.tenant, name)
    drive.requests[id] = with_fields(short, prompt_ids=(*handle.tokens, *rest))
    drive.told[id, 0] = Told()
    drive.check()


def info(drive, name="doc", tenant=""):
    (found,) = caching.find(drive.scheduler, tenant, name)
    return found


def test_a_handle_is_computed_once_and_survives_any_eviction():
    drive = CountingDrive(wide(), depth=1)
    create(drive)
    assert not info(drive).pinned
    drive.until_done("make-doc")
    assert drive.told["make-doc", 0].end.finish is Finish.LENGTH
    assert info(drive).pinned
    assert info(drive).n_tokens == 14
    assert info(drive).n_pages == 3
    drive.scheduler.resources.cache.clear()
    drive.check()
    for i in range(3):
        use(drive, f"r{i}", [i, 0, 1])
        drive.until_done(f"r{i}")
        assert drive.computed[f"r{i}"] == 14 - 12 + 3
        assert drive.told[f"r{i}", 0].outputs[0].n_cached == 12
    assert info(drive).n_uses == 3


def test_a_prompt_that_begins_with_the_tokens_is_taken_as_whole():
    drive = CountingDrive(wide(), depth=0)
    create(drive)
    drive.until_done("make-doc")
    drive.add(with_fields(request("whole", [*DOCUMENT, 5, 5]), cache="doc"))
    drive.until_done("whole")
    assert drive.computed["whole"] == 4


def test_a_request_may_use_a_handle_that_is_still_computed():
    drive = CountingDrive(wide(), depth=1, max_prefill_chunk=4)
    create(drive)
    use(drive, "r", [0])
    drive.until_done("r")
    assert drive.computed["r"] == 3


def test_time_ends_a_handle_and_renewal_prolongs_it():
    drive = CountingDrive(wide(), depth=0)
    create(drive, ttl_s=10.0)
    drive.until_done("make-doc")
    drive.now += 8
    caching.renew(drive.scheduler, "", "doc", 10.0, drive.now)
    drive.now += 9
    drive.scheduler.plan(drive.now)
    assert info(drive).expires_in_s == pytest.approx(1.0)
    drive.now += 1
    drive.scheduler.plan(drive.now)
    with pytest.raises(CacheNotFound):
        info(drive)
    drive.check()
    assert drive.scheduler.resources.cache.clear() == 3, "nothing is pinned any more"
    with pytest.raises(CacheNotFound, match="no cache named 'doc'"):
        use(drive, "late", [1])


def test_dropping_gives_quota_and_pages_back():
    drive = CountingDrive(wide(), depth=0, handle_pages=4)
    create(drive)
    drive.until_done("make-doc")
    with pytest.raises(CacheFull, match="3 of the 4 that handles may pin") as e:
        create(drive, "other", [9] * 8)
    assert e.value.status == 429
    caching.drop(drive.scheduler, "", "doc", drive.now)
    create(drive, "other", [9] * 16)
    drive.until_done("make-other")
    assert drive.scheduler.resources.retention.handles.n_pages == 4
    with pytest.raises(CacheNotFound):
        caching.drop(drive.scheduler, "", "doc", drive.now)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"name": ""}, BadRequest, "name"),
        ({"name": "x" * 129}, BadRequest, "name"),
        ({"tokens": [1, 2, 3]}, BadRequest, "prompt"),
        ({"ttl_s": 0.0}, BadRequest, "ttl_s"),
        ({"ttl_s": float("nan")}, BadRequest, "ttl_s"),
        ({"ttl_s": 1e9}, BadRequest, "ttl_s"),
        ({"skip_prefix_cache": True}, BadRequest, "skip_prefix_cache"),
        ({"tokens": [1] * 65}, ContextTooLong, "prompt"),
        ({"tokens": [99] * 8}, BadRequest, "prompt"),
    ],
)
def test_what_cannot_be_a_handle_leaves_no_trace(fields, error, field):
    drive = CountingDrive(wide(), depth=0, handle_pages=30)
    with pytest.raises(error) as e:
        create(drive, **fields)
    assert e.value.field == field
    handles = drive.scheduler.resources.retention.handles
    assert (len(handles), handles.n_pages) == (0, 0)
    assert not drive.scheduler.has_work


def test_a_refused_or_failed_creation_leaves_no_handle():
    drive = CountingDrive(wide(), depth=0, max_waiting=1)
    drive.add(request("waits", [1, 2]))
    with pytest.raises(Overloaded):
        create(drive)
    assert len(drive.scheduler.resources.retention.handles) == 0
    drive.run()
    create(drive)
    with pytest.raises(BadRequest, match="exists already"):
        create(drive, id="again")
    drive.cancel("make-doc")
    assert len(drive.scheduler.resources.retention.handles) == 0
    create(drive, id="second")
    drive.poison("second")
    drive.until_done("second")
    assert drive.told["second", 0].end.finish is Finish.ERROR
    assert len(drive.scheduler.resources.retention.handles) == 0


def test_handles_belong_to_their_tenant_and_salt():
    drive = CountingDrive(wide(), depth=0)
    create(drive, tenant="a", cache_salt="s")
    drive.until_done("make-doc")
    for fields in ({}, {"tenant": "b"}):
        with pytest.raises(CacheNotFound):
            use(drive, "x", [1], **fields)
    with pytest.raises(BadRequest, match="cache_salt"):
        use(drive, "x", [1], tenant="a")
    assert caching.find(drive.scheduler, "b", None) == []
    assert [h.name for h in caching.find(drive.scheduler, "a", None)] == ["doc"]
    create(drive, tenant="b", id="other")
    drive.until_done("other")
    assert drive.computed["other"] == 14


def test_after_a_fault_a_handle_is_computed_again_by_its_next_use():
    drive = CountingDrive(wide(), depth=0)
    create(drive)
    drive.until_done("make-doc")
    drive.scheduler.recover((), "", drive.now)
    drive.runner.reset()
    drive.check()
    assert not info(drive).pinned
    use(drive, "r1", [1, 2])
    drive.until_done("r1")
    assert drive.computed["r1"] == 16
    assert info(drive).pinned
    assert drive.scheduler.resources.cache.tree.n_pinned == 3, (
        "its own pages, not those of its user"
    )
    drive.scheduler.resources.cache.clear()
    use(drive, "r2", [1, 2])
    drive.until_done("r2")
    assert drive.computed["r2"] == 4


def test_pins_never_starve_the_longest_sequence():
    assert quota_of(33, 16, 0) == 16
    assert quota_of(33, 16, 30) == 16
    assert quota_of(33, 16, 5) == 5
    assert quota_of(17, 16, 0) == 0
    drive = CountingDrive(wide(), depth=1)
    create(drive, tokens=[1] * 63)
    drive.until_done("make-doc")
    drive.add(request("long", [2] * 40, max_tokens=24))
    drive.until_done("long")


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    page_size=st.sampled_from([1, 4, 8]),
    n_tokens=st.integers(12, 90),
    max_model_len=st.integers(8, 64),
    window=st.sampled_from([(0, 0), (0, 0), (3, 0), (9, 0), (14, 5), (40, 3)]),
    chunk=st.sampled_from([0, 1, 5, 16]),
    depth=st.sampled_from([0, 1, 2]),
    drafts=st.sampled_from([0, 3]),
    host=st.sampled_from([0, 6]),
    handle_pages=st.sampled_from([0, 2, 1000]),
    pins=st.lists(st.integers(1, 40), max_size=6),
    n_prompt=st.integers(1, 64),
    n_preempted=st.sampled_from([0, 1, 3]),
)
def test_what_admission_takes_runs_beside_all_pins(
    page_size,
    n_tokens,
    max_model_len,
    window,
    chunk,
    depth,
    drafts,
    host,
    handle_pages,
    pins,
    n_prompt,
    n_preempted,
):
    """Whatever is pinned, and however often it gave way: the longest request that is taken has its pages."""
    lim = limits(
        n_pages=1 + -(-n_tokens // page_size),
        page_size=page_size,
        max_model_len=max_model_len,
        max_drafts=drafts,
        n_host_pages=host,
        window=window[0],
        sinks=window[1],
    )
    drive = Drive(
        lim, depth=depth, overlap=depth, max_prefill_chunk=chunk, handle_pages=handle_pages
    )
    for i, n in enumerate(pins):
        with contextlib.suppress(BadRequest, CacheFull):
            create(drive, f"h{i}", [i, *([1, 2, 3] * n)[: n - 1]])
            drive.run()
    for n_out in range(max_model_len, -1, -1):
        with contextlib.suppress(ContextTooLong):
            drive.add(request("long", [9] * n_prompt, max_tokens=n_out))
            break
    else:
        return
    for seq in drive.scheduler.resources.waiting:
        seq.n_preempted = n_preempted
    drive.run()
    assert drive.told["long", 0].end.finish in (Finish.STOP, Finish.LENGTH)
    assert not drive.given_up


def test_a_journal_with_handles_replays(tmp_path):
    path = tmp_path / "journal"
    with path.open("wb") as file:
        drive = CountingDrive(wide(), depth=1, journal=JournalFile(file), handle_pages=6)
        create(drive, ttl_s=30.0)
        drive.until_done("make-doc")
        drive.add(with_fields(request("t1", [5, 5, 5, 5, 5]), session="talk"))
        use(drive, "r1", [1])
        caching.renew(drive.scheduler, "", "doc", 15.0, drive.now)
        with pytest.raises(CacheFull):
            create(drive, "big", [3] * 60)
        drive.until_done("r1")
        drive.now += 20
        drive.step()
        with pytest.raises(CacheNotFound):
            use(drive, "late", [1])
        create(drive, "more", [7] * 9)
        drive.run()
        caching.drop(drive.scheduler, "", "more", drive.now)
    made = [out for told in drive.told.values() for out in told.outputs]
    replayed = replay(path, drive.limits, drive.config)
    assert sorted(map(str, replayed.outputs)) == sorted(map(str, made))


def test_a_session_computes_only_what_is_new():
    drive = CountingDrive(wide(n_pages=17), depth=1, session_ttl_s=50.0)
    drive.add(with_fields(request("t1", [1, 2, 3, 4, 5, 6], max_tokens=6), session="talk"))
    drive.until_done("t1")
    drive.add(request("other", [9] * 40, max_tokens=2))
    drive.until_done("other")
    drive.add(request("more", [8] * 30, max_tokens=2))
    drive.until_done("more")
    turn = drive.next_turn("t2", "t1", [7, 7], max_tokens=2)
    drive.add(with_fields(turn, session="talk"))
    drive.until_done("t2")
    assert drive.computed["t2"] == 14 - 8
    drive.now += 60
    drive.add(request("x1", [7] * 60, max_tokens=2))
    drive.until_done("x1")
    turn = drive.next_turn("t3", "t2", [7, 7], max_tokens=2)
    drive.add(with_fields(turn, session="talk"))
    drive.until_done("t3")
    assert drive.computed["t3"] == len(turn.prompt_ids), "degraded to a prefill, same tokens"
