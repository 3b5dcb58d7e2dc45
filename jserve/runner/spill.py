"""Reads and writes page files in a thread, so that no step waits for the disk.

Writes are dropped while too many wait: a page that is not written is a miss later, nothing worse. Every read is
answered, from the store or by the engine whose door the read names::

    loop    write(digest, bytes)   hand_over(pages)   read(ticket, digest, host)   answers()  [(fetch, bytes | None)]
              |                      |                  |                             ^
    thread    '------ jobs ----------'------------------'--> DiskStore put, get ------'
                                                         '-> PageDoor of another engine
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable

from jserve.errors import where
from jserve.runner.disk import DiskStore
from jserve.runner.door import DoorClients
from jserve.types import PageFetch

log = logging.getLogger(__name__)

MAX_WRITES = 256
"""Writes that may wait."""
MAX_HANDED = 64
"""Parts of pages for other engines that may wait: they are on the device until they are written."""
Pages = Callable[[], Iterable[tuple[bytes, bytes]]]
"""Gives (digest, page) each, and may block."""


class Spill:
    """A ``DiskStore`` behind a thread. ``close`` ends it after the writes that wait. ``doors``: of other engines, of
    which pages may be asked."""

    def __init__(self, store: DiskStore, doors: DoorClients | None = None) -> None:
        self.store = store
        self.n_dropped = 0
        """Writes that were not even tried."""
        self.n_handed = self.n_from_doors = 0
        """Parts that were handed over; pages that came from other engines' doors."""
        self._doors = doors
        self._n_handing = 0
        self._jobs: queue.SimpleQueue[PageFetch | tuple[bytes, bytes] | Pages | None] = (
            queue.SimpleQueue()
        )
        self._answers: deque[tuple[PageFetch, bytes | None]] = deque()
        self._n_asked = self._n_done = 0
        """Writes: the loop counts the first, the thread the second, so neither misses any."""
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def write(self, digest: bytes, page: bytes, *, must: bool = False) -> None:
        """Keep ``page`` under ``digest``, some time. ``must``: however many wait."""
        if self._n_asked - self._n_done >= MAX_WRITES and not must:
            self.n_dropped += 1
            return
        self._n_asked += 1
        self._jobs.put((digest, page))

    def hand_over(self, pages: Pages) -> int:
        """Write ``pages``, in the thread; the number of this call, which ``n_handed`` reaches."""
        self._n_handing += 1
        full = self._n_handing - self.n_handed > MAX_HANDED
        self.n_dropped += full
        self._jobs.put((lambda: ()) if full else pages)
        return self._n_handing

    def read(self, fetch: PageFetch) -> None:
        self._jobs.put(fetch)

    def answers(self) -> list[tuple[PageFetch, bytes | None]]:
        """The pages that were read since the last call; None where a page is missing or broken."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what waits and end. Idempotent."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        store = self.store
        return {
            "disk_pages": float(len(store)),
            "disk_pages_written_total": float(store.n_written),
            "disk_pages_broken_total": float(store.n_broken),
            "disk_writes_failed_total": float(store.n_failed),
            "disk_writes_dropped_total": float(self.n_dropped),
            "door_pages_read_total": float(self.n_from_doors),
            "disk_read_only": float(store.read_only),
        }

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, PageFetch):
                self._answers.append((job, self._get(job)))
                continue
            handed = callable(job)
            try:
                for digest, page in job() if handed else (job,):
                    self.store.put(digest, page)
            except Exception as error:  # a fault of ours must not end the thread: reads wait for it
                log.error("a page was not written: %s", where(error))
            self.n_handed += handed
            self._n_done += not handed
        if self._doors is not None:
            self._doors.close()

    def _get(self, fetch: PageFetch) -> bytes | None:
        try:
            page = self.store.get(fetch.digest)
            if page is None and fetch.source and self._doors is not None:
                page = self._doors.get(fetch.source, fetch.digest)
                self.n_from_doors += page is not None
            return page
        except Exception as error:
            log.error("a page was not read: %s", where(error))
            return None
