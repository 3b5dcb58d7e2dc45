"""Page pool, page table and page leases: KV pages as integers with reference counts.

Page 0 is scratch: padding is written there, nobody owns it, it is never handed out.

    pool   free: [ 5  9  2 ]    taken on the left, given back on the right: freed first, used first
    table  slot s: [ 7  12  3  44  0  0 ]     position p of slot s lies in page rows[s, p // Z]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jserve.kv.radix import Node
from jserve.kv.retention import Keep
from jserve.kv.tiers import HostPage
from jserve.window import NOTHING


class PagePool:
    """Page ids 1 .. n_pages-1 with a reference count each; a count of 0 means free."""

    def __init__(self, n_pages: int) -> None:
        if n_pages < 2:
            raise ValueError(f"a pool needs a scratch page and one more, not {n_pages} pages")
        self.n_pages = n_pages
        self.refs = [0] * n_pages
        self._free = deque(range(1, n_pages))

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_usable(self) -> int:
        """Pages that can be owned: all but scratch."""
        return self.n_pages - 1

    def free_pages(self) -> tuple[int, ...]:
        """Free ids in the order in which they will be handed out."""
        return tuple(self._free)

    def take(self, n: int) -> list[int]:
        """``n`` free pages, each held once by the caller. The caller has looked at ``n_free``."""
        assert n <= len(self._free), f"{n} pages asked, {len(self._free)} free"
        pages = [self._free.popleft() for _ in range(n)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of ``pages``, which must be held already."""
        for page in pages:
            assert self.refs[page] > 0, f"page {page} is free and cannot be shared"
            self.refs[page] += 1

    def drop(self, pages: Iterable[int]) -> int:
        """One holder less for each of ``pages``; gives how many became free."""
        before = len(self._free)
        for page in pages:
            assert self.refs[page] > 0, f"page {page} is free already"
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self._free.append(page)
        return len(self._free) - before

    def pages_of(self, page: int) -> tuple[int, ...]:
        """The pages of the device behind an id."""
        return (page,)


class PageSets:
    """Ids that stand for ``n`` pages of ``pool`` each, which are taken and given back together; otherwise as
    ``PagePool``. Several of them share a pool."""

    def __init__(self, pool: PagePool, n: int) -> None:
        self.pool, self.n = pool, n
        self.n_pages = 1 + pool.n_usable // n
        """Ids, 0 included."""
        self.refs = [0] * self.n_pages
        self.pages_PN = np.zeros((self.n_pages, n), np.int32)
        """The pages of each id; scratch for 0 and for those that are free."""
        self._free = deque(range(1, self.n_pages))

    @property
    def n_free(self) -> int:
        """Ids that can be taken."""
        return self.pool.n_free // self.n

    @property
    def n_usable(self) -> int:
        return self.n_pages - 1

    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self, n: int) -> list[int]:
        pages = self.pool.take(n * self.n)
        ids = [self._free.popleft() for _ in range(n)]
        self.pages_PN[ids] = np.array(pages, np.int32).reshape(n, self.n)
        for one in ids:
            self.refs[one] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        for one in ids:
            assert self.refs[one] > 0, f"set {one} is free and cannot be shared"
            self.refs[one] += 1

    def drop(self, ids: Iterable[int]) -> int:
        n_freed = 0
        for one in ids:
            assert self.refs[one] > 0, f"set {one} is free already"
            self.refs[one] -= 1
            if self.refs[one] == 0:
                self.pool.drop(self.pages_PN[one].tolist())
                self.pages_PN[one] = 0
                self._free.append(one)
                n_freed += 1
        return n_freed

    def pages_of(self, page: int) -> tuple[int, ...]:
        return tuple(self.pages_PN[page].tolist())


class PageTable:
    """int32[C, M]: the pages of each slot in order of position. While a sequence lives its row grows at
    the end, and entries whose pages slid out of the window point at scratch again; nothing else."""

    def __init__(self, n_slots: int, pages_per_slot: int) -> None:
        self.rows = np.zeros((n_slots, pages_per_slot), np.int32)

    def append(self, slot: int, at: int, pages: list[int]) -> None:
        self.rows[slot, at : at + len(pages)] = pages

    def fill(self, slot: int, number: int, page: int) -> None:
        """Entry ``number``, which was appended as 0, is ``page``."""
        self.rows[slot, number] = page

    def clear(self, slot: int, n: int) -> None:
        """Point the first ``n`` entries back at scratch."""
        self.rows[slot, :n] = 0

    def forget(self, slot: int, pages: range) -> None:
        """Point the entries ``pages`` back at scratch."""
        self.rows[slot, pages.start : pages.stop] = 0

    def snapshot(self, slots: list[int], width: int) -> np.ndarray:
        """int32[len(slots), width]: a copy that later changes do not touch."""
        return self.rows[slots, :width]


