"""The page cache of a model whose layers look back differently far.

It owns what holds between the parts: one ``PageCache`` for each reach, with a tree and a table of its own, over one
pool. A hit is as long as all parts can have it, pages are given out to all parts or to none, and the page that is
evicted is the one least worth keeping of any part::

    reach      full: 1 group          window: 5 groups
    a page of  Z tokens, 1 page       the same tokens, 5 pages (a ``PageSets`` id)
    tokens     |-------------- 900 --------------|
    held       [ 7 ][ 3 ] ... [ 12 ][ 40 ]       all
                                  [ 1 ][ 2 ]     what the window still reads, 5 pages each

The tiers below keep single pages, under names that begin with the prefix and end with the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jserve.faults import point
from jserve.kv import audit
from jserve.kv.cache import PageCache, PageListener
from jserve.kv.pages import GroupTable, PageLease, PagePool, PageSets
from jserve.kv.prefix import fetch, longest, prefixes
from jserve.kv.radix import Node, RootKey, Ticks
from jserve.kv.retention import Keep
from jserve.kv.tiers import HostTier
from jserve.kv_layout import Reach
from jserve.types import PageMove
from jserve.window import PageDemand, Window, windows_of

Ends = tuple[Node, ...]
"""A node in the tree of each part."""


@dataclass(slots=True, eq=False, kw_only=True)
class GroupedLease:
    """A sequence's lease: one of each part, always of the same tokens. As ``PageLease``, of which it repeats what the
    scheduler reads."""

    parts: tuple[PageLease, ...]
    groups: tuple[int, ...]
    """Pages behind one id of each part."""
    capacity: int = 0
    """Tokens that fit the pages held in every part."""
    n_published: int = 0
    next_full: int = 0
    released: bool = False

    def sync(self) -> GroupedLease:
        """Repeat what the parts say now."""
        first = self.parts[0]
        self.capacity = min([part.capacity for part in self.parts])
        self.n_published, self.next_full = first.n_published, first.next_full
        return self

    @property
    def slot(self) -> int:
        return self.parts[0].slot

    @property
    def node(self) -> Ends:
        return tuple(part.node for part in self.parts)

    @property
    def pages(self) -> list[int]:
        """Of the first part."""
        return self.parts[0].pages

    @property
    def n_shared(self) -> int:
        return self.parts[0].n_shared

    @property
    def cacheable(self) -> bool:
        return self.parts[0].cacheable

    @property
    def n_weights(self) -> int:
        return self.parts[0].n_weights

    @property
    def n_own(self) -> int:
        """Pages of the pool that it took and still has."""
        return sum([n * part.n_own for n, part in zip(self.groups, self.parts, strict=True)])


class GroupedCache:
    """As ``PageCache``, over the parts of ``reaches``.

    Args:
        n_pages: of the pool, page 0 (scratch) included.
        demand: the most pages that a sequence holds in each group.
        columns: of the page tables of each reach; empty: as many as that takes.
        n_host_pages: of the tier in host memory; 0: there is none.
    """

    def __init__(
        self,
        reaches: tuple[Reach, ...],
        demand: PageDemand,
        *,
        n_pages: int,
        n_slots: int,
        pages_per_slot: int,
        reuse: bool = True,
        columns: tuple[int, ...] = (),
        n_host_pages: int = 0,
    ) -> None:
        self.page_size, self.reuse, self.demand = demand.page_size, reuse, demand
        self.pool = PagePool(n_pages)
        self.tier = HostTier(n_host_pages) if n_host_pages else None
        self.groups = tuple(reach.n_groups for reach in reaches)
        clock, windows = Ticks(), windows_of(reaches, self.page_size)
        columns = columns or demand.columns(pages_per_slot)
        firsts = itertools.accumulate(self.groups, initial=0)
        self.parts = tuple(
            self._part(window, range(first, first + n), width, n_slots, pages_per_slot, clock)
            for (n, window), width, first in zip(windows, columns, firsts, strict=False)
        )

    def _part(
        self, window: Window, groups: range, width: int, n_slots: int, per_slot: int, clock: Ticks
    ) -> PageCache:
        sets = PageSets(self.pool, len(groups))
        return PageCache(
            n_pages=0,
            page_size=self.page_size,
            n_slots=n_slots,
            pages_per_slot=per_slot,
            reuse=self.reuse,
            window=window.tokens,
            chunked=window.chunked,
            pool=sets,
            table=GroupTable(n_slots, per_slot, sets, width),
            clock=clock,
            tier=self.tier,
            groups=groups,
        )

    @property
    def now(self) -> float:
        return self.parts[0].now

    @property
    def weights(self) -> str:
        return self.parts[0].weights

    @property
    def n_weights(self) -> int:
        return self.parts[0].n_weights

    @property
    def listener(self) -> PageListener | None:
        """Hears of the pages of the widest reach."""
        return self.parts[0].listener

    @listener.setter
    def listener(self, listener: PageListener | None) -> None:
        self.parts[0].listener = listener

    @property
    def n_available(self) -> int:
        return self.pool.n_free + self.n_evictable

    @property
    def n_evictable(self) -> int:
        return sum([n * part.n_evictable for n, part in self._weighted()])

    @property
    def n_evicted(self) -> int:
        return sum([n * part.n_evicted for n, part in self._weighted()])

    def advance(self, now: float) -> None:
        for part in self.parts:
            part.advance(now)

    def match(
        self,
        key: RootKey,
        tokens: Seq[int],
        *,
        slot: int,
        reuse: bool = True,
        cacheable: bool = True,
        keeps: tuple[Keep, ...] = (),
    ) -> GroupedLease:
        """As ``PageCache.match``: of the longest prefix that every part has all its pages of."""
        roots = [part.tree.root(part.of_weights(key)) for part in self.parts]
        limit = self._limit(tokens) if reuse else 0
        found = prefixes(self.parts, roots, tokens, limit)
        n = longest(found, limit, self.tier.holds if self.tier is not None else None)
        leases = [
            part.lease(slot, prefix, n, cacheable=cacheable, keeps=keeps)
            for part, prefix in zip(self.parts, found, strict=True)
        ]
        return GroupedLease(parts=tuple(leases), groups=self.groups).sync()

    def n_known(self, key: RootKey, tokens: Seq[int]) -> int:
        roots = [part.tree.roots.get(part.of_weights(key)) for part in self.parts]
        known, limit = [root for root in roots if root is not None], self._limit(tokens)
        if len(known) < len(roots):
            return 0
        return longest(prefixes(self.parts, known, tokens, limit), limit, None)

    def _limit(self, tokens: Seq[int]) -> int:
        """Pages of ``tokens`` that may be had from others."""
        return (len(tokens) - 1) // self.page_size if self.reuse else 0

    def extend(self, lease: GroupedLease, n_tokens: int, *, keep: int = 0) -> bool:
        """As ``PageCache.extend``, in every part."""
        if n_tokens <= lease.capacity:
            return True
        return self.admit(lease, [n_tokens] * len(self.parts), keep=keep)

    @point("kv.extend")
    def admit(self, lease: GroupedLease, n_tokens: Seq[int], *, keep: int = 0) -> bool:
        """``extend`` to the tokens that each part shall hold pages for."""
        wanted = [
            part.n_groups * part.n_short(own, tokens)
            for (part, own), tokens in zip(self._of(lease), n_tokens, strict=True)
        ]
        short = sum(wanted)
        if short and short + keep > self.n_available:
            return False
        if short > self.pool.n_free:
            self.evict(short - self.pool.n_free)
        for (part, own), tokens in zip(self._of(lease), n_tokens, strict=True):
            part.take(own, tokens)
        lease.sync()
        return True

    def slide(self, lease: GroupedLease, n_tokens: int) -> None:
        for part, own in self._of(lease):
            part.slide(own, n_tokens)

    @point("kv.publish")
    def publish(self, lease: GroupedLease, tokens: Seq[int], n_tokens: int) -> None:
        for part, own in self._of(lease):
            part.insert(own, tokens, n_tokens)
        lease.sync()

    def release(self, lease: GroupedLease) -> None:
        """As ``PageCache.release``. The narrowest reach counts as used first, so it is evicted before the others: whole
        prefixes that others share may still be had without it."""
        for part, own in reversed([*self._of(lease)]):
            part.release(own)
        lease.released = True

    def evict(self, n: int) -> int:
        """Forget cached pages that nobody holds until ``n`` pages are free of them; gives how many became free."""
        freed = 0
        while freed < n:
            worths = [(part.tree.least(self.now), i) for i, part in enumerate(self.parts)]
            least = min([(worth, i) for worth, i in worths if worth is not None], default=None)
            if least is None:
                break
            freed += self.parts[least[1]].evict(1) * self.groups[least[1]]
        return freed

    def clear(self, *, weights: str | None = None, keep_disk: bool = True) -> int:
        return sum(
            [n * part.clear(weights=weights, keep_disk=keep_disk) for n, part in self._weighted()]
        )

    def snapshot(self, slots: list[int], n_tokens: int) -> np.ndarray:
        """int32[len(slots), ceil(n_tokens / Z)]: the pages of the first group."""
        return self._table(0).groups(slots, self.demand.pages(n_tokens))[0]

    def group_tables(self, slots: list[int], n_tokens: int) -> tuple[np.ndarray, ...]:
        """``StepPlan.group_tables``."""
        width = self.demand.pages(n_tokens)
        return (
            self._table(0).groups(slots, width),
            *(
                self._table(i).groups(slots, self._table(i).width)
                for i in range(1, len(self.parts))
            ),
        )

    def _table(self, i: int) -> GroupTable:
        table = self.parts[i].table
        assert isinstance(table, GroupTable)
        return table

    def hit_pages(self, n: int) -> int:
        """As ``PageCache.hit_pages``; a window needs those of its last tokens, which may begin within one."""
        return sum(
            [
                k * (min(n, -(-part.window.tokens // self.page_size) + 1) if part.window else n)
                for k, part in self._weighted()
            ]
        )

    def pin(self, lease: GroupedLease, n: int) -> Ends | None:
        pins: list[Node] = []
        for part, own in self._of(lease):
            pin = part.pin(own, n)
            if pin is None:
                for other, made in zip(self.parts, pins, strict=False):
                    other.unpin(made)
                return None
            pins.append(pin)
        return tuple(pins)

    def unpin(self, pin: Ends) -> None:
        for part, node in zip(self.parts, pin, strict=True):
            part.unpin(node)

    def leave_branch(self, old: Ends, new: Ends) -> None:
        for part, before, after in zip(self.parts, old, new, strict=True):
            part.leave_branch(before, after)

    def loading(self, lease: GroupedLease) -> bool:
        return any([part.loading(own) for part, own in self._of(lease)])

    def fetch(self, key: RootKey, tokens: Seq[int], source: str | None = None) -> list[int]:
        """As ``PageCache.fetch``: every page of full groups, and the last window of the others."""
        if self.tier is None or not self.reuse or not self.tier.may_read(source):
            return []
        return fetch(self.parts, self.tier, key, tokens, source)

    def take_unexported(self, lease: GroupedLease) -> list[tuple[int, bytes]]:
        return [named for part, own in self._of(lease) for named in part.take_unexported(own)]

    def unstored_pages(self) -> list[tuple[int, bytes]]:
        return [named for part in self.parts for named in part.unstored_pages()]

    def moves(self, step: int) -> tuple[PageMove, ...]:
        return () if self.tier is None else self.tier.drain(step)

    def landed(self, step: int) -> None:
        if self.tier is not None:
            self.tier.landed(step)

    def check(
        self,
        leases: Iterable[GroupedLease],
        held: Iterable[int] = (),
        pinned: Iterable[Ends] = (),
    ) -> None:
        """As ``PageCache.check``, part by part, and of the pages behind their ids."""
        held_by, pinned = list(leases), list(pinned)
        for i, part in enumerate(self.parts):
            own = [lease.parts[i] for lease in held_by]
            part.check(own, (), [pin[i] for pin in pinned])
            audit.check_group_table(self._table(i), self._sets(i), own)
        for lease in held_by:
            assert len({part.n_published for part in lease.parts}) == 1, "parts publish apart"
            assert lease.capacity == min(part.capacity for part in lease.parts), "a stale capacity"
        audit.check_sets(self.pool, [self._sets(i) for i in range(len(self.parts))], list(held))

    def _of(self, lease: GroupedLease) -> Iterable[tuple[PageCache, PageLease]]:
        """(part, its lease)."""
        return zip(self.parts, lease.parts, strict=True)

    def _sets(self, i: int) -> PageSets:
        sets = self.parts[i].pool
        assert isinstance(sets, PageSets)
        return sets

    def _weighted(self) -> Iterable[tuple[int, PageCache]]:
        """(pages behind an id, part)."""
        return zip(self.groups, self.parts, strict=True)
