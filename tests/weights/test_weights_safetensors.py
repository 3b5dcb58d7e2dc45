"""The reader against every dtype, every kind of broken header, and 300 random corruptions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from jserve.errors import WeightsError
from jserve.weights.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from tests.weights.weights_kit import BF16, NAMES, pack, raw, same

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6).astype(BF16),
    "empty": np.zeros((0, 5), np.float32),
    "scalar": np.array(2.5, np.float16),
}


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("pad", [1, 8], ids=["unaligned", "aligned"])
@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_reads_every_dtype(tmp_path: Path, dtype: Any, pad: int) -> None:
    x = np.frombuffer(np.random.default_rng(0).bytes(24 * dtype.itemsize), np.uint8)
    x = (x & 1).astype(bool) if dtype.kind == "b" else x.view(dtype)
    x = x[:24].reshape(4, 6)
    odd = {"one": np.zeros(1, np.uint8), "x": x}
    file = SafetensorsFile(write(tmp_path, pack(odd, pad)))
    assert same(file.read("x"), x)
    assert same(file.read("x")[1:3, 2:5], x[1:3, 2:5])
    assert file.tensors["x"].dtype == dtype


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "lib.safetensors"
    plain = {n: x for n, x in TENSORS.items() if x.dtype != BF16}
    save_file(plain, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(plain)
    assert all(same(file.read(n), x) for n, x in plain.items())


def test_reads_lazily_and_read_only(tmp_path: Path) -> None:
    big = {"w": np.ones((1 << 20, 4), np.float32)}
    file = SafetensorsFile(write(tmp_path, pack(big)))
    view = file.read("w")
    assert not view.flags.writeable
    assert not view.flags.owndata
    assert np.shares_memory(view, file.read("w"))
    file.drop_pages()
    assert view[-1, -1] == 1


def entry(name: str, **changes: Any) -> Any:
    def edit(header: dict[str, Any]) -> None:
        header[name] |= changes

    return lambda: pack(TENSORS, edit=edit)


def header(edit: Any) -> Any:
    return lambda: pack(TENSORS, edit=edit)


def retext(change: Any) -> Any:
    """The header's text changed after it was written."""

    def make() -> bytes:
        data = pack(TENSORS)
        size = int.from_bytes(data[:8], "little")
        return raw(change(data[8 : 8 + size]), data[8 + size :])

    return make


def shift(header: dict[str, Any], by: int, first: str = "b") -> None:
    start = header[first]["data_offsets"][0]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= start:
            entry["data_offsets"] = [n + by for n in entry["data_offsets"]]


TWICE = (
    b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
)

FAULTS: dict[str, tuple[Any, str | None, str]] = {
    "empty file": (lambda: b"", None, "truncated"),
    "nine bytes": (lambda: b"\x01" + b"\0" * 8, None, "truncated"),
    "header length past the file": (lambda: pack(TENSORS)[:40], None, "truncated"),
    "header length over the limit": (
        lambda: (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        None,
        "at most",
    ),
    "header length 2**64-1": (lambda: b"\xff" * 8 + b"{}", None, "at most"),
    "data truncated by one byte": (lambda: pack(TENSORS)[:-1], "scalar", "truncated"),
    "data missing": (lambda: pack(TENSORS)[:-10], "b", "truncated"),
    "bytes after the last tensor": (lambda: pack(TENSORS) + b"x", None, "1 bytes follow"),
    "not UTF-8": (retext(lambda t: t.replace(b'"format"', b'"form\xff\xfe"')), None, "UTF-8"),
    "not JSON": (retext(lambda t: t[:-10] + b"," * 10), None, "not JSON"),
    "a JSON list": (lambda: raw(b"[1, 2, 3]", b""), None, "not a JSON object"),
    "deeply nested JSON": (lambda: raw(b"[" * 100_000, b""), None, "not JSON"),
    "duplicate key": (lambda: raw(TWICE, b"ab"), "a", "listed twice"),
    "entry is a number": (header(lambda h: h | {"a": 7}), "a", "not an object"),
    "unknown dtype": (entry("a", dtype="F31"), "a", "unknown dtype"),
    "sub-byte dtype": (entry("a", dtype="F4"), "a", "unknown dtype"),
    "dtype is a list": (entry("a", dtype=["F32"]), "a", "unknown dtype"),
    "no dtype": (entry("a", dtype=None), "a", "unknown dtype"),
    "no shape": (entry("a", shape=None), "a", "shape"),
    "negative dimension": (entry("a", shape=[-3, -4]), "a", "shape"),
    "fractional dimension": (entry("a", shape=[3.0, 4]), "a", "shape"),
    "boolean dimension": (entry("a", shape=[True, 12]), "a", "shape"),
    "rank 40": (entry("a", shape=[1] * 38 + [3, 4]), "a", "shape"),
    "shape against bytes": (entry("a", shape=[3, 5]), "a", "needs 60 bytes"),
    "shape smaller than its bytes": (entry("a", shape=[3, 3]), "a", "needs 36 bytes"),
    "dtype against bytes": (entry("a", dtype="F64"), "a", "needs 96 bytes"),
    "huge empty shape": (entry("empty", shape=[0, 2**62, 2**62]), "empty", "too large"),
    "reversed offsets": (entry("a", data_offsets=[48, 0]), "a", "data_offsets"),
    "one offset": (entry("a", data_offsets=[0]), "a", "data_offsets"),
    "negative offset": (entry("a", data_offsets=[-48, 0]), "a", "data_offsets"),
    "offset is text": (entry("a", data_offsets=["0", "48"]), "a", "data_offsets"),
    "offset past the file": (entry("scalar", data_offsets=[2**40, 2**40 + 2]), "scalar", "truncat"),
    "overlap": (header(lambda h: shift(h, -4)), "b", "overlaps a"),
    "gap": (lambda: pack(TENSORS, edit=lambda h: shift(h, 8)) + b"\0" * 8, "b", "gap after a"),
    "gap at the front": (
        lambda: pack(TENSORS, edit=lambda h: shift(h, 8, "a")) + b"\0" * 8,
        "a",
        "gap",
    ),
    "empty tensor out of place": (entry("empty", data_offsets=[7, 7]), "empty", "overlaps"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_refuses(tmp_path: Path, case: str) -> None:
    make, tensor, says = FAULTS[case]
    path = write(tmp_path, make())
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path)
    error = caught.value
    assert error.field == (f"{path}:{tensor}" if tensor else str(path))
    assert says in error.message
    assert "m.safetensors" in error.message
    assert "\n" not in error.message


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "not a regular file")):
        with pytest.raises(WeightsError, match=says) as caught:
            SafetensorsFile(path)
        assert caught.value.field == str(path)


def test_strange_tensor_names_stay_on_one_line(tmp_path: Path) -> None:
    header = json.dumps({"a\nb": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(write(tmp_path, raw(header, b"0000")))
    assert "\n" not in caught.value.message


def test_survives_300_corruptions(tmp_path: Path) -> None:
    """A file reads or is a WeightsError, nothing else; what we read, the library reads too."""
    rng, good = random.Random(5), pack(TENSORS)
    read = refused = 0
    for i in range(300):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if i % 5 == 0:
            del data[rng.randrange(len(data)) :]
        path = write(tmp_path, bytes(data))
        try:
            file = SafetensorsFile(path)
        except WeightsError:
            refused += 1
            continue
        _ = [np.array(file.read(name)) for name in file.tensors]
        read += 1
        with safetensors.safe_open(path, "np") as theirs:
            assert set(theirs.keys()) == set(file.tensors)
    assert read > 20
    assert refused > 100
