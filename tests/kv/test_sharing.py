"""A prefix that is being computed is shared as it grows; nobody waits for nothing or for ever."""

import pytest

from jserve.kv.cache import PageCache
from jserve.sched.cache.prefix_wait import PATIENCE, PrefixWaits, common_pages
from tests.kv.counting import CountingDrive, limits, request, with_fields

Z = 4
PREFIX = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4]


def wide(**changes):
    return limits(max_prefill_tokens=64, **changes)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("n", [2, 4])
def test_a_prefix_asked_for_at_once_is_computed_once(depth, n):
    drive = CountingDrive(wide(), depth=depth)
    for i in range(n):
        drive.add(request(f"r{i}", [*PREFIX, i, 0, 1], max_tokens=3))
    drive.run()
    assert drive.computed["r0"] == 27
    assert [drive.computed[f"r{i}"] for i in range(1, n)] == [3] * (n - 1)
    assert [drive.told[f"r{i}", 0].outputs[0].n_cached for i in range(n)] == [0] + [24] * (n - 1)
    assert drive.scheduler.prefix_waits.n_waits == n - 1
    assert len(drive.scheduler.prefix_waits) == 0


def test_choices_of_one_request_share_their_prompt():
    drive = CountingDrive(wide(), depth=1)
    drive.add(request("r", [*PREFIX, 1], n=3, temperature=1.0, seed=3))
    drive.run()
    assert drive.computed["r"] == 25 + 2


def test_a_follower_starts_when_its_part_is_there_though_the_leader_goes_on():
    """Pages are published chunk by chunk: four tokens a step, two of six pages are shared."""
    drive = CountingDrive(limits(), depth=0, max_prefill_chunk=4)
    drive.add(request("long", PREFIX, max_tokens=1))
    drive.add(request("short", [*PREFIX[:8], 0], max_tokens=1))
    for _ in range(2):
        drive.step()
    assert drive.computed == {"long": 8}
    drive.step()
    assert drive.computed == {"long": 12, "short": 1}
    assert not drive.done("long")
    drive.run()


@pytest.mark.parametrize("how", ["cancel", "preempt", "poison", "fail"])
def test_a_leader_that_is_gone_is_not_waited_for(how):
    drive = CountingDrive(limits(), depth=1, max_prefill_chunk=4)
    drive.add(request("long", PREFIX, max_tokens=1))
    drive.step()
    drive.add(request("next", [*PREFIX, 1, 2], max_tokens=2))
    drive.step()
    assert len(drive.scheduler.prefix_waits) == 1
    if how == "cancel":
        drive.cancel("long")
    elif how == "preempt":
        drive.preempt(0)
    elif how == "poison":
        drive.poison("long")
    else:
        drive.runner.fail_next = RuntimeError("the step raised")
    drive.run()
    assert drive.told["next", 0].end is not None


def test_a_leader_without_progress_is_given_up():
    drive = CountingDrive(limits(), depth=0, max_prefill_chunk=4)
    drive.add(request("long", PREFIX, max_tokens=1))
    drive.step()
    drive.add(request("next", [*PREFIX, 1, 2], max_tokens=2))
    (follower,) = list(drive.scheduler.resources.waiting)
    prefix_waits = PrefixWaits(drive.scheduler.resources)
    assert [prefix_waits.wait(follower, step) for step in range(PATIENCE)] == [True] * PATIENCE
    assert not prefix_waits.wait(follower, PATIENCE)
    assert not prefix_waits.wait(follower, PATIENCE), "whoever asks in that step hears the same"
    assert len(prefix_waits) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": "b"},
        {"cache_salt": "b"},
        {"skip_prefix_cache": True},
    ],
)
def test_who_cannot_share_does_not_wait(fields):
    drive = CountingDrive(wide(), depth=0)
    drive.add(request("a", [*PREFIX, 1]))
    drive.add(with_fields(request("b", [*PREFIX, 1]), **fields))
    drive.step()
    assert drive.computed == {"a": 25, "b": 25}
    drive.run()
    assert drive.scheduler.prefix_waits.n_waits == 0


@pytest.mark.parametrize("first", [{"skip": True}, {"prompt_logprobs": 1}])
def test_a_leader_must_publish(first):
    """One that keeps its pages to itself leads nobody; one whose prompt is scored does."""
    drive = CountingDrive(wide(), depth=0)
    drive.add(request("a", [*PREFIX, 1], **first))
    drive.add(request("b", [*PREFIX, 1]))
    drive.run()
    assert drive.computed["b"] == (25 if "skip" in first else 1)


def test_one_page_of_many_is_not_worth_a_wait():
    drive = CountingDrive(wide(), depth=0)
    drive.add(request("a", PREFIX[:6]))
    drive.add(request("b", [*PREFIX[:4], *[0] * 12]))
    drive.step()
    assert drive.computed == {"a": 6, "b": 16}


def test_nothing_is_waited_for_that_is_known():
    drive = CountingDrive(wide(), depth=0)
    drive.add(request("a", PREFIX, max_tokens=1))
    drive.run()
    drive.add(request("b", [*PREFIX, 1, 2, 3, 4, 5]))
    drive.add(request("c", [*PREFIX, 9, 9]))
    drive.step()
    assert drive.computed["c"] == 2
    drive.run()


def test_tenants_do_not_see_each_other():
    """Counted in tokens scheduled: a prefix known to one tenant costs another all of it."""
    drive = CountingDrive(wide(), depth=1)
    for id, tenant in [("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")]:
        drive.add(with_fields(request(id, [*PREFIX, 1, 2]), tenant=tenant))
        drive.run()
    assert drive.computed == {"a1": 26, "b1": 26, "a2": 2, "b2": 2}


def test_common_pages():
    assert common_pages([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 2) == 2
    assert common_pages([1, 2, 3, 4], [1, 2, 3, 5], 2) == 1
    assert common_pages([1], [1], 2) == 0


def test_a_cache_without_reuse_knows_nothing():
    cache = PageCache(n_pages=5, page_size=Z, n_slots=1, pages_per_slot=4, reuse=False)
    assert cache.n_known(("", "", None, 0), PREFIX) == 0
