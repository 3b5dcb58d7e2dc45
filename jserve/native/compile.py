"""Compiles the kernels: one C file, by a C compiler of this machine, into a library beside it.

It uses the standard library alone, so that a build hook can run it before anything is installed. The library carries
a hash of its sources, by which whoever loads it knows that it is current.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("ffi_abi.h", "kernels.c")
COMPILERS = ("gcc", "cc", "clang")
FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
TIMEOUT_S = 300


class NativeBuildError(Exception):
    """The library cannot be built; the message says why in one line."""


def source_hash() -> str:
    """16 hexadecimal digits that change with any of the sources."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """Where the library of this installation is, built or not."""
    return FOLDER / ("libjserve.dylib" if sys.platform == "darwin" else "libjserve.so")


def find_compiler() -> list[str] | None:
    """The command of a C compiler of this machine, None where there is none."""
    found = (shutil.which(name) for name in COMPILERS)
    return next(([path] for path in found if path), None)


def compile_library(out: Path, compiler: Sequence[str]) -> None:
    """Compile the kernels to ``out``, which appears whole or not at all.

    Args:
        compiler: a command that takes the arguments of gcc.

    Raises:
        NativeBuildError: the compiler cannot be run, or fails.
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / out.name
        sources = [str(FOLDER / name) for name in SOURCES if name.endswith(".c")]
        define = f'-DJSERVE_SOURCE_HASH="{source_hash()}"'
        _run([*compiler, *FLAGS, define, "-o", str(made), *sources, "-lm"])
        os.replace(made, out)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeBuildError(f"{command[0]} cannot be run: {e}") from e
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise NativeBuildError(f"{Path(command[0]).name} fails: {reason}")
