"""The lower tiers: evicted pages in host memory and on disk, and which of them come back.

Owns the ids of host pages, what each holds and the moves between the tiers. Must not know bytes,
sequences or devices: a move is a pair of numbers that travels in a plan, and the runner's programs
do the work in the order of the queue::

    device pages  [ 7 ][ 12 ][ 3 ]...      evicted: save 12 -> host 5     before anyone rewrites 12
                        |  ^                wanted:  load host 5 -> 30    before the rows that read 30
    host pages    [ 0 ][ 5 ]...
    disk          every page that was saved; read into a host page when a sequence wants it

A host page can be found only once the step that carried its save was committed. Contents are known
by a digest of the whole prefix: tenant, salt, adapter, version and all tokens up to the page's end.
What is loaded stays on the host too, so evicting it again costs nothing. A read from disk is begun
with a ticket and answered later, as an input like any other, so that a replay does alike.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from jserve.kv.radix import Node
from jserve.types import PageFetch, PageMove


def digest_of(node: Node) -> bytes:
    """16 bytes that name the prefix which ends at ``node``; kept in the node."""
    path = []
    while not node.digest and node.parent is not None:
        path.append(node)
        node = node.parent
    if not node.digest:
        node.digest = hashlib.blake2b(repr(node.key).encode(), digest_size=16).digest()
    digest = node.digest
    for below in reversed(path):
        digest = below.digest = next_digest(digest, below.key)
    return digest


def next_digest(digest: bytes, tokens: Seq[int]) -> bytes:
    """The digest of the prefix named by ``digest`` and one more page of ``tokens``."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16, key=digest).digest()


@dataclass(slots=True, eq=False, kw_only=True)
class HostPage:
    """A prefix's last page in host memory; ``ready`` once its bytes are known to be there."""

    digest: bytes
    host: int
    ready: bool = False
    n_loads: int = 0
    """Loads that are not yet planned."""


class HostTier:
    """Up to ``n_pages`` evicted pages, least recently used first out, and what the disk knows.

    A host page whose bytes are on the way, either way, is never given to another prefix.
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.n_saved = self.n_loaded = self.n_dropped = self.n_fetched = self.n_missed = 0
        self.disk = False
        """True while what is saved also goes to disk."""
        self.on_disk: set[bytes] = set()
        """Digests that a read may find; one that does not is a miss."""
        self._free = list(range(n_pages - 1, -1, -1))
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()
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

    def load(self, digest: bytes, page: int) -> None:
        """Bring the page back into device page ``page``, before the rows of the next plan."""
        kept = self._pages[digest]
        self._pages.move_to_end(digest)
        kept.n_loads += 1
        self._loads.append((kept, page))
        self.n_loaded += 1

    def forget_loads(self, pages: Iterable[int]) -> None:
        """Device ``pages`` were given back before their loads were planned."""
        if self._loads:
            gone = set(pages)
            for kept, page in self._loads:
                kept.n_loads -= page in gone
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
        if self._saves:
            self._under_way[step] = [kept for _, kept in self._saves]
        self._saves, self._loads = [], []
        return (*saves, *loads)

    def landed(self, step: int, *, ok: bool) -> None:
        """Plan ``step`` was committed (or failed): what it saved is there (or is not)."""
        for kept in self._under_way.pop(step, ()):
            self._settle(kept, ok=ok)
            if ok and self.disk:
                self.on_disk.add(kept.digest)

    def fetch(self, digest: bytes) -> int | None:
        """A ticket for reading that prefix's last page from disk (that of a read under way, if there
        is one); None where no room is left."""
        kept = self._pages.get(digest)
        if kept is not None:
            return next((t for t, other in self._fetches.items() if other is kept), None)
        kept = self._place(digest)
        if kept is None:
            return None
        self._ticket += 1
        self._fetches[self._ticket] = kept
        self._asked.append(PageFetch(ticket=self._ticket, digest=digest, host=kept.host))
        return self._ticket

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
        if self._pages.get(kept.digest) is kept:
            self._settle(kept, ok=ok)
        else:
            self._free.append(kept.host)  # all was lost while it was read

    def lose(self) -> None:
        """Nothing that was kept is of use any more: other weights, or a device that failed. What is
        on disk was made by the first weights, so it is left alone until the next start."""
        self.disk = False
        self.on_disk.clear()
        self._pages.clear()
        self._saves, self._loads = [], []
        self._under_way.clear()
        for asked in self.take_fetches():
            del self._fetches[asked.ticket]
        busy = {kept.host for kept in self._fetches.values()}
        self._free = [host for host in range(self.n_pages - 1, -1, -1) if host not in busy]

    def check(self) -> None:
        """Raises AssertionError when a host page is lost, shared, or found too early."""
        known = {id(kept) for kept in self._pages.values()}
        lost = [kept.host for kept in self._fetches.values() if id(kept) not in known]
        hosts = [kept.host for kept in self._pages.values()]
        everything = sorted([*hosts, *self._free, *lost])
        assert everything == list(range(self.n_pages)), "host pages are lost or shared"
        assert all(id(kept) in known for _, kept in self._saves), "a save of a dropped page"
        assert all(id(kept) in known for kept, _ in self._loads), "a load of a dropped page"
        waiting = {id(kept) for _, kept in self._saves}
        waiting |= {id(kept) for saves in self._under_way.values() for kept in saves}
        waiting |= {id(kept) for kept in self._fetches.values()}
        for kept in self._pages.values():
            assert kept.ready != (id(kept) in waiting), f"host page {kept.host} is found too early"
            n_loads = sum(1 for other, _ in self._loads if other is kept)
            assert kept.n_loads == n_loads, f"{kept.n_loads} loads counted, {n_loads} wait"

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "host_pages": float(self.n_pages),
            "host_pages_used": float(len(self._pages)),
            "host_pages_saved_total": float(self.n_saved),
            "host_pages_loaded_total": float(self.n_loaded),
            "host_pages_dropped_total": float(self.n_dropped),
            "disk_pages_known": float(len(self.on_disk)),
            "disk_pages_read_total": float(self.n_fetched),
            "disk_pages_missed_total": float(self.n_missed),
        }

    def _place(self, digest: bytes) -> HostPage | None:
        """A host page for ``digest``: a free one, or the oldest whose bytes lie still."""
        if not self._free:
            still = (k for k in self._pages.values() if k.ready and not k.n_loads)
            oldest = next(still, None)
            if oldest is None:
                return None
            self._remove(oldest)
            self.n_dropped += 1
        kept = self._pages[digest] = HostPage(digest=digest, host=self._free.pop())
        return kept

    def _settle(self, kept: HostPage, *, ok: bool) -> None:
        kept.ready = ok
        if not ok and self._pages.get(kept.digest) is kept:
            self._remove(kept)

    def _remove(self, kept: HostPage) -> None:
        del self._pages[kept.digest]
        self._free.append(kept.host)
