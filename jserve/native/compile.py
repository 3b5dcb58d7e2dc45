"""Compiles the kernels: one C file, by a C compiler of this machine, into a library beside it.

It uses the standard library alone, so that a build hook can run it before anything is installed. The library carries
a hash of its sources, by which whoever loads it knows that it is current.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform as platform_module
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = (
    "amx.h",
    "amx_attention.h",
    "ffi_abi.h",
    "grouped.h",
    "kernels.c",
    "neon.h",
    "quantised.h",
)
COMPILERS = ("gcc", "cc", "clang")
FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
TIMEOUT_S = 300
ZIG = "0.17.1"
"""Version of the package ziglang that compiles where a machine has no compiler, and for other machines."""
ZIG_TARGETS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
}
"""The targets of zig, by the name of the platform in a wheel's."""

NOT_ON_WINDOWS = "there are none for Windows"
"""They wait for one another by pthreads and sched_yield, and nobody has run them there."""


class NativeBuildError(Exception):
    """The library cannot be built; the message says why in one line."""


def source_hash() -> str:
    """16 hexadecimal digits that change with any of the sources."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """The path of this installation's library, built or not."""
    return FOLDER / library_name("macosx" if sys.platform == "darwin" else sys.platform)


def library_name(platform: str) -> str:
    """Of the library for a platform, as wheels call it."""
    return "libjserve.dylib" if platform.startswith("macosx") else "libjserve.so"


def find_compiler(cc: str = "") -> list[str] | None:
    """The command of a C compiler: ``cc`` (what the user has in $CC), one of this machine, or zig from PyPI where
    that is installed. None: there is none."""
    if cc:
        return shlex.split(cc)
    found = (shutil.which(name) for name in COMPILERS)
    command = next(([path] for path in found if path), None)
    own = zig_platform()
    if command is None and own and importlib.util.find_spec("ziglang"):
        return zig(own)
    return command


def zig(platform: str) -> list[str]:
    """The command of zig as a compiler for a platform of ``ZIG_TARGETS``.

    Raises:
        NativeBuildError: it is none of them.
    """
    if platform not in ZIG_TARGETS:
        raise NativeBuildError(f"{platform!r} is none of {', '.join(ZIG_TARGETS)}")
    return [sys.executable, "-m", "ziglang", "cc", "-target", ZIG_TARGETS[platform]]


def zig_platform() -> str:
    """The one of ``ZIG_TARGETS`` that is this machine; empty: none."""
    system, machine = platform_module.system(), platform_module.machine()
    ends = {"Linux": "manylinux_2_17_", "Darwin": "macosx_"}
    begin = ends.get(system, "none")
    names = (x for x in ZIG_TARGETS if x.startswith(begin) and x.endswith(f"_{machine}"))
    return next(names, "")


def platform_of(compiler: Sequence[str]) -> str:
    """The platform of what a command of ``find_compiler`` or ``zig`` makes, as wheels call it."""
    made = (name for name, target in ZIG_TARGETS.items() if target in compiler)
    own = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return next(made, own)


def compile_library(out: Path, compiler: Sequence[str]) -> None:
    """Compile the kernels to ``out``, which appears whole or not at all.

    Args:
        compiler: a command that takes the arguments of gcc.

    Raises:
        NativeBuildError: this is Windows, or the compiler cannot be run, or fails.
    """
    if sys.platform == "win32":
        raise NativeBuildError(NOT_ON_WINDOWS)
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
