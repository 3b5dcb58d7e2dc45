"""The page cache: matches prefixes, extends leases, publishes and releases pages.

It owns the pool, the page table and the tree, and keeps the three consistent.

::

    sequence  |<--- shared, from the tree --->|<- own, published ->|<- own, being written ->|
    pages     [  7  ][ 12  ][  3  ][  44  ]    [  9  ][  21  ]      [  30  ][  31  ][  5  ]
              0                 n_shared * Z          n_published * Z              capacity
              '------------ path to lease.node, locked -----------'

A page enters the tree only by ``publish``, which the scheduler calls after the step that wrote it
was committed with finite logits, or by ``admit``, which has it loaded from host memory before the rows of the
next plan run: it was committed before it went there. A page whose tokens are in the tree already (two sequences
computed the same prefix side by side) stays private: nothing is swapped under a step in flight.

Where every layer has a window, ``slide`` gives back what no later token reads, after it was published
(so a prefix stays findable until it is evicted). A step in flight may still read such a page: it has
its own copy of the table, and whoever gets the page next writes in a later program.

Time is what ``advance`` was told last: nothing here reads a clock, so a replay decides alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import Protocol

import numpy as np

from jserve.faults import point
from jserve.kv import audit
from jserve.kv.pages import PageLease, PagePool, PageSets, PageTable
from jserve.kv.prefix import Prefix, fetch, longest, prefixes
from jserve.kv.radix import Node, RadixTree, RootKey, Ticks, path_to
from jserve.kv.retention import SESSION, Keep
from jserve.kv.tiers import HostTier, digest_of, group_name
from jserve.types import PageMove
from jserve.window import Window


class PageListener(Protocol):
    """Hears which pages of the device can be found (``digest_of`` names them)."""

    def added(self, node: Node) -> None: ...

    def removed(self, node: Node) -> None: ...

    def close(self) -> None:
        """The engine ends. Idempotent."""
        ...


class PageCache:
    """Facade over ``PagePool``, ``PageTable`` and ``RadixTree``. ``listener`` hears of findable pages."""

    def __init__(
        self,
        *,
        n_pages: int,
        page_size: int,
        n_slots: int,
        pages_per_slot: int,
        reuse: bool = True,
        n_host_pages: int = 0,
        window: int = 0,
        sinks: int = 0,
        chunked: bool = False,
        pool: PagePool | PageSets | None = None,
        table: PageTable | None = None,
        clock: Ticks | None = None,
        tier: HostTier | None = None,
        groups: range | None = None,
    ) -> None:
        """``window``, ``sinks``, ``chunked`` as of ``Window``. ``pool`` in place of one of ``n_pages``, ``table``,
        ``clock``, ``tier`` and the numbers of its ``groups`` of layers are those of a part of a ``GroupedCache``."""
        self.page_size = page_size
        self.window = Window(page_size=page_size, tokens=window, sinks=sinks, chunked=chunked)
        self.reuse = reuse
        self.pool = pool or PagePool(n_pages)
        self.table = table or PageTable(n_slots, pages_per_slot)
        self.tree = RadixTree(page_size, self.window, clock)
        self.tier = HostTier(n_host_pages) if n_host_pages else tier
        self.groups = groups
        self.listener: PageListener | None = None
        self.n_weights, self.weights = 0, ""
        """Counter: times that the weights changed; nothing is shared across one."""
        self.now = 0.0

    def advance(self, now: float) -> None:
        """It is ``now`` (seconds of any monotonic clock); a clock that goes back is not believed."""
        self.now = max(self.now, now)

    @property
    def n_available(self) -> int:
        """Pages that ``extend`` can hand out: free ones and unlocked cached ones."""
        return self.pool.n_free + self.tree.n_evictable

    @property
    def parts(self) -> tuple[PageCache, ...]:
        """The caches of each reach of layers: itself alone."""
        return (self,)

    @property
    def n_groups(self) -> int:
        """Pages of the device behind an id."""
        return len(self.groups or (0,))

    @property
    def n_evictable(self) -> int:
        """Pages that can be found and that nobody holds."""
        return self.tree.n_evictable

    @property
    def n_evicted(self) -> int:
        """Counter: pages forgotten since the start."""
        return self.tree.n_evicted

    def match(
        self,
        key: RootKey,
        tokens: Seq[int],
        *,
        slot: int,
        reuse: bool = True,
        cacheable: bool = True,
        keeps: tuple[Keep, ...] = (),
    ) -> PageLease:
        """A lease for ``slot`` that starts with the pages of the longest known prefix, on the device and in host
        memory. What is in host memory is ``absent`` until ``admit`` takes pages for it.

        At least one token is left to compute, since the next one is drawn from its logits.
        ``reuse`` False looks nothing up; ``cacheable`` False also keeps the pages out of the tree.
        ``keeps`` are the priorities that the pages get when the lease is given back.
        """
        root = self.tree.root(self.of_weights(key))
        limit = (len(tokens) - 1) // self.page_size if reuse and self.reuse else 0
        found = prefixes(self.parts, (root,), tokens, limit)
        n = longest(found, limit, self.tier.holds if self.tier is not None else None)
        return self.lease(slot, found[0], n, cacheable=cacheable, keeps=keeps)

    def lease(
        self, slot: int, prefix: Prefix, n_pages: int, *, cacheable: bool, keeps: tuple[Keep, ...]
    ) -> PageLease:
        """``match`` of ``n_pages`` of ``prefix``, which can be had."""
        absent = {number: prefix.held(number) for number in prefix.missing(n_pages)}
        path = prefix.path(n_pages)
        node = path[-1] if path else prefix.root
        gone = self.window.gone(n_pages * self.page_size)
        self.tree.lock_path(node, gone)
        pages = [n.page for n in path]
        if gone:
            pages[gone.start : gone.stop] = [0] * len(gone)
        self.pool.share(_held(pages))
        self.table.append(slot, 0, pages)
        return PageLease(
            slot=slot,
            node=node,
            pages=pages,
            gone=gone,
            absent=absent,
            n_shared=len(pages),
            n_published=len(pages),
            next_full=(len(pages) + 1) * self.page_size,
            capacity=len(pages) * self.page_size,
            cacheable=cacheable and self.reuse,
            keeps=keeps,
            n_weights=self.n_weights,
        )

    def of_weights(self, key: RootKey) -> RootKey:
        """The root key of ``key`` under the weights in use; of the first ones it is ``key``."""
        return (*key[:3], self.weights) if self.weights else key

    def n_known(self, key: RootKey, tokens: Seq[int]) -> int:
        """Pages of the longest known prefix of ``tokens``; nothing is locked or touched."""
        root = self.tree.roots.get(self.of_weights(key))
        limit = (len(tokens) - 1) // self.page_size if self.reuse else 0
        return len(self.tree.match(root, tokens, limit)) if root is not None else 0

    @point("kv.extend")
    def extend(self, lease: PageLease, n_tokens: int, *, keep: int = 0) -> bool:
        """Make ``lease`` hold pages for ``n_tokens``, evicting where needed.

        False, with nothing changed, when fewer than ``keep`` pages would stay available.
        """
        return self.take(lease, n_tokens, keep)

    def take(self, lease: PageLease, n_tokens: int, keep: int = 0) -> bool:
        """``extend``, also of one part among several."""
        short = self.n_short(lease, n_tokens)
        if not short:
            return True
        if short + keep > self.n_available:
            return False
        if short > self.pool.n_free:
            self.evict(short - self.pool.n_free)
        fresh = self.pool.take(short)
        if lease.absent:
            fresh = self._load(lease, fresh)
        self.table.append(lease.slot, len(lease.pages), fresh)
        lease.pages += fresh
        lease.capacity = len(lease.pages) * self.page_size
        return True

    def n_short(self, lease: PageLease, n_tokens: int) -> int:
        """Pages that ``lease`` has to take to hold ``n_tokens`` and what is in host memory of them."""
        return max(0, -(-n_tokens // self.page_size) - len(lease.pages)) + len(lease.absent)

    def _load(self, lease: PageLease, fresh: list[int]) -> list[int]:
        """Give ``fresh`` pages to what ``lease`` has in host memory; those that are left. The next plan carries the
        loads before all of its rows, so anybody may find these pages from now on."""
        path = path_to(lease.node)
        for page, (number, kept) in zip(fresh, lease.absent.items(), strict=False):
            assert self.tier is not None
            node = path[-1 - number]
            self.tree.fill(node, page)
            self.pool.share([page])
            lease.pages[number] = page
            self.table.fill(lease.slot, number, page)
            for one, target in zip(kept, self.pool.pages_of(page), strict=True):
                self.tier.load(one, target)
            if self.listener is not None:
                self.listener.added(node)
        fresh, lease.absent = fresh[len(lease.absent) :], {}
        return fresh

    def _let_be(self, lease: PageLease, numbers: Iterable[int]) -> None:
        """Pages ``numbers`` of ``lease`` in host memory are not loaded after all."""
        for number in list(numbers):
            for kept in lease.absent.pop(number, ()):
                assert self.tier is not None
                self.tier.release_hold(kept)

    def admit(self, lease: PageLease, n_tokens: Seq[int], *, keep: int = 0) -> bool:
        """``extend`` to the tokens that each of ``parts`` shall hold pages for; what the lease has in host memory is
        loaded by the next plan."""
        return self.extend(lease, n_tokens[0], keep=keep)

    def slide(self, lease: PageLease, n_tokens: int) -> None:
        """Give back the pages of ``lease`` that no token from position ``n_tokens`` on reads. All
        before it is computed, and published if it may be."""
        gone = self.window.gone(n_tokens)
        if gone.stop <= lease.gone.stop or len(lease.pages) < gone.start:
            return
        fresh = range(max(gone.start, lease.gone.stop), gone.stop)
        self.tree.pass_by(lease.node, fresh, self.now)
        self._let_be(lease, fresh)
        part = slice(fresh.start, fresh.stop)
        self.pool.drop(_held(lease.pages[part]))
        lease.pages[part] = [0] * len(fresh)
        lease.capacity = len(lease.pages) * self.page_size
        self.table.forget(lease.slot, fresh)
        lease.gone = gone

    def names(self, digest: bytes) -> list[bytes]:
        """In the tiers, of the pages behind an id of the prefix ``digest``: one for each group of layers."""
        if self.groups is None:
            return [digest]
        return [group_name(digest, group) for group in self.groups]

    def loading(self, lease: PageLease) -> bool:
        """True while no plan was made that fills all pages of ``lease``."""
        return self.tier is not None and self.tier.loading(self._behind(lease.pages))

    def fetch(self, key: RootKey, tokens: Seq[int], source: str | None = None) -> list[int]:
        """Begin to read what the disk knows of ``tokens`` beyond the faster tiers, or may have of another engine,
        which left it at ``source``; the tickets."""
        if self.tier is None or not self.reuse or not self.tier.may_read(source):
            return []
        return fetch(self.parts, self.tier, key, tokens, source)

    def take_unexported(self, lease: PageLease) -> list[tuple[int, bytes]]:
        """(page, digest) of the published pages of ``lease`` that were not exported yet."""
        n, lease.n_exported = lease.n_published - lease.n_exported, lease.n_published
        if self.tier is None or not self.tier.disk or n <= 0:
            return []
        path = path_to(lease.node)[:n]
        return [named for node in reversed(path) if node.page for named in self._named(node)]

    def unstored_pages(self) -> list[tuple[int, bytes]]:
        """(page, digest) of what the tree knows and the disk does not, for a last write."""
        tier = self.tier
        if tier is None or not tier.disk:
            return []
        nodes = [node for _, node in self.tree.nodes() if node.page and not self.tree.passed(node)]
        named = [named for node in nodes for named in self._named(node)]
        return [(page, name) for page, name in named if name not in tier.on_disk]

    def _named(self, node: Node) -> list[tuple[int, bytes]]:
        """(page of the device, name in the tiers) of ``node``, in each group of layers."""
        pages = self.pool.pages_of(node.page)
        return list(zip(pages, self.names(digest_of(node)), strict=True))

    def _behind(self, ids: Iterable[int]) -> list[int]:
        """Pages of the device behind ``ids``."""
        return [page for one in ids if one for page in self.pool.pages_of(one)]

    def moves(self, step: int) -> tuple[PageMove, ...]:
        """The moves between the tiers that plan ``step`` has to carry; each is given once."""
        return () if self.tier is None else self.tier.drain(step)

    def landed(self, step: int) -> None:
        """Plan ``step`` was committed. (One that fails takes everything along: ``clear``.)"""
        if self.tier is not None:
            self.tier.landed(step)

    @point("kv.publish")
    def publish(self, lease: PageLease, tokens: Seq[int], n_tokens: int) -> None:
        """Let others find the full pages among the first ``n_tokens``, all known and computed."""
        self.insert(lease, tokens, n_tokens)

    def insert(self, lease: PageLease, tokens: Seq[int], n_tokens: int) -> None:
        """``publish``, also of one part among several."""
        Z, full, node = self.page_size, n_tokens // self.page_size, lease.node
        if lease.cacheable:
            for i in range(lease.n_published, full):
                page = lease.pages[i]
                node, made = self.tree.descend(node, tuple(tokens[i * Z : (i + 1) * Z]), page)
                if made:
                    self.pool.refs[page] += 1
                    if self.listener is not None:
                        self.listener.added(node)
        lease.node = node
        lease.n_published = max(lease.n_published, full)
        lease.next_full = (lease.n_published + 1) * Z

    def release(self, lease: PageLease) -> None:
        """Give back everything the lease holds; its published pages stay findable until evicted.

        Raises:
            RuntimeError: the lease was given back before.
        """
        if lease.released:
            raise RuntimeError(f"the lease of slot {lease.slot} was released twice")
        lease.released = True
        self.tree.unlock_path(lease.node, self.now, lease.keeps, lease.n_shared, lease.gone)
        self._let_be(lease, lease.absent)
        if self.tier is not None:
            self.tier.forget_loads(self._behind(lease.pages[lease.n_shared :]))
        self.pool.drop(_held(lease.pages))
        self.table.clear(lease.slot, len(lease.pages))

    def evict(self, n: int) -> int:
        """Forget up to ``n`` cached pages that nobody holds; gives how many."""
        pages = self.tree.evict(n, self.now, self._leaves if self._heard else None)
        self.pool.drop(pages)
        return len(pages)

    def clear(self, *, weights: str | None = None, keep_disk: bool = True) -> int:
        """Forget everything that no lease and no pin holds, in the host tier too; gives the pages that were
        forgotten.

        Args:
            weights: the name of other weights, which are used from now on, in the names of pages; "" for the first
                ones, None where they stay the same.
            keep_disk: what is on disk stays known.
        """
        told = None if self.listener is None else self._tell_removed
        pages = self.tree.evict(self.tree.n_evictable, on_evict=told)
        self.pool.drop(pages)
        if self.tier is not None:
            self.tier.lose(keep_disk=keep_disk)
        if weights is not None:
            self.n_weights, self.weights = self.n_weights + 1, weights
        return len(pages)

    @property
    def _heard(self) -> bool:
        """Somebody wants to know of pages that are evicted."""
        return self.tier is not None or self.listener is not None

    def _leaves(self, node: Node) -> None:
        """``node`` is about to lose its page, which the tier keeps where a hit could need it."""
        if self.tier is not None:
            named = self._named(node)
            self.tier.forget_loads([page for page, _ in named])
            if not self.tree.passed(node):
                for page, name in named:
                    self.tier.save(name, page)
        self._tell_removed(node)

    def _tell_removed(self, node: Node) -> None:
        if self.listener is not None:
            self.listener.removed(node)

    def snapshot(self, slots: list[int], n_tokens: int) -> np.ndarray:
        """int32[len(slots), ceil(n_tokens / Z)]: a copy of the table rows of ``slots``."""
        return self.table.snapshot(slots, -(-n_tokens // self.page_size))

    def group_tables(self, slots: list[int], n_tokens: int) -> tuple[np.ndarray, ...]:
        """``StepPlan.group_tables``: a page holds its tokens for all layers here, so there are none."""
        return ()

    def hit_pages(self, n: int) -> int:
        """Pages that a hit of ``n`` full pages of tokens holds at the most."""
        return n

    def pin(self, lease: PageLease, n: int) -> Node | None:
        """Pin what a hit of the first ``n`` published pages of ``lease`` needs; the pin, or None where some of it is
        gone."""
        node = path_to(lease.node)[lease.n_published - n]
        if not self.tree.pinnable(node):
            return None
        self.tree.pin(node)
        return node

    def unpin(self, pin: Node) -> None:
        """Let go of what was pinned."""
        self.tree.unpin(pin, self.now)

    def leave_branch(self, old: Node, new: Node) -> None:
        """A session went on at ``new``: pages on the way to ``old`` alone are like any others."""
        stays = {id(node) for node in path_to(new)}
        for node in path_to(old):
            if id(node) not in stays and node.priority == SESSION:
                self.tree.release_priority(node)

    def check(
        self,
        leases: Iterable[PageLease],
        held: Iterable[int] = (),
        pinned: Iterable[Node] = (),
    ) -> None:
        """Recompute every count from the owners and compare (invariants 1 to 8; see ``audit``).

        ``leases`` are all live leases, ``held`` pages that someone outside took from the pool,
        ``pinned`` the nodes that someone pinned, once per pin.

        Raises:
            AssertionError: the books are wrong; the message says which and where.
        """
        if self.tier is not None:
            self.tier.check()
        audit.check(self.pool, self.table, self.tree, list(leases), list(held), list(pinned))


def _held(pages: Iterable[int]) -> list[int]:
    """Those that were not given back."""
    return [page for page in pages if page]
