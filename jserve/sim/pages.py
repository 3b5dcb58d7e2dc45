"""KV pages that simulated replicas hand over, by name: when each is written, and what reading and writing take.

A replica has one thread for it, as a live one (``runner.spill``): pages are written and read one after the other,
beside the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jserve.ports import Clock
from jserve.types import PageFetch


class SharedPages:
    """Pages that any replica finds, and the time since which each is there.

    Args:
        page_s: seconds to write a page, or to read it.
    """

    def __init__(self, page_s: float) -> None:
        self.page_s = page_s
        self._since: dict[bytes, float] = {}
        self._writers: dict[bytes, PageThread] = {}

    def has(self, digest: bytes, now: float) -> bool:
        return self._since.get(digest, now + 1.0) <= now

    def written(self, digest: bytes, now: float, by: PageThread) -> None:
        if digest not in self._since:
            self._since[digest], self._writers[digest] = now, by

    def lose(self, writer: PageThread, now: float) -> None:
        """Pages that ``writer`` has not written by ``now`` it never will."""
        lost = [d for d, at in self._since.items() if at > now and self._writers[d] is writer]
        for digest in lost:
            del self._since[digest], self._writers[digest]


class PageThread:
    """One replica's reads and writes of ``shared``, in the order in which they were asked for."""

    def __init__(self, shared: SharedPages, clock: Clock) -> None:
        self.page_s, self._shared, self._clock = shared.page_s, shared, clock
        self._free_at = 0.0
        self._exports: deque[float] = deque()
        self._n_exports = self._n_exported = 0
        self._reads: deque[tuple[float, PageFetch]] = deque()

    def write(self, digests: Iterable[bytes], at: float) -> None:
        """Begin to write pages whose bytes are there at ``at``."""
        self._free_at = max(self._free_at, at)
        for digest in digests:
            if not self._shared.has(digest, self._free_at):
                self._free_at += self._shared.page_s
                self._shared.written(digest, self._free_at, self)

    def lose(self, now: float) -> None:
        """Its replica is lost at ``now``."""
        self._shared.lose(self, now)

    def export(self, digests: Iterable[bytes]) -> int:
        """As ``ports.DiskTier.export``."""
        self.write(digests, self._clock())
        self._exports.append(self._free_at)
        self._n_exports += 1
        return self._n_exports

    def exported(self) -> int:
        """As ``ports.DiskTier.exported``."""
        while self._exports and self._exports[0] <= self._clock():
            self._exports.popleft()
            self._n_exported += 1
        return self._n_exported

    def fetch(self, asked: Iterable[PageFetch]) -> None:
        """As ``ports.DiskTier.fetch``."""
        for one in asked:
            self._free_at = max(self._free_at, self._clock())
            if self._shared.has(one.digest, self._free_at):
                self._free_at += self._shared.page_s
            self._reads.append((self._free_at, one))

    def take_fetched(self) -> list[tuple[int, bool]]:
        """As ``ports.DiskTier.take_fetched``."""
        found = []
        while self._reads and self._reads[0][0] <= self._clock():
            at, one = self._reads.popleft()
            found.append((one.ticket, self._shared.has(one.digest, at)))
        return found
