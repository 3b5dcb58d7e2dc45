"""The disk tier: pages as checksummed files in one bounded directory, reused after a restart.

It owns the files: their names, their header, how many bytes they may take, and what happens when the disk is full
or a file is broken. Called from one thread, which may block; ``now`` comes from a clock that is given.

A file is named by the digest of its prefix and lies under the identity of what made it, so a cache
of another model, type, page size or layer count is never read::

    directory / identity (16 hex) / ab / ab12...34.kv
    file   [ magic, 4 ][ crc32 of the rest, 4 ][ bytes of a page ]

A file is written under another name and renamed, so a crash leaves no half of one; whatever does
not check is a miss and is removed. Where no byte can be written the tier is read-only for a while.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from jserve.faults import point

log = logging.getLogger(__name__)

READ_ONLY_S = 60.0
_MAGIC = b"JKV1"
_HEADER = struct.Struct("<4sI")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


class DiskStore:
    """Pages of ``page_bytes`` in ``directory / identity``, at most ``max_bytes`` of files.

    Raises:
        OSError: the directory cannot be made or read.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        *,
        page_bytes: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = directory / identity
        self.page_bytes = page_bytes
        self.max_pages = max_bytes // (page_bytes + _HEADER.size)
        self._clock = clock
        self._read_only_until = 0.0
        self.n_written = self.n_read = self.n_broken = self.n_failed = 0
        self._names: OrderedDict[str, None] = OrderedDict()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.mkdir(exist_ok=True)
        self._scan()

    def __len__(self) -> int:
        return len(self._names)

    def digests(self) -> list[bytes]:
        """The pages on disk, least recently used first."""
        return [bytes.fromhex(name) for name in self._names]

    def has(self, digest: bytes) -> bool:
        """Its file is there, whoever wrote it. May be called from any thread."""
        return self._path(digest.hex()).exists()

    def file(self, digest: bytes) -> bytes | None:
        """The file of a page as it is, unchecked; None: there is none. May be called from any thread."""
        try:
            return self._path(digest.hex()).read_bytes()
        except OSError:
            return None

    @property
    def read_only(self) -> bool:
        """True for ``READ_ONLY_S`` after a write found no room or no permission."""
        return self._clock() < self._read_only_until

    def put(self, digest: bytes, page: bytes) -> bool:
        """Keep ``page``; False when it is not kept (read-only, no room, a fault)."""
        name = digest.hex()
        if self.max_pages < 1 or self.read_only:
            return self.has(digest)
        if self.has(digest):  # another engine may have written it
            self._use(name)
            return True
        self._names.pop(name, None)
        while len(self._names) >= self.max_pages:
            self._forget(next(iter(self._names)))
        path = self._path(name)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._write(path, partial, page)
        except OSError as error:
            self._failed(error, partial)
            return False
        self._names[name] = None
        self.n_written += 1
        return True

    @point("disk.write", lambda words: OSError(errno.ENOSPC, words))
    def _write(self, path: Path, partial: Path, page: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        partial.write_bytes(_HEADER.pack(_MAGIC, zlib.crc32(page)) + page)
        partial.replace(path)

    def get(self, digest: bytes) -> bytes | None:
        """The page, or None: never written, gone, or broken (then the file is removed)."""
        name = digest.hex()
        path = self._path(name)
        try:
            data = self._read(path)
        except OSError:
            self._names.pop(name, None)
            return None
        page = checked(data, self.page_bytes)
        if page is None:
            self.n_broken += 1
            self._forget(name)
            return None
        self._use(name)
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of use outlives a restart
        self.n_read += 1
        return page

    @point("disk.read", OSError)
    def _read(self, path: Path) -> bytes:
        return path.read_bytes()

    def _scan(self) -> None:
        """Take over what an earlier process left, oldest use first; remove its half-written files."""
        found: list[tuple[float, str]] = []
        for path in self.root.glob("*/*"):
            with contextlib.suppress(OSError):
                if path.suffix == ".partial":
                    if not _is_written(path):
                        path.unlink()
                elif path.suffix == ".kv" and _is_name(path.stem):
                    found.append((path.stat().st_mtime, path.stem))
        self._names = OrderedDict.fromkeys(name for _, name in sorted(found))
        while len(self._names) > max(self.max_pages, 0):
            self._forget(next(iter(self._names)))

    def _use(self, name: str) -> None:
        """The file is the one used last, whoever wrote it; it counts here from now on."""
        self._names[name] = None
        self._names.move_to_end(name)
        while len(self._names) > self.max_pages:
            self._forget(next(iter(self._names)))

    def _failed(self, error: OSError, partial: Path) -> None:
        self.n_failed += 1
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if error.errno in _FULL:
            self._read_only_until = self._clock() + READ_ONLY_S
        log.warning("the KV disk tier cannot write: %s", error.strerror)

    def _forget(self, name: str) -> None:
        self._names.pop(name, None)
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / f"{name}.kv"


def checked(data: bytes, page_bytes: int) -> bytes | None:
    """The page in a file's bytes, None unless all of it is there and checks."""
    if len(data) != _HEADER.size + page_bytes:
        return None
    magic, crc = _HEADER.unpack_from(data)
    page = data[_HEADER.size :]
    return page if magic == _MAGIC and zlib.crc32(page) == crc else None


def _is_written(partial: Path) -> bool:
    """Another process, which lives, has begun this file."""
    pid = partial.stem.rpartition(".")[2]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return True


def _is_name(text: str) -> bool:
    return len(text) == 32 and all(c in "0123456789abcdef" for c in text)
