"""Reads the header of a GGUF file and checks all that it says before anything is used.

    "GGUF" | version u32 | tensors u64 | keys u64 | keys and values | name, shape, type, offset of tensors | data

Versions 2 and 3, little-endian. A header costs memory in proportion to its own bytes: counts are compared to what is
left of the file before anything is made of them.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.errors import WeightsError
from jserve.gguf.types import BY_NUMBER, OTHERS, READ, block_of, n_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 18
MAX_NAME, MAX_TEXT = 256, 8 << 20
"""Bytes of a key or the name of a tensor, and of a text."""
MAX_TEXTS = 1 << 22
"""Of an array."""
MAX_RANK = 4
MAX_DEPTH = 2
"""Of arrays in arrays."""
ALIGNMENT = 32
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
TEXT, ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """The place of one tensor: type, shape (rows first), and its bytes ``[start, stop)`` of the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """All that a file says before its data. Arrays of numbers are numpy arrays, others lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def broken(path: Path, why: str, part: str = "") -> WeightsError:
    """A one-line WeightsError about ``path``, and a key or tensor of it."""
    shown = part if part.isprintable() and len(part) <= 200 else repr(part)[:200]
    at = f"{path.name}: {shown}" if part else path.name
    return WeightsError(f"{at}: {why} ({path})", field=f"{path}:{shown}" if part else str(path))


def is_gguf(path: str | Path) -> bool:
    """True for the name of a GGUF file."""
    return Path(path).suffix == ".gguf"


def mapped(path: Path) -> mmap.mmap:
    """The file, read-only.

    Raises:
        WeightsError: it is missing, empty, or no regular file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise broken(path, "not a regular file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise broken(path, "is empty") from None


def read(path: Path) -> GgufHeader:
    """The header of ``path``.

    Raises:
        WeightsError: it is no such file, or broken; ``field`` is the file, or file:key or tensor.
    """
    data = mapped(path)
    try:
        return _header(path, data)
    finally:
        data.close()


def _header(path: Path, data: mmap.mmap) -> GgufHeader:
    at = _Cursor(path, data)
    if at.take(4) != MAGIC:
        raise broken(path, "is no GGUF file")
    _check_version(path, at.number("<u4"))
    tensors, keys = at.number("<u8"), at.number("<u8")
    for name, n, most in (("tensors", tensors, MAX_TENSORS), ("keys", keys, MAX_KEYS)):
        if n > most:
            raise broken(path, f"{n} {name}; at most {most} are read")
    metadata = _metadata(at, keys)
    given = [_stated(at) for _ in range(tensors)]
    alignment = _alignment(path, metadata)
    for name, _, _, offset in given:
        if offset % alignment:
            raise broken(path, f"offset {offset} is no multiple of {alignment}", name)
    start = _aligned(at.at, alignment)
    return GgufHeader(path=path, metadata=metadata, tensors=_placed(path, given, start, len(data)))


def _check_version(path: Path, version: int) -> None:
    if version in VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in VERSIONS:
        raise broken(path, "is big-endian; only little-endian files are read")
    raise broken(path, f"version {version}; only versions {VERSIONS} are read")


class _Cursor:
    """A place in the file; nothing beyond the file, or the most that a header has, is taken."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.at = path, 0
        self._data, self._end = data, min(len(data), MAX_HEADER_BYTES)

    @property
    def left(self) -> int:
        return self._end - self.at

    def take(self, n: int, part: str = "") -> bytes:
        if n > self.left:
            cut = "ends in the header" if self._end == len(self._data) else "has too long a header"
            raise broken(self.path, cut, part)
        found = self._data[self.at : self.at + n]
        self.at += n
        return found

    def number(self, kind: str, part: str = "") -> int:
        return int(np.frombuffer(self.take(np.dtype(kind).itemsize, part), kind)[0])

    def text(self, most: int, part: str = "") -> str:
        n = struct.unpack("<Q", self.take(8, part))[0]
        if n > most:
            raise broken(self.path, f"a text of {n} bytes; at most {most} are read", part)
        try:
            return self.take(n, part).decode("utf-8")
        except UnicodeDecodeError:
            raise broken(self.path, "a text is not UTF-8", part) from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == TEXT:
            return self.text(MAX_TEXT, key)
        if kind == ARRAY:
            return self._array(key, depth)
        if kind not in SCALARS:
            raise broken(self.path, f"a value of unknown type {kind}", key)
        return np.frombuffer(self.take(np.dtype(SCALARS[kind]).itemsize, key), SCALARS[kind])[
            0
        ].item()

    def _array(self, key: str, depth: int) -> Any:
        kind, n = self.number("<u4", key), self.number("<u8", key)
        if depth >= MAX_DEPTH:
            raise broken(self.path, "arrays in arrays in arrays", key)
        least = np.dtype(SCALARS[kind]).itemsize if kind in SCALARS else 8
        if n * least > self.left:
            raise broken(self.path, f"an array of {n}, more than the file has", key)
        if kind in SCALARS:
            return np.frombuffer(self.take(n * least, key), SCALARS[kind])
        if n > MAX_TEXTS:
            raise broken(self.path, f"an array of {n} texts; at most {MAX_TEXTS} are read", key)
        return [self.value(kind, key, depth + 1) for _ in range(n)]


def _metadata(at: _Cursor, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(n):
        key = at.text(MAX_NAME)
        if key in found:
            raise broken(at.path, "is there twice", key)
        found[key] = at.value(at.number("<u4", key), key)
    return found


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    key = "general.alignment"
    found = metadata.get(key, ALIGNMENT)
    if type(found) is not int or found < 8 or found > 1 << 20 or found & (found - 1):
        raise broken(path, f"{str(found)[:40]} is no power of two from 8 to 2^20", key)
    return found


def _aligned(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


Stated = tuple[str, tuple[int, ...], int, int]


def _stated(at: _Cursor) -> Stated:
    """(name, shape, number of the type, offset in the data) of a tensor."""
    name = at.text(MAX_NAME)
    rank = at.number("<u4", name)
    if not 1 <= rank <= MAX_RANK:
        raise broken(at.path, f"{rank} dimensions; 1 to {MAX_RANK} are read", name)
    shape = tuple(at.number("<u8", name) for _ in range(rank))[::-1]
    if any(not 0 < n < 1 << 40 for n in shape) or math.prod(shape) >= 1 << 48:
        raise broken(at.path, f"shape {shape}", name)
    return name, shape, at.number("<u4", name), at.number("<u8", name)


def _placed(path: Path, given: list[Stated], start: int, size: int) -> dict[str, GgufTensor]:
    found: dict[str, GgufTensor] = {}
    for name, shape, number, offset in given:
        if name in found:
            raise broken(path, "is there twice", name)
        found[name] = _info(path, name, shape, _kind(path, name, number), start + offset, size)
    _check_apart(path, found)
    return found


def _kind(path: Path, name: str, number: int) -> str:
    if number in BY_NUMBER:
        return BY_NUMBER[number]
    shown = OTHERS.get(number, f"number {number}")
    raise broken(path, f"type {shown} is not read, only {', '.join(READ)}", name)


def _info(
    path: Path, name: str, shape: tuple[int, ...], kind: str, start: int, size: int
) -> GgufTensor:
    if shape[-1] % block_of(kind):
        raise broken(path, f"{kind} has blocks of {block_of(kind)}, shape is {shape}", name)
    stop = start + n_bytes(kind, math.prod(shape))
    if stop > size:
        raise broken(path, f"ends at byte {stop} of {size}", name)
    return GgufTensor(kind=kind, shape=shape, start=start, stop=stop)


def _check_apart(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    end, before = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
        if info.start < end:
            raise broken(path, f"overlaps {before}", name)
        end, before = info.stop, name
