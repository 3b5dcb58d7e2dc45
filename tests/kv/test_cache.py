"""The cache facade: matching, holding, publishing, evicting; the audit after every operation."""

import random

import pytest

from jserve.kv.cache import PageCache
from jserve.kv.pages import PageLease
from jserve.kv.radix import RootKey

KEY: RootKey = ("", "", None)
OTHERS: list[RootKey] = [
    ("u", "a", None),
    ("t", "b", None),
    ("t", "a", "lora"),
]
Z = 4


def cache_of(n_pages=17, page_size=Z, reuse=True) -> PageCache:
    return PageCache(
        n_pages=n_pages, page_size=page_size, n_slots=6, pages_per_slot=16, reuse=reuse
    )


def known(cache: PageCache, tokens, slot=0, key=KEY) -> list[int]:
    """Compute, publish and release ``tokens``; the pages they lie in."""
    lease = cache.match(key, tokens, slot=slot)
    assert cache.extend(lease, len(tokens))
    cache.publish(lease, tokens, len(tokens))
    pages = list(lease.pages)
    cache.release(lease)
    return pages


@pytest.mark.parametrize(
    ("n_same", "n_asked", "hit"),
    [(8, 9, 8), (8, 8, 4), (7, 12, 4), (4, 5, 4), (4, 4, 0), (3, 9, 0), (9, 12, 8), (12, 13, 12)],
)
def test_match_is_whole_pages_and_leaves_one_token(n_same, n_asked, hit):
    cache = cache_of()
    pages = known(cache, list(range(12)))
    asked = [*range(n_same), *[99] * (n_asked - n_same)]
    lease = cache.match(KEY, asked, slot=1)
    assert lease.capacity == hit
    assert lease.pages == pages[: hit // Z]
    cache.check([lease])


def test_keys_share_nothing():
    cache = cache_of()
    tokens = list(range(9))
    known(cache, tokens, key=("t", "a", None))
    for slot, key in enumerate(OTHERS):
        assert cache.match(key, tokens, slot=slot).capacity == 0
    assert cache.match(("t", "a", None), tokens, slot=5).capacity == 8


def test_a_prefix_is_compared_not_hashed_alone():
    """The same page of tokens below another parent is another page."""
    cache = cache_of()
    known(cache, [1, 1, 1, 1, 7, 7, 7, 7])
    lease = cache.match(KEY, [2, 2, 2, 2, 7, 7, 7, 7, 0], slot=1)
    assert lease.capacity == 0


def test_a_lease_is_given_back_exactly_once():
    cache = cache_of()
    lease = cache.match(KEY, [1, 2], slot=3)
    cache.release(lease)
    with pytest.raises(RuntimeError, match="slot 3 was released twice"):
        cache.release(lease)


def test_extend_refuses_without_a_trace():
    cache = cache_of(n_pages=5)
    lease = cache.match(KEY, [1], slot=0)
    assert cache.extend(lease, 8)
    assert not cache.extend(lease, 17)
    assert not cache.extend(lease, 16, keep=1)
    assert lease.capacity == 8
    cache.check([lease])
    assert cache.extend(lease, 16)
    cache.check([lease])


def test_eviction_takes_the_least_recently_used_leaf_and_spares_the_locked():
    cache = cache_of(n_pages=7)
    old, new = [1] * 4, [2] * 4
    known(cache, old)
    known(cache, new)
    held = cache.match(KEY, [*new, 0], slot=1)
    known(cache, [3] * 4)
    cache.match(KEY, [*old, 0], slot=2)  # now the locked ones are old and new
    lease = cache.match(KEY, [9], slot=3)
    assert cache.extend(lease, 16), "three free pages and the one unlocked"
    assert cache.tree.n_nodes == 2
    assert held.pages[0] not in lease.pages
    assert not cache.extend(lease, 20)


def test_using_a_prefix_keeps_it_from_eviction():
    cache = cache_of(n_pages=4)
    known(cache, [1] * 4)
    known(cache, [2] * 4)
    cache.release(cache.match(KEY, [1] * 5, slot=0))  # 1 is now the more recently used
    cache.evict(1)
    assert cache.match(KEY, [1] * 5, slot=1).capacity == 4
    assert cache.match(KEY, [2] * 5, slot=2).capacity == 0


def test_equal_prefixes_computed_side_by_side_stay_private():
    cache = cache_of()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    first, second = (cache.match(KEY, tokens, slot=s) for s in (0, 1))
    for lease in (first, second):
        assert cache.extend(lease, 12)
        cache.publish(lease, tokens, 8)
    cache.check([first, second])
    assert cache.tree.n_nodes == 2
    cache.publish(second, [*tokens, 9, 9, 9, 9], 12)  # goes on below the first one's pages
    cache.check([first, second])
    cache.release(first)
    cache.check([second])
    longer = cache.match(KEY, [*tokens, 9, 9, 9, 9, 0], slot=0)
    assert longer.pages == [*first.pages[:2], second.pages[2]]


@pytest.mark.parametrize(("reuse", "cacheable"), [(True, False), (False, True)])
def test_what_must_not_be_cached_is_not(reuse, cacheable):
    cache = cache_of(reuse=reuse)
    lease = cache.match(KEY, [1] * 9, slot=0, reuse=cacheable, cacheable=cacheable)
    assert cache.extend(lease, 9)
    cache.publish(lease, [1] * 9, 8)
    cache.check([lease])
    cache.release(lease)
    assert cache.tree.n_nodes == 0
    assert cache.pool.n_free == cache.pool.n_usable
    assert not cache.tree.roots


def test_stale_leaf_entries_do_not_pile_up():
    cache = cache_of()
    known(cache, [1] * 8)
    for _ in range(1000):
        cache.release(cache.match(KEY, [1] * 9, slot=0))
    assert len(cache.tree._leaves) < 100
    assert cache.clear() == 2


class Model:
    """Random operations against plain bookkeeping: which token prefixes may be found."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = cache_of(n_pages=self.random.choice([6, 9, 17]), page_size=2)
        self.live: dict[int, tuple[PageLease, list[int], int]] = {}
        self.pages: dict[int, tuple] = {}
        """What was computed into each page: its whole prefix."""

    def open(self) -> None:
        slots = [s for s in range(6) if s not in self.live]
        if not slots:
            return
        tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, 14))]
        lease = self.cache.match(KEY, tokens, slot=slots[0])
        for i, page in enumerate(lease.pages):
            assert self.pages[page] == tuple(tokens[: 2 * i + 2]), "a foreign page was matched"
        if self.cache.extend(lease, len(tokens)):
            self.live[slots[0]] = (lease, tokens, lease.capacity)
            for i in range(lease.n_shared, len(tokens) // 2):
                self.pages[lease.pages[i]] = tuple(tokens[: 2 * i + 2])
        else:
            self.cache.release(lease)

    def publish(self) -> None:
        if self.live:
            lease, tokens, _ = self.random.choice(list(self.live.values()))
            self.cache.publish(lease, tokens, self.random.randrange(len(tokens) + 1))

    def close(self) -> None:
        if self.live:
            slot = self.random.choice(list(self.live))
            self.cache.release(self.live.pop(slot)[0])

    def evict(self) -> None:
        self.cache.evict(self.random.randrange(1, 4))


@pytest.mark.parametrize("seed", range(25))
def test_random_operations_over_two_tokens(seed):
    """A vocabulary of two makes prefixes collide as often as they can."""
    model = Model(seed)
    moves = [model.open, model.open, model.publish, model.publish, model.close, model.evict]
    for _ in range(150):
        model.random.choice(moves)()
        model.cache.check([lease for lease, _, _ in model.live.values()])
    for lease, _, _ in model.live.values():
        model.cache.release(lease)
    model.cache.clear()
    assert model.cache.pool.n_free == model.cache.pool.n_usable
    assert not model.cache.tree.roots
