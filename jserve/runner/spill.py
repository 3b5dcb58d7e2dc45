"""Reads and writes page files in a thread, so that no step waits for the disk.

Writes are dropped while too many wait: a page that is not written is a miss later, nothing worse. Every read is
answered::

    loop    write(digest, bytes)   read(ticket, digest, host)        answers()  [(fetch, bytes | None)]
              |                      |                                  ^
    thread    '------ jobs ----------'------> DiskStore put, get -------'
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque

from jserve.errors import where
from jserve.runner.disk import DiskStore
from jserve.types import PageFetch

log = logging.getLogger(__name__)

MAX_WRITES = 256
"""Writes that may wait."""


class Spill:
    """A ``DiskStore`` behind a thread. ``close`` ends it after the writes that wait."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.n_dropped = 0
        """Writes that were not even tried."""
        self._jobs: queue.SimpleQueue[PageFetch | tuple[bytes, bytes] | None] = queue.SimpleQueue()
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
            "disk_read_only": float(store.read_only),
        }

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, PageFetch):
                self._answers.append((job, self._get(job.digest)))
                continue
            self._n_done += 1
            try:
                self.store.put(*job)
            except Exception as error:  # a fault of ours must not end the thread: reads wait for it
                log.error("a page was not written: %s", where(error))

    def _get(self, digest: bytes) -> bytes | None:
        try:
            return self.store.get(digest)
        except Exception as error:
            log.error("a page was not read: %s", where(error))
            return None