class GroupTable(PageTable):
    """A page table over the ids of ``sets``, and the pages behind them as the device reads them: int32[groups, C, W],
    where position p of a slot lies in the page of column ``p // Z % W``.

    So W columns serve sequences of any length that hold at most W pages of a group at once.
    """

    def __init__(self, n_slots: int, pages_per_slot: int, sets: PageSets, width: int) -> None:
        super().__init__(n_slots, pages_per_slot)
        self.sets, self.width = sets, width
        self.pages_NCW = np.zeros((sets.n, n_slots, width), np.int32)
        self._low = [0] * n_slots
        """Number of the first page that a slot still holds."""

    def append(self, slot: int, at: int, pages: list[int]) -> None:
        super().append(slot, at, pages)
        n_gone = 0 if at else next((i for i, page in enumerate(pages) if page), len(pages))
        if not at:
            self._low[slot] = n_gone
        end = at + len(pages)
        assert end - self._low[slot] <= self.width, f"slot {slot}: over {self.width} pages at once"
        columns = np.arange(at + n_gone, end) % self.width
        self.pages_NCW[:, slot, columns] = self.sets.pages_PN[pages[n_gone:]].T

    def fill(self, slot: int, number: int, page: int) -> None:
        super().fill(slot, number, page)
        self._low[slot] = min(self._low[slot], number)
        self.pages_NCW[:, slot, number % self.width] = self.sets.pages_PN[page]

    def clear(self, slot: int, n: int) -> None:
        super().clear(slot, n)
        self.pages_NCW[:, slot] = 0
        self._low[slot] = 0

    def forget(self, slot: int, pages: range) -> None:
        super().forget(slot, pages)
        self.pages_NCW[:, slot, np.arange(pages.start, pages.stop) % self.width] = 0
        self._low[slot] = pages.stop

    def groups(self, slots: list[int], width: int) -> np.ndarray:
        """int32[groups, len(slots), min(width, W)]: a copy that later changes do not touch."""
        return self.pages_NCW[:, slots, :width]


@dataclass(slots=True, eq=False, kw_only=True)
class PageLease:
    """A sequence's lease: one reference on each of ``pages`` and a lock on the path to ``node``.

    Given back exactly once, by ``PageCache.release``.
    """

    slot: int
    node: Node
    """Deepest tree node on this sequence's tokens; its path is locked by this lease."""
    pages: list[int] = field(default_factory=list)
    """In order of position; 0 for those that were given back."""
    gone: range = NOTHING
    """Numbers of the pages that were given back because no later token reads them."""
    absent: dict[int, list[HostPage]] = field(default_factory=dict)
    """Those in host memory, by number: 0 in ``pages`` until pages are taken for them."""
    n_shared: int = 0
    """Leading pages that came from the tree, given back or not."""
    n_published: int = 0
    """Leading full pages whose tokens are in the tree (as these pages or as an equal copy)."""
    next_full: int = 0
    """Tokens at which there is one more page to publish."""
    capacity: int = 0
    """Tokens that fit the pages held."""
    cacheable: bool = True
    """False keeps the pages out of the tree."""
    keeps: tuple[Keep, ...] = ()
    """Retention of its published pages once it finishes."""
    n_weights: int = 0
    """``PageCache.n_weights`` when it was made."""
    n_exported: int = 0
    """Leading published pages that were exported (``Request.exports_kv``)."""
    released: bool = False

    @property
    def n_own(self) -> int:
        """Pages that it took from the pool and still has."""
        n_gone = max(0, self.gone.stop - max(self.gone.start, self.n_shared))
        return len(self.pages) - self.n_shared - n_gone

    @property
    def parts(self) -> tuple[PageLease, ...]:
        """One lease of each part of the cache: itself alone."""
        return (self,)
