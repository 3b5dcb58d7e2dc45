"""The kernels of 64-bit Arm in an emulator, in place of those of this machine.

This is a plugin, with which the tests of kernels in this folder are tests of these::

    python -m pytest -n0 -p tests.native.emulated tests/native/test_products.py

It needs qemu, which Debian has in the package qemu-user-static and JSERVE_QEMU_AARCH64 may name, and a compiler:
ziglang, or the one that JSERVE_CC_AARCH64 names. JSERVE_EMULATED names a program that is built already. All calls go
through the kernels' handlers (``emulated.c``).
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from jserve.native import compile as build, library
from jserve.native.library import Library

LEVELS = library.LEVELS_OF["aarch64"]
SOURCE = Path(__file__).parent / "emulated.c"
ZIG_CC = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
OPTIONS = ("-std=gnu11", "-O2", "-static", "-pthread")
TIMEOUT_S = 900
"""Of a compile; the first one by zig makes a C library as well."""
TYPES = {
    np.dtype(np.int8): 2,
    np.dtype(np.int32): 4,
    np.dtype(np.int64): 5,
    np.dtype(np.uint8): 6,
    np.dtype(np.uint16): 7,
    np.dtype(np.float32): 11,
    np.dtype(ml_dtypes.bfloat16): 16,
    np.dtype(ml_dtypes.float8_e4m3fn): 20,
}
"""XLA's numbers of them (``ffi_abi.h``)."""


def qemu() -> str:
    """The emulator; empty: there is none."""
    return os.environ.get("JSERVE_QEMU_AARCH64") or shutil.which("qemu-aarch64-static") or ""


def compiler() -> list[str]:
    """The command of a compiler; empty: there is none."""
    named = os.environ.get("JSERVE_CC_AARCH64")
    if named:
        return shlex.split(named)
    return ZIG_CC if importlib.util.find_spec("ziglang") else []


def missing() -> str:
    """Why nothing can be emulated; empty: all is there."""
    if not compiler():
        return "ziglang is not installed"
    return "" if qemu() else "there is no qemu-aarch64-static"


