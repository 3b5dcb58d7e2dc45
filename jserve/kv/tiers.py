"""The second tier: evicted pages in host memory, and which of them come back.

Owns the ids of host pages, what each holds and the moves between the tiers. Must not know bytes,
sequences or devices: a move is a pair of numbers that travels in a plan, and the runner's programs
do the work in the order of the queue::

    device pages  [ 7 ][ 12 ][ 3 ]...      evicted: save 12 -> host 5     before anyone rewrites 12
                        |  ^                wanted:  load host 5 -> 30    before the rows that read 30
    host pages    [ 0 ][ 5 ]...

A host page can be found only once the step that carried its save was committed. Contents are known
by a digest of the whole prefix: tenant, salt, adapter, version and all tokens up to the page's end.
What is loaded stays on the host too, so evicting it again costs nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from jserve.kv.radix import Node
from jserve.types import PageMove


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
    """A prefix's last page in host memory; ``ready`` once the step that saved it is committed."""

    digest: bytes
    host: int
    ready: bool = False


class HostTier:
    """Up to ``n_pages`` evicted pages, least recently used first out."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.n_saved = self.n_loaded = self.n_dropped = 0
        self._free = list(range(n_pages - 1, -1, -1))
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()
        self._saves: list[tuple[int, HostPage]] = []
        self._loads: list[tuple[int, int]] = []
        self._under_way: dict[int, list[HostPage]] = {}
        """Saves of the steps that are not committed yet, by step."""

    def __len__(self) -> int:
        return len(self._pages)

    def save(self, digest: bytes, page: int) -> None:
        """Device page ``page`` is about to be forgotten: keep what it holds."""
        if digest in self._pages:
            self._pages.move_to_end(digest)
            return
        if not self._free:
            self._drop_oldest()
        kept = self._pages[digest] = HostPage(digest=digest, host=self._free.pop())
        self._saves.append((page, kept))
        self.n_saved += 1

    def holds(self, digest: bytes) -> bool:
        """True when that prefix's last page could be loaded now."""
        kept = self._pages.get(digest)
        return kept is not None and kept.ready

    def load(self, digest: bytes, page: int) -> None:
        """Bring the page back into device page ``page``, before the rows of the next plan."""
        self._pages.move_to_end(digest)
        self._loads.append((self._pages[digest].host, page))
        self.n_loaded += 1

    def forget_loads(self, pages: Iterable[int]) -> None:
        """Device ``pages`` were given back before their loads were planned."""
        if self._loads:
            gone = set(pages)
            self._loads = [load for load in self._loads if load[1] not in gone]

    def drain(self, step: int) -> tuple[PageMove, ...]:
        """The moves that plan ``step`` carries: saves first, for a load may reuse their pages."""
        if not self._saves and not self._loads:
            return ()
        saves = [PageMove(page=page, host=kept.host, out=True) for page, kept in self._saves]
        loads = [PageMove(page=page, host=host, out=False) for host, page in self._loads]
        if self._saves:
            self._under_way[step] = [kept for _, kept in self._saves]
        self._saves, self._loads = [], []
        return (*saves, *loads)

    def landed(self, step: int, *, ok: bool) -> None:
        """Plan ``step`` was committed (or failed): what it saved is there (or is not)."""
        for kept in self._under_way.pop(step, ()):
            kept.ready = ok
            if not ok and self._pages.get(kept.digest) is kept:
                del self._pages[kept.digest]
                self._free.append(kept.host)

    def lose(self) -> None:
        """Nothing that was kept is of use any more: other weights, or a device that failed."""
        self._pages.clear()
        self._saves, self._loads = [], []
        self._under_way.clear()
        self._free = list(range(self.n_pages - 1, -1, -1))

    def check(self) -> None:
        """Raises AssertionError when a host page is lost or holds two prefixes."""
        hosts = [kept.host for kept in self._pages.values()]
        assert sorted([*hosts, *self._free]) == list(range(self.n_pages)), "host pages are lost"
        known = {id(kept) for kept in self._pages.values()}
        assert all(id(kept) in known for _, kept in self._saves), "a save of a dropped page"
        waiting = {id(kept) for _, kept in self._saves}
        waiting |= {id(kept) for saves in self._under_way.values() for kept in saves}
        early = [kept.host for kept in self._pages.values() if kept.ready and id(kept) in waiting]
        assert not early, f"host pages {early} can be found before their save was committed"

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "host_pages": float(self.n_pages),
            "host_pages_used": float(len(self._pages)),
            "host_pages_saved_total": float(self.n_saved),
            "host_pages_loaded_total": float(self.n_loaded),
            "host_pages_dropped_total": float(self.n_dropped),
        }

    def _drop_oldest(self) -> None:
        _, kept = self._pages.popitem(last=False)
        self._saves = [save for save in self._saves if save[1] is not kept]
        self._free.append(kept.host)
        self.n_dropped += 1
