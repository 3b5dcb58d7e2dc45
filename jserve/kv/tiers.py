"""Host-memory and disk tiers: saves evicted pages and loads them back.

It owns the ids of host pages, what each holds and the moves between the tiers::

    device pages  [ 7 ][ 12 ][ 3 ]...      evicted: save 12 -> host 5     before anyone rewrites 12
                        |  ^                wanted:  load host 5 -> 30    before the rows that read 30
    host pages    [ 0 ][ 5 ]...
    disk          every page that was saved; read into a host page when a sequence wants it

A host page can be found only once the step that carried its save was committed. Contents are known
by a digest of the whole prefix: tenant, salt, adapter and all tokens up to the page's end, and by their
group where pages belong to groups of layers (``group_name``). What is loaded stays on the host too, so
evicting it again costs nothing. A read from disk is begun with a ticket and answered later, as an input
like any other, so that a replay does alike.

Private pages (``stow``; see ``kv.swap``) have no digest: nobody finds them, they are never dropped for
others, and they are gone once they were loaded.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from jserve.kv.radix import Node
from jserve.types import PageFetch, PageMove

TOKEN_BYTES = 8
"""Of a token in what digests are made of."""


def root_digest(key: tuple) -> bytes:
    """16 bytes that name the empty prefix of a tenant, salt and adapter."""
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def digest_of(node: Node) -> bytes:
    """16 bytes that name the prefix which ends at ``node``; kept in the node."""
    path = []
    while not node.digest and node.parent is not None:
        path.append(node)
        node = node.parent
    if not node.digest:
        node.digest = root_digest(node.key)
    digest = node.digest
    for below in reversed(path):
        digest = below.digest = next_digest(digest, below.key)
    return digest


def next_digest(digest: bytes, tokens: Seq[int]) -> bytes:
    """The digest of the prefix named by ``digest`` and one more page of ``tokens``."""
    return digest_after(digest, packed(tokens))


def packed(tokens: Seq[int]) -> bytes:
    """Tokens as digests are made of them, ``TOKEN_BYTES`` each."""
    return struct.pack(f"{len(tokens)}q", *tokens)


def digest_after(digest: bytes, page: bytes | memoryview) -> bytes:
    """``next_digest`` of a page of packed tokens."""
    return hashlib.blake2b(page, digest_size=16, key=digest).digest()


def group_name(digest: bytes, group: int) -> bytes:
    """16 bytes that name the page which a group of layers has of the prefix ``digest``."""
    return hashlib.blake2b(b"group %d" % group, digest_size=16, key=digest).digest()


@dataclass(slots=True, eq=False, kw_only=True)
class HostPage:
    """A prefix's last page in host memory, or a private one; ``ready`` once its bytes are known to be
    there."""

    digest: bytes
    """Empty for a private one."""
    host: int
    ready: bool = False
    n_loads: int = 0
    """Loads that are not yet planned, or about to be decided."""


class HostTier:
    """Up to ``n_pages`` evicted pages, least recently used first out, and what the disk knows.

    A host page whose bytes are on the way, either way, is never given to another prefix.
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.n_saved = self.n_loaded = self.n_dropped = self.n_fetched = self.n_missed = 0
        self.n_stowed = 0
        self.disk = False
        """True while what is saved also goes to disk."""
        self.on_disk: set[bytes] = set()
        """Digests that a read may find; one that does not is a miss."""
        self._free = list(range(n_pages - 1, -1, -1))
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()
        self._private: set[HostPage] = set()
        self._saves: list[tuple[int, HostPage]] = []
        self._loads: list[tuple[HostPage, int]] = []
        self._under_way: dict[int, list[HostPage]] = {}
        """Saves of the steps that are not committed yet, by step."""
        self._fetches: dict[int, HostPage] = {}
        """Reads from disk that have not been answered, by ticket."""
        self._asked: list[PageFetch] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._pages)

    def learn(self, digests: Iterable[bytes]) -> None:
        """There is a disk, and it holds these."""
        self.disk = True
        self.on_disk.update(digests)

    def save(self, digest: bytes, page: int) -> None:
        """Device page ``page`` is about to be forgotten: keep what it holds, if there is room."""
        if digest in self._pages:
            self._pages.move_to_end(digest)
            return
        kept = self._place(digest)
        if kept is not None:
            self._saves.append((page, kept))
            self.n_saved += 1

    def holds(self, digest: bytes) -> bool:
        """True when that prefix's last page could be loaded now."""
        kept = self._pages.get(digest)
        return kept is not None and kept.ready

    def touch(self, digest: bytes) -> None:
        """It was asked for."""
        self._pages.move_to_end(digest)

    def hold(self, digest: bytes) -> HostPage | None:
        """That prefix's last page if it could be loaded now; it is not dropped until it was loaded or
        let be."""
        kept = self._pages.get(digest)
        if kept is None or not kept.ready:
            return None
        self._pages.move_to_end(digest)
        kept.n_loads += 1
        return kept

    def load(self, kept: HostPage, page: int) -> None:
        """Bring a page that is held back into device page ``page``, before the rows of the next plan."""
        self._loads.append((kept, page))
        self.n_loaded += 1

    def release_hold(self, kept: HostPage) -> None:
        """A page that is held is not loaded after all."""
        kept.n_loads -= 1

    def stow(self, pages: Seq[int]) -> list[HostPage] | None:
        """Private host pages that device ``pages`` are saved to by the next plan; None, with nothing
        changed, if there is no room or one of them is still to be loaded."""
        room = len(self._free) + sum(map(_lies_still, self._pages.values()))
        if len(pages) > room or not {page for _, page in self._loads}.isdisjoint(pages):
            return None
        stowed = []
        for page in pages:
            host = self._room()
            assert host is not None, "there was room"
            kept = HostPage(digest=b"", host=host)
            self._private.add(kept)
            self._saves.append((page, kept))
            stowed.append(kept)
        self.n_stowed += len(stowed)
        return stowed

    def has(self, kept: HostPage) -> bool:
        """True while a private page could be loaded."""
        return kept in self._private and kept.ready

    def landing(self, kept: HostPage) -> bool:
        """True while a step in flight carries a private page to the host."""
        if kept not in self._private or kept.ready:
            return False
        return all(kept is not other for _, other in self._saves)

    def unstow(self, kept: HostPage, page: int) -> None:
        """Bring a private page back into device page ``page`` with the next plan."""
        kept.n_loads += 1
        self._loads.append((kept, page))

    def discard(self, kept: HostPage) -> None:
        """A private page is of no use any more; its place is free once its bytes lie still."""
        if kept not in self._private:
            return  # all was lost meanwhile
        self._private.remove(kept)
        n_saves = len(self._saves)
        self._saves = [save for save in self._saves if save[1] is not kept]
        if kept.ready or len(self._saves) < n_saves:
            self._free.append(kept.host)

    def forget_loads(self, pages: Iterable[int]) -> None:
        """Device ``pages`` were given back before their loads were planned."""
        if self._loads:
            gone = set(pages)
            for kept, page in self._loads:
                if page in gone:
                    kept.n_loads -= 1
                    self.discard(kept)  # a private one is of no use to anybody else
            self._loads = [load for load in self._loads if load[1] not in gone]

    def drain(self, step: int) -> tuple[PageMove, ...]:
        """The moves that plan ``step`` carries: saves first, for a load may reuse their pages."""
        if not self._saves and not self._loads:
            return ()
        saves = [
            PageMove(page=page, host=kept.host, out=True, digest=kept.digest if self.disk else b"")
            for page, kept in self._saves
        ]
        loads = [PageMove(page=page, host=kept.host, out=False) for kept, page in self._loads]
        for kept, _ in self._loads:
            kept.n_loads -= 1
            self.discard(kept)  # a private one was copied when the plan is launched
        if self._saves:
            self._under_way[step] = [kept for _, kept in self._saves]
        self._saves, self._loads = [], []
        return (*saves, *loads)

    def landed(self, step: int) -> None:
        """Plan ``step`` was committed: what it saved is there."""
        for kept in self._under_way.pop(step, ()):
            kept.ready = True
            if not kept.digest and kept not in self._private:
                self._free.append(kept.host)  # it was given up on its way
            elif self.disk and kept.digest:
                self.on_disk.add(kept.digest)

    def n_lacking(self, digests: Seq[bytes]) -> int:
        """Host pages that reads of ``digests`` lack, if none of those that are here is dropped for them."""
        here = [kept for digest in digests if (kept := self._pages.get(digest)) is not None]
        room = len(self._free) + sum(map(_lies_still, self._pages.values()))
        return len(digests) - len(here) - room + sum(map(_lies_still, here))

    def fetch(self, digest: bytes, source: str = "") -> int | None:
        """A ticket for reading that prefix's last page from disk, or from ``source`` (that of a read under way, if
        there is one); None where no room is left."""
        kept = self._pages.get(digest)
        if kept is not None:
            return next((t for t, other in self._fetches.items() if other is kept), None)
        kept = self._place(digest)
        if kept is None:
            return None
        self._ticket += 1
        self._fetches[self._ticket] = kept
        self._asked.append(
            PageFetch(ticket=self._ticket, digest=digest, host=kept.host, source=source)
        )
        return self._ticket

    def may_read(self, source: str | None) -> bool:
        """True if a read could find something: there are files, or ``source`` is another engine."""
        return bool(self.on_disk) or (self.disk and source is not None)

    @property
    def n_fetching(self) -> int:
        """Reads that were not answered."""
        return len(self._fetches)

    def fetching(self, ticket: int) -> bool:
        """True until the read was answered."""
        return ticket in self._fetches

    def take_fetches(self) -> list[PageFetch]:
        """The reads to start, each given once."""
        asked, self._asked = self._asked, []
        return asked

    def fetched(self, ticket: int, *, ok: bool) -> None:
        """The read was answered: the page is in its host page, or it was a miss."""
        kept = self._fetches.pop(ticket)
        self.n_fetched += ok
        self.n_missed += not ok
        if not ok:
            self.on_disk.discard(kept.digest)
        if self._pages.get(kept.digest) is not kept:
            self._free.append(kept.host)  # all was lost while it was read
        elif ok:
            kept.ready = True
        else:
            self._remove(kept)

    def loading(self, pages: Iterable[int]) -> bool:
        """True while one of these device pages waits for a plan that fills it."""
        coming = {page for _, page in self._loads}
        return any(page in coming for page in pages)

    def lose(self, *, keep_disk: bool) -> None:
        """Nothing that was kept in host memory is of use any more: other weights, or a device that failed. What is
        on disk has names that tell weights apart; without ``keep_disk`` it is left alone until the next start."""
        if not keep_disk:
            self.disk = False
            self.on_disk.clear()
        self._pages.clear()
        self._private.clear()
        self._saves, self._loads = [], []
        self._under_way.clear()
        for asked in self.take_fetches():
            del self._fetches[asked.ticket]
        busy = {kept.host for kept in self._fetches.values()}
        self._free = [host for host in range(self.n_pages - 1, -1, -1) if host not in busy]

    def check(self) -> None:
        """Raises AssertionError when a host page is lost, shared, or found too early."""
        kept = [*self._pages.values(), *self._private]
        known = {id(page) for page in kept}
        landing = {id(p): p for saves in self._under_way.values() for p in saves}
        coming = {id(p): p for p in self._fetches.values()} | landing
        lost = [page.host for page in coming.values() if id(page) not in known]
        everything = sorted([*(page.host for page in kept), *self._free, *lost])
        assert everything == list(range(self.n_pages)), "host pages are lost or shared"
        assert all(id(page) in known for _, page in self._saves), "a save of a dropped page"
        assert all(id(page) in known for page, _ in self._loads), "a load of a dropped page"
        waiting = {id(page) for _, page in self._saves} | set(coming)
        for page in kept:
            assert page.ready != (id(page) in waiting), f"host page {page.host} is found too early"
            n_loads = sum(1 for other, _ in self._loads if other is page)
            assert page.n_loads == n_loads, f"{page.n_loads} loads counted, {n_loads} wait"

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "host_pages": float(self.n_pages),
            "host_pages_used": float(len(self._pages) + len(self._private)),
            "host_pages_private": float(len(self._private)),
            "host_pages_stowed_total": float(self.n_stowed),
            "host_pages_saved_total": float(self.n_saved),
            "host_pages_loaded_total": float(self.n_loaded),
            "host_pages_dropped_total": float(self.n_dropped),
            "disk_pages_known": float(len(self.on_disk)),
            "disk_pages_read_total": float(self.n_fetched),
            "disk_pages_missed_total": float(self.n_missed),
        }

    def _place(self, digest: bytes) -> HostPage | None:
        """A host page for ``digest``."""
        host = self._room()
        if host is None:
            return None
        kept = self._pages[digest] = HostPage(digest=digest, host=host)
        return kept

    def _room(self) -> int | None:
        """A host page: a free one, or the oldest whose bytes lie still."""
        if not self._free:
            oldest = next(filter(_lies_still, self._pages.values()), None)
            if oldest is None:
                return None
            self._remove(oldest)
            self.n_dropped += 1
        return self._free.pop()

    def _remove(self, kept: HostPage) -> None:
        del self._pages[kept.digest]
        self._free.append(kept.host)


def _lies_still(kept: HostPage) -> bool:
    """Its bytes are not on the way, either way."""
    return kept.ready and not kept.n_loads
