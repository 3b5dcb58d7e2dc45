"""The compiled kernels for these tests: those of the installation, or a library built for this run.

XLA takes a kernel's name once in a process, so all tests of one share a library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jserve.model import native
from jserve.native import library
from jserve.native.compile import NativeBuildError, compile_library, find_compiler
from jserve.native.library import LEVELS, Library, NoLibrary
from tests.whole.conftest import tiny_dir

__all__ = ["tiny_dir"]

CPUINFO = Path("/proc/cpuinfo")
FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512f": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
    "neon": {"asimd"},
    "neon_bf16": {"asimddp", "bf16"},
}


def level_of_processor() -> str:
    """The level that the system's list of features means; skips where there is no such list."""
    if not CPUINFO.exists():
        pytest.skip("no /proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", CPUINFO.read_text(), re.M)
    flags, level = set(found[1].split()) if found else set(), "plain"
    for name in LEVELS[1:]:
        if not FLAGS[name] <= flags:
            break
        level = name
    return level


TILE_RELEASE = bytes.fromhex("c4e27849c0")
"""The instruction that ends every use of tile registers."""


def level_of(path: Path) -> str:
    """The level at which the library in ``path`` is to run here: of a compiler too old for tiles one that leaves most
    products to XLA's. Skips as ``level_of_processor``."""
    level = level_of_processor()
    return "avx512f" if level == "amx" and TILE_RELEASE not in path.read_bytes() else level


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Skips where there is no compiler."""
    try:
        found = library.installed()
    except NoLibrary:
        found = library.load(built(tmp_path_factory.mktemp("native")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "installed", lambda: found)
        yield found


def built(folder: Path, *options: str) -> Path:
    """A library made of the sources, with more ``options`` for the compiler; skips where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    path = folder / "libjserve.so"
    try:
        compile_library(path, [*compiler, *options])
    except NativeBuildError as e:
        pytest.fail(f"{compiler} cannot build the kernels: {e}")
    return path


@pytest.fixture(scope="session")
def level(kernels: Library) -> str:
    """The best level of this machine, known to XLA; skips where products stay XLA's."""
    level, reason = native.available("cpu", "bfloat16")
    if not native.MOST_ROWS[kernels.level]:
        pytest.skip(reason)
    assert level == kernels.level, reason
    return level
