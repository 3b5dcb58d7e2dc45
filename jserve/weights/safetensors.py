"""Reads one safetensors file lazily and validates its header.

It owns the file format: an 8-byte little-endian header length, a JSON header, the tensors end to end. Every
property of the header is checked before any tensor can be asked for; tensors are read-only numpy views of the
mapped file, so nothing is copied until a slice is.

    0        8              8+n                                            file size
    |  n u64 | JSON header  |  tensor  |  tensor  | ...                   |
                            ^ data_offsets count from here; no gap, no overlap, no rest

Format: the safetensors specification. A file that shrinks while mapped kills the process (SIGBUS);
replace weight files by renaming, never in place.
"""

from __future__ import annotations

import json
import math
import mmap
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jserve.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 16

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "C64": np.complex64,
    }.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The place of one tensor: dtype, shape, and its bytes ``[start, stop)`` of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A checked, mapped file. ``tensors`` maps names to ``TensorInfo``; ``read`` gives views.

    Raises:
        WeightsError: the file is missing, truncated or malformed; ``field`` is the file, or
        file:tensor.
    """

    __slots__ = ("_map", "path", "tensors")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _mapped(path)
        self.tensors: Mapping[str, TensorInfo] = _header(path, self._map)

    def read(self, name: str) -> np.ndarray:
        """Tensor ``name`` as a read-only view of the mapped file."""
        info = self.tensors[name]
        count = math.prod(info.shape)
        if count == 0:
            return np.empty(info.shape, info.dtype)
        flat = np.frombuffer(self._map, np.uint8, info.stop - info.start, info.start)
        return flat.view(info.dtype).reshape(info.shape)

    def drop_pages(self) -> None:
        """Unmap the pages read so far; they stay in the kernel's cache if there is room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def broken(path: Path, why: str, tensor: str | None = None) -> WeightsError:
    """A one-line WeightsError about ``path`` (and ``tensor``)."""
    if tensor is None:
        return WeightsError(f"{path.name}: {why} ({path})", field=str(path))
    shown = tensor if tensor.isprintable() and len(tensor) <= 200 else repr(tensor)[:200]
    return WeightsError(f"{path.name}: tensor {shown}: {why} ({path})", field=f"{path}:{shown}")


def _mapped(path: Path) -> mmap.mmap:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise broken(path, "not a regular file")
        if info.st_size < 10:
            raise broken(path, f"truncated: {info.st_size} bytes are no safetensors file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise broken(path, f"cannot be read: {reason}") from None


def _header(path: Path, data: mmap.mmap) -> dict[str, TensorInfo]:
    size = int.from_bytes(data[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise broken(path, f"header of {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if size > len(data) - 8:
        raise broken(path, f"truncated: header of {size} bytes in a file of {len(data)}")
    header = _parsed(path, data[8 : 8 + size])
    header.pop("__metadata__", None)
    infos = {name: _info(path, name, entry, 8 + size) for name, entry in header.items()}
    _check_cover(path, infos, 8 + size, len(data))
    return infos


def _parsed(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise broken(path, f"header is not UTF-8 at byte {error.start}") from None
    except DuplicateKey as error:
        raise broken(path, "listed twice in the header", error.key) from None
    except (ValueError, RecursionError) as error:
        raise broken(path, f"header is not JSON: {str(error)[:100]}") from None
    if not isinstance(header, dict):
        raise broken(path, "header is not a JSON object")
    return header


class DuplicateKey(ValueError):
    """A JSON object has ``key`` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} occurs twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` of json.loads that refuses duplicate keys with ``DuplicateKey``."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DuplicateKey(key)
        found[key] = value
    return found


def _info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise broken(path, "header entry is not an object", name)
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None:
        raise broken(path, f"unknown dtype {str(entry.get('dtype'))[:40]!r}", name)
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not _naturals(shape) or len(shape) > MAX_RANK:
        raise broken(path, "shape is not a short list of whole numbers", name)
    if not isinstance(offsets, list) or not _span(offsets):
        raise broken(path, "data_offsets are not [begin, end]", name)
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**62:
        raise broken(path, f"shape {shape} is too large", name)
    need, have = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if need != have:
        raise broken(
            path, f"shape {shape} of {dtype} needs {need} bytes, offsets give {have}", name
        )
    return TensorInfo(
        dtype=dtype, shape=tuple(shape), start=base + offsets[0], stop=base + offsets[1]
    )


def _naturals(values: list[Any]) -> bool:
    return all(type(n) is int and n >= 0 for n in values)


def _span(values: list[Any]) -> bool:
    return len(values) == 2 and _naturals(values) and values[0] <= values[1]


def _check_cover(path: Path, infos: Mapping[str, TensorInfo], base: int, size: int) -> None:
    """The tensors must lie end to end from ``base`` to the end of the file."""
    at, before = base, "the header"
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.stop > size:
            raise broken(path, f"truncated: ends at byte {info.stop} of {size}", name)
        if info.start != at:
            kind = "overlaps" if info.start < at else "leaves a gap after"
            raise broken(path, f"{kind} {before}", name)
        at, before = info.stop, name
    if at != size:
        raise broken(path, f"{size - at} bytes follow the last tensor")
