"""What all tests share: eight CPU devices, set before jax is first imported, compiled programs, and limits on what
a worker keeps.

Compiled programs lie in pytest's cache: a worker, or an engine in a process of its own, reads what another compiled.

A compiled program takes some hundred memory maps, and Linux gives a process 65,530 of them: one that asks for more is
aborted in the compiler. Tests of one worker keep runners in caches for one another, so these are emptied when
the maps run short, and between modules when the worker is large.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import mmap
import os
import platform
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests import programs

XLA_FLAGS = {
    "xla_force_host_platform_device_count": "8",
    "xla_backend_optimization_level": "0",
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""What a test process says to XLA, where its environment says nothing else. All of XLA's own passes
run, so the programs are those of a server. Only the machine code differs, made in a third of the time: at
LLVM's level 0, in one piece since a worker has one core, and without MLIR (below). ``.ci/run`` has the
tests of the model and the runner once more with the code of a server."""
if importlib.metadata.version("jaxlib").startswith("0.10."):  # others abort: they do not know it
    XLA_FLAGS["xla_cpu_use_fusion_emitters"] = "false"
PROGRAMS = "jserve-programs"
"""The directory under pytest's cache where processes leave compiled programs for one another."""
MOST_PROGRAMS_MIB = 1024
HEAVY = ("whole", "runner", "model", "kv")
"""Directories of tests that compile step programs."""

MOST_MAPS, MOST_MAPS_WITHIN = 28_000, 35_000
"""Between modules, and between two tests of one. The largest test adds 17,000."""
LOOKS_S = 2.0
"""A worker is looked at no sooner than this after the last look, but between modules: to count its maps takes longer
than most tests."""
MOST_MIB = 1600
"""Resident memory between tests: above it, what was freed goes back to the system, and between modules
the caches go too."""
GC_THRESHOLD = (20_000, 20, 20)
"""Tracing makes objects by the hundred thousand, and few of them are garbage in cycles."""
_MAPS, _STATM = Path("/proc/self/maps"), Path("/proc/self/statm")
_looked = [0.0]
"""When this worker was last looked at."""


def _set_xla_flags() -> None:
    said = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={value}" for name, value in XLA_FLAGS.items() if name not in said]
    os.environ["XLA_FLAGS"] = " ".join([said, *ours]).strip()


_set_xla_flags()


def pytest_configure(config: pytest.Config) -> None:
    """The first process names the directory; workers and engines inherit its environment."""
    gc.disable()  # until all is imported and collected: nothing of that is ever garbage
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or not hasattr(config, "cache"):
        return
    directory = str(programs_directory(config.cache.mkdir(PROGRAMS)))
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": directory,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if "jax" in sys.modules:  # a conftest.py below, of a path on the command line, came first
        options = sys.modules["jax"].config
        options.update("jax_compilation_cache_dir", directory)
        options.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        options.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles most begins, so that no worker is left with it at the end. Of the cases of a test that is marked
    ``one_in(n)``, about one in n and at least the first stay in the default tier; the others are slow."""
    begun: set[tuple[Path, str]] = set()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            test = item.path, getattr(item, "originalname", item.name)
            if test in begun and zlib.crc32(item.name.encode()) % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            elif item.get_closest_marker("slow") is None:
                begun.add(test)
    items.sort(key=lambda item: item.path.parent.name not in HEAVY)


def pytest_collection_finish() -> None:
    """Modules and tests are looked through no more: that took an eighth of the time."""
    gc.enable()
    if "hypothesis" in sys.modules:  # it asks once, when imported, who holds trio's dice
        gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


def programs_directory(root: Path) -> Path:
    """The one of this jaxlib on this kind of processor. All others go, and this one when it is too
    large, so that what old code compiled does not pile up."""
    found = root / f"{importlib.metadata.version('jaxlib')}-{_processor()}"
    for other in root.iterdir():
        if other != found or _mib(other) > MOST_PROGRAMS_MIB:
            shutil.rmtree(other, ignore_errors=True)
    found.mkdir(exist_ok=True)
    return found


def _processor() -> str:
    """Programs have instructions that another processor may lack."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    told = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    return hashlib.sha256("".join(told).encode()).hexdigest()[:8]


def _mib(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.rglob("*")) / 2**20


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    programs.begin(item.fixturenames)


def pytest_runtest_teardown(item: Any, nextitem: Any) -> None:
    if "jax" not in sys.modules or not _MAPS.exists():
        return
    within = nextitem is not None and nextitem.path == item.path
    if within and time.monotonic() - _looked[0] < LOOKS_S:
        return
    _looked[0] = time.monotonic()
    if _too_large():
        _trim()
    n_maps = _MAPS.read_bytes().count(b"\n")
    if n_maps > (MOST_MAPS_WITHIN if within else MOST_MAPS) or (not within and _too_large()):
        let_go()


def let_go() -> None:
    """Empty every cache of the tests' own, and jax's."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("tests", "sched_drive") or name.startswith("test_"):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()
    sys.modules["jax"].clear_caches()
    gc.collect()
    _trim()


def _too_large() -> bool:
    return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE > MOST_MIB * 2**20


def _trim() -> None:
    """Half of what a worker holds is memory that the compiler's threads freed and glibc keeps for them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
