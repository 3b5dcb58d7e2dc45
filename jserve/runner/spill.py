"""Reads and writes page files in a thread, so that no step waits for the disk.

Writes are dropped while too many wait: a page that is not written is a miss later, nothing worse. Every read is
answered, from the store or by the engine whose address the read names::

    loop    write(digest, bytes)   export(pages)   read(ticket, digest, host)   answers()  [(fetch, bytes | None)]
              |                      |                  |                             ^
    thread    '------ jobs ----------'------------------'--> DiskStore put, get ------'
                                                         '-> KVTransferServer of another engine
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from jserve.config import CacheOptions
from jserve.errors import ConfigError, where
from jserve.runner.disk import DiskStore
from jserve.runner.kv_transfer import KVTransferClients, KVTransferServer, parse_address
from jserve.runner.program_files import by_others
from jserve.types import PageFetch

log = logging.getLogger(__name__)

MAX_WRITES = 256
"""Writes that may wait."""
MAX_EXPORTS = 64
"""Parts of pages for other engines that may wait: they are on the device until they are written."""
GAIN = 0.1
"""Of each page's seconds in ``Spill.page_s``."""
Pages = Callable[[], Iterable[tuple[bytes, bytes]]]
"""Gives (digest, page) each, and may block."""


class Spill:
    """A ``DiskStore`` behind a thread. ``close`` ends it after the writes that wait.

    Args:
        store: its files; nobody else calls what changes them.
        server: gives them to other engines; closed with this.
        clients: of other engines' servers, which are asked for pages.
    """

    def __init__(
        self,
        store: DiskStore,
        server: KVTransferServer | None = None,
        clients: KVTransferClients | None = None,
    ) -> None:
        self.store, self.server = store, server
        self.n_dropped = 0
        """Writes that were not even tried."""
        self.n_exported = self.n_received = 0
        """Calls of ``export`` that are done; pages that came from other engines' servers."""
        self.page_s = 0.0
        """Seconds that pages took of late, each, to be written or read; 0 before the first."""
        self._clients = clients
        self._n_exporting = 0
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

    def export(self, pages: Pages) -> int:
        """Write ``pages``, in the thread; the number of this call, which ``n_exported`` reaches."""
        self._n_exporting += 1
        full = self._n_exporting - self.n_exported > MAX_EXPORTS
        self.n_dropped += full
        self._jobs.put((lambda: ()) if full else pages)
        return self._n_exporting

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
        if self.server is not None:
            self.server.close()
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
            "kv_transfer_pages_received_total": float(self.n_received),
            "kv_transfer_pages_sent_total": float(self.server.n_sent if self.server else 0),
            "disk_read_only": float(store.read_only),
        }

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, PageFetch):
                self._answers.append((job, self._get(job)))
                continue
            exports = callable(job)
            try:
                for digest, page in job() if exports else (job,):
                    self._put(digest, page)
            except Exception as error:  # a fault of ours must not end the thread: reads wait for it
                log.error("a page was not written: %s", where(error))
            self.n_exported += exports
            self._n_done += not exports
        if self._clients is not None:
            self._clients.close()

    def _put(self, digest: bytes, page: bytes) -> None:
        n, began = self.store.n_written, time.perf_counter()
        self.store.put(digest, page)
        if self.store.n_written > n:
            self._took(time.perf_counter() - began)

    def _took(self, seconds: float) -> None:
        self.page_s += (seconds - self.page_s) * (GAIN if self.page_s else 1.0)

    def _get(self, fetch: PageFetch) -> bytes | None:
        began = time.perf_counter()
        try:
            page = self.store.get(fetch.digest)
            if page is None and fetch.source and self._clients is not None:
                page = self._clients.get(fetch.source, fetch.digest)
                self.n_received += page is not None
            if page is not None:
                self._took(time.perf_counter() - began)
            return page
        except Exception as error:
            log.error("a page was not read: %s", where(error))
            return None


def open_spill(options: CacheOptions, page_bytes: int, identity: Callable[[], str]) -> Spill | None:
    """The disk tier that ``options`` ask for, with its ends of KV transfer; None: they ask for none.

    Args:
        page_bytes: of one page; 0: there is no host memory that it could go through.
        identity: names what a page depends on; called only where there is a tier.

    Raises:
        ConfigError: an option that cannot be honoured.
    """
    address, key = options.kv_transfer_address, options.kv_transfer_key
    if not options.disk_dir:
        for name, given in (("kv_transfer_address", address), ("kv_transfer_key", key)):
            if given:
                raise ConfigError(f"{name} is of pages in disk_dir: it needs one", field=name)
        return None
    if not page_bytes:
        raise ConfigError("disk_dir needs host_memory_gb, through which pages go", field="disk_dir")
    if address and not key:
        raise ConfigError("kv_transfer_address needs kv_transfer_key", field="kv_transfer_key")
    at = parse_address(address, "kv_transfer_address") if address else None
    directory, most = Path(options.disk_dir), int(options.disk_gb * 2**30)
    try:
        store = DiskStore(directory, identity(), page_bytes=page_bytes, max_bytes=most)
    except OSError as error:
        why = f"disk_dir {error.filename}: {error.strerror}"
        raise ConfigError(why, field="disk_dir") from None
    if by_others(directory.stat(), group=False):
        raise ConfigError(
            "disk_dir can be written by other users, who could put other KV there", field="disk_dir"
        )
    server = None if at is None else KVTransferServer(at, store, key)
    return Spill(store, server, KVTransferClients(store, key) if key else None)