def built(folder: Path) -> Path:
    """The program of ``emulated.c`` and of the kernels' sources."""
    program = folder / "emulated"
    command = [*compiler(), *OPTIONS, f"-I{build.FOLDER}", "-o", str(program), str(SOURCE), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return program


class Result(NamedTuple):
    """What a kernel returns."""

    shape: tuple[int, ...]
    dtype: Any
    same_as: int = -1
    """The argument whose memory it has."""


class Emulated:
    """A process that makes calls, begun anew where one has ended it. It stands for a loaded library.

    Args:
        processor: the one to be emulated, as qemu calls it; "max": one with all that qemu knows.
    """

    def __init__(self, program: Path, processor: str = "max") -> None:
        self._command = [qemu(), "-cpu", processor, str(program)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        [best] = struct.unpack("<q", self._read(8))
        self.checked = struct.unpack(f"<{best + 1}q", self._read(8 * (best + 1)))
        self.level = LEVELS[best]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self, n: int) -> bytes:
        assert self._process.stdout is not None
        got = self._process.stdout.read(n)
        if len(got) < n:
            status = self._process.wait()
            self._start()
            raise AssertionError(f"the emulated kernels have ended with status {status}")
        return got

    def call(
        self, name: str, args: Sequence[Any], results: Sequence[Result], attributes: dict[str, Any]
    ) -> list[np.ndarray]:
        """What the handler ``name`` gives for these."""
        head = struct.pack("<64s3q", name.encode(), len(args), len(results), len(attributes))
        parts = [head]
        for x in (np.ascontiguousarray(x) for x in args):
            parts += [_array(Result(x.shape, x.dtype)), x.tobytes()]
        parts += [_array(result) for result in results]
        for key, value in attributes.items():
            scalar = np.asarray(value)
            data = scalar.tobytes().ljust(8, b"\0")
            parts.append(struct.pack("<64sq", key.encode(), TYPES[scalar.dtype]) + data)
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(parts))
        self._process.stdin.flush()
        [said] = struct.unpack("<q", self._read(8))
        if said:
            raise RuntimeError(self._read(said).decode())
        return [_read_array(self._read, result) for result in results]

    def jserve_run_product(self, level: int, *rest: Any) -> int:
        """As the library's."""
        x, w, y, M, N, K, fused = (getattr(a, "value", a) for a in rest)
        args = _at(x, (M, K), np.float32), _at(w, (N * (2 if fused else 1), K), ml_dtypes.bfloat16)
        name = "jserve_gate_up" if fused else "jserve_product"
        [got] = self.call(name, args, [Result((M, N), np.float32)], {"level": np.int64(level)})
        ctypes.memmove(y, got.ctypes.data, got.nbytes)
        return 1

    def jserve_run_quantised(self, level: int, kind: int, *rest: Any) -> int:
        """As the library's."""
        x, q, scale, zero, shift, groups, y, M, N, K, fused = (getattr(a, "value", a) for a in rest)
        rows = N * (2 if fused else 1)
        half = library.KINDS[kind] in ("int4", "uint4", "e2m1")
        e4m3 = library.KINDS[kind] == "e4m3"
        dtype = np.uint8 if half else ml_dtypes.float8_e4m3fn if e4m3 else np.int8
        args = [
            _at(x, (M, K), np.float32),
            _at(q, (rows, K // 2 if half else K), dtype),
            _at(scale, (rows, groups), np.float32),
        ]
        args += [] if zero is None else [_at(zero, (rows, groups), np.int8)]
        args += [] if shift is None else [_at(shift, (rows, groups), np.float32)]
        name = "jserve_quantised_gate_up" if fused else "jserve_quantised_product"
        attributes = {"level": np.int64(level), "kind": np.int64(kind)}
        [got] = self.call(name, args, [Result((M, N), np.float32)], attributes)
        ctypes.memmove(y, got.ctypes.data, got.nbytes)
        return 1


def _array(of: Result) -> bytes:
    dtype = np.dtype(of.dtype)
    rank = len(of.shape)
    return struct.pack(f"<{4 + rank}q", TYPES[dtype], dtype.itemsize, of.same_as, rank, *of.shape)


def _read_array(read: Any, of: Result) -> np.ndarray:
    dtype = np.dtype(of.dtype)
    data = read(int(np.prod(of.shape)) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(of.shape)


def _at(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    data = ctypes.string_at(address, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


@cache
def _of_this_process() -> Library:
    """The kernels in ``compile.FOLDER``."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    made: Any = Emulated(Path(os.environ.get("JSERVE_EMULATED") or built(Path(folder.name))))
    atexit.register(made.end)
    return Library(made, made.level)


def _ffi_call(
    name: str, results: Any, *, input_output_aliases: dict[int, int] | None = None
) -> Callable[..., Any]:
    """In place of ``jax.ffi.ffi_call``."""
    import jax

    of = {out: n for n, out in (input_output_aliases or {}).items()}
    shapes = results if isinstance(results, list) else [results]
    wanted = [Result(x.shape, np.dtype(x.dtype), of.get(i, -1)) for i, x in enumerate(shapes)]

    def call(*args: Any, **attributes: Any) -> Any:
        def emulate(*args: Any) -> Any:
            handler: Any = _of_this_process().handle
            return handler.call(library.HANDLERS[name], args, wanted, attributes)

        def named(*args: Any) -> Any:
            return jax.pure_callback(emulate, shapes, *args)

        named.__name__ = name  # what the text of a program has
        got = jax.jit(named)(*args)
        return got if isinstance(results, list) else got[0]

    return call


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before a test, or what it tests, can be imported: of a run with this plugin alone."""
    library.LEVELS = LEVELS
    library.installed = _of_this_process
    import jax.ffi

    from jserve.model import native

    jax.ffi.ffi_call = _ffi_call
    native._register = lambda: None  # type: ignore[assignment]
