"""Which pages are evicted first: hints, their time, sessions, low priorities."""

import pytest

from jserve.errors import BadRequest
from jserve.kv.cache import PageCache
from jserve.kv.radix import RootKey
from jserve.kv.retention import EVERYONE, SESSION, Keep, keeps_of, strongest
from jserve.kv.sessions import Sessions
from jserve.request_options import Retention

KEY: RootKey = ("", "", None)
Z = 4


def cache_of(n_pages=17) -> PageCache:
    return PageCache(n_pages=n_pages, page_size=Z, n_slots=6, pages_per_slot=16)


def use(cache, tokens, *keeps, slot=0):
    """Compute (or find), publish and give back ``tokens``."""
    lease = cache.match(KEY, tokens, slot=slot, keeps=keeps)
    assert cache.extend(lease, len(tokens))
    cache.publish(lease, tokens, len(tokens))
    cache.release(lease)
    cache.check([])
    return lease


def known(cache, *prompts) -> list[int]:
    return [cache.n_known(KEY, [*tokens, 0]) for tokens in prompts]


A, B, C = [1] * 8, [2] * 8, [3] * 8


def test_hints_cover_the_pages_they_touch():
    keeps = keeps_of([Retention(start=3, end=9, priority=90), Retention(start=8, seconds=5.0)], Z)
    assert [(k.first, k.end) for k in keeps] == [(0, 3), (2, 1 << 31)]
    assert [getattr(strongest(keeps, i), "priority", None) for i in range(4)] == [90, 90, 90, 75]
    assert strongest(keeps[:1], 3) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": -1},
        {"start": 4, "end": 4},
        {"priority": 101},
        {"priority": 50.5},
        {"seconds": -1.0},
        {"seconds": float("nan")},
    ],
)
def test_a_wrong_hint_names_its_field(wrong):
    with pytest.raises(BadRequest) as e:
        Retention(**wrong)
    assert e.value.field == f"retain.{list(wrong)[-1]}"


def test_priority_comes_before_age():
    cache = cache_of()
    use(cache, A, Keep(priority=75, seconds=60))
    use(cache, B)
    use(cache, C, Keep(priority=10, seconds=60))
    assert cache.evict(2) == 2
    assert known(cache, A, B, C) == [2, 2, 0], "the low one goes first, though used last"
    cache.evict(2)
    assert known(cache, A, B) == [2, 0], "then the oldest of the others"
    cache.check([])


def test_a_priority_ends_with_its_time():
    cache = cache_of()
    cache.advance(100.0)
    use(cache, A, Keep(priority=75, seconds=10))
    use(cache, B)
    cache.advance(109.9)
    cache.evict(1)
    assert known(cache, A, B) == [2, 1]
    cache.advance(110.0)
    cache.evict(2)
    assert known(cache, A, B) == [0, 1], "now it is the oldest of its equals"


def test_use_prolongs_a_priority_and_a_clock_that_goes_back_does_not():
    cache = cache_of()
    use(cache, A, Keep(priority=75, seconds=10))
    cache.advance(9.0)
    use(cache, [*A, 5])
    cache.advance(1.0)
    assert cache.now == 9.0
    use(cache, B)
    cache.advance(18.0)
    cache.evict(2)
    assert known(cache, A, B) == [2, 0]


def test_a_low_hint_does_not_sell_what_others_made():
    cache = cache_of()
    use(cache, A)
    use(cache, [*A, *C], Keep(priority=0, seconds=60))
    use(cache, B)
    cache.evict(2)
    assert known(cache, A, B, [*A, *C]) == [2, 2, 2], "only its own pages went"


def test_a_range_keeps_its_pages_only():
    cache = cache_of()
    use(cache, [*A, *B], *keeps_of([Retention(start=0, end=8, priority=80)], Z))
    use(cache, C)
    cache.evict(4)
    assert known(cache, [*A, *B]) == [2]


def test_stale_entries_of_both_heaps_are_dropped():
    cache = cache_of()
    for _ in range(2000):
        use(cache, A, Keep(priority=75, seconds=60))
    assert len(cache.tree._leaves) + len(cache.tree._lapses) < 100
    assert cache.clear() == 2


def test_a_session_outlives_everything_but_not_for_ever():
    cache = cache_of()
    sessions = Sessions(cache, 30.0)
    lease = use(cache, A, sessions.keep())
    sessions.ended("", "s", "r1", lease)
    use(cache, B, Keep(priority=100, seconds=60))
    cache.evict(2)
    assert known(cache, A, B) == [2, 0]
    use(cache, B)
    cache.advance(30.0)
    sessions.expire()
    assert len(sessions) == 0
    cache.evict(2)
    assert known(cache, A, B) == [0, 2]


def test_a_session_gives_way_when_nothing_else_is_left():
    cache = cache_of(n_pages=5)
    sessions = Sessions(cache, 30.0)
    sessions.ended("", "s", "r1", use(cache, A, sessions.keep()))
    lease = cache.match(KEY, [9] * 16, slot=1)
    assert cache.extend(lease, 16)
    assert known(cache, A) == [0]


def test_a_session_holds_its_newest_branch():
    cache = cache_of()
    sessions = Sessions(cache, 30.0)
    stem = [7] * 4
    sessions.ended("", "s", "r1", use(cache, [*stem, *A], sessions.keep()))
    sessions.ended("", "s", "r2", use(cache, [*stem, *B], sessions.keep()))
    found = {node.key: node.priority for _, node in cache.tree.nodes()}
    assert found == {tuple(stem): SESSION, tuple(A[:4]): EVERYONE, tuple(B[:4]): SESSION}
    cache.check([])
    cache.evict(2)
    assert known(cache, [*stem, *A], [*stem, *B]) == [1, 3]


def test_choices_of_one_turn_are_all_kept():
    cache = cache_of()
    sessions = Sessions(cache, 30.0)
    for tail in (A, B):
        sessions.ended("", "s", "r1", use(cache, [*C, *tail], sessions.keep()))
    assert {node.priority for _, node in cache.tree.nodes()} == {SESSION}
    sessions.ended("", "s", "r2", use(cache, [*C, *A, *C], sessions.keep()))
    found = {node.key: node.priority for _, node in cache.tree.nodes()}
    assert found[tuple(B[:4])] == EVERYONE
