"""Keeps compiled programs in serialised form beside the compile cache, so that a later start traces nothing.

It owns the files: who may have written them, what is in them, and how many bytes they take. A file is named by its
program's key (``program_key``) and read only if nobody but this user, or root, can have put it there, because what is
in it is unpickled and run::

    directory    ours or root's, no one else may write    held open: files are opened, renamed and removed in it
    key.program  ours or root's, no one else may write    [ magic, 4 ][ sha256 of key and body, 32 ][ body ]
    body         pickle of (serialised executable, tree of its arguments, tree of its results)
                 or "=" and the key of the file that has it

Whatever does not check is as if it were not there, and the program is compiled. Those used longest ago go when all
together are too large.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import stat
import threading
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

log = logging.getLogger(__name__)

DIRECTORY = "executables"
"""Below the compile cache."""
MOST_BYTES = 1 << 30
"""Of all files together: some twenty sets of a model's programs."""
_MAGIC, _ALIAS, _SUFFIX = b"JSX1", b"=", ".program"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Unusable(Exception):
    """A file or directory that is not to be read; the message says why."""


def by_others(status: os.stat_result, *, group: bool = True) -> bool:
    """True if somebody else than this user and root can have written what has this ``status``, or can write it."""
    others = stat.S_IWOTH | (stat.S_IWGRP if group else 0)
    return status.st_uid not in (0, os.getuid()) or bool(status.st_mode & others)


class ProgramFiles:
    """The serialised programs in one directory, which is made if it is not there.

    Args:
        directory: where the compile cache is.
        most_bytes: of all files together.

    Raises:
        Unusable: others can write there, or it cannot be made.
    """

    def __init__(self, directory: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._warned = False
        path = directory / DIRECTORY
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            self._at = os.open(path, _READ | os.O_DIRECTORY)
        except OSError as error:
            raise Unusable(f"{path}: {error.strerror}") from None
        if by_others(os.fstat(self._at)):
            os.close(self._at)
            raise Unusable(f"{path} can be written by other users")

    def close(self) -> None:
        os.close(self._at)

    def load(self, key: str, args: Any, devices: list[Any]) -> Any:
        """The program of that key for ``devices``, ready to be called; None: it has to be compiled.

        Args:
            args: the abstract arguments, a tuple.
        """
        try:
            body = self._read(key)
            if body is not None and body.startswith(_ALIAS):
                body = self._read(body.removeprefix(_ALIAS).decode())
            return None if body is None else _loaded(body, args, devices)
        # What jax and XLA raise for a program that they cannot take is theirs to choose.
        except Exception as error:
            self._warn(f"{key}{_SUFFIX} is not used: {_reason(error)}")
            return None

    def save(self, key: str, program: Any) -> None:
        """Keep a compiled program, which no cache gave: one that was loaded is serialised without its code. A failure
        is no more than a log line."""
        try:
            self._keep(key, pickle.dumps(serialize(program)))
        except Exception as error:
            self._warn(f"a program is not kept: {_reason(error)}")

    def alias(self, key: str, same: str) -> None:
        """Have ``key`` name the program of key ``same``, too."""
        try:
            self._keep(key, _ALIAS + same.encode())
        except OSError as error:
            self._warn(f"a program is not kept: {_reason(error)}")

    def _keep(self, key: str, body: bytes) -> None:
        with self._lock:
            self._write(key, body)
            self._remove_oldest()

    def _read(self, key: str) -> bytes | None:
        """The body of a file that checks, None if there is none."""
        try:
            file = os.open(key + _SUFFIX, _READ, dir_fd=self._at)
        except FileNotFoundError:
            return None
        with open(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or by_others(status):
                raise Unusable("other users can write it")
            data = opened.read()
            with contextlib.suppress(OSError):  # root's may be read only
                os.utime(file)
        body = data[_HEAD:]
        if data[:_HEAD] != _head(key, body):
            raise Unusable("it is damaged")
        return body

    def _write(self, key: str, body: bytes) -> None:
        if len(body) > self._most_bytes:
            return
        partial = f"{key}.{os.getpid()}.partial"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=self._at)
        try:
            with open(os.open(partial, _WRITE, 0o600, dir_fd=self._at), "wb") as opened:
                opened.write(_head(key, body) + body)
            os.rename(partial, key + _SUFFIX, src_dir_fd=self._at, dst_dir_fd=self._at)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=self._at)
            raise

    def _remove_oldest(self) -> None:
        """Those used longest ago, and what a process left that died while it wrote, until all fit."""
        with os.scandir(self._at) as entries:
            found = [(e.stat(follow_symlinks=False), e.name) for e in entries]
        found.sort(key=lambda item: item[0].st_mtime_ns)
        total = sum(status.st_size for status, _ in found)
        for status, name in found:
            if total <= self._most_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._at)
            total -= status.st_size

    def _warn(self, message: str) -> None:
        """One line of a start, however many programs have the same trouble."""
        with self._lock:
            first, self._warned = not self._warned, True
        log.log(logging.WARNING if first else logging.DEBUG, "serialised programs: %s", message)


def _head(key: str, body: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + body).digest()


def _loaded(body: bytes, args: Any, devices: list[Any]) -> Any:
    payload, in_tree, out_tree = pickle.loads(body)
    if in_tree != jax.tree.structure((args, {})):
        raise Unusable("its arguments are others")
    client = devices[0].client
    return deserialize_and_load(
        payload, in_tree, out_tree, backend=client, execution_devices=devices
    )


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"[:300]
