"""Whether freed memory stays in the process while steps run, and leaves it when asked."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jserve.heap import trim

STATM = Path("/proc/self/statm")
BLOCK, N = 32 << 10, 4096
"""Bytes of a block, below what malloc maps on its own, and how many."""


def resident_mib() -> float:
    return int(STATM.read_text().split()[1]) * 4096 / 2**20


def test_freed_blocks_between_live_ones_are_given_back():
    libc = ctypes.CDLL(None)
    if not STATM.exists() or not hasattr(libc, "malloc_trim"):
        pytest.skip("no glibc")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(N)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    full = resident_mib()
    for block in blocks[:-1]:
        libc.free(block)
    trim()
    try:
        assert resident_mib() < full - N * BLOCK / 2**20 / 2
    finally:
        libc.free(blocks[-1])


FAULTS = """
import ctypes, resource, sys
from jserve.heap import keep_freed

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_freed()

def use(n_bytes):
    block = libc.malloc(n_bytes)
    ctypes.memset(block, 1, n_bytes)
    libc.free(block)

def runs():
    use(160 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        use(96 << 20)
        use(160 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

runs()
"""


def faults(how: str, **environ: str) -> int:
    """Page faults of large blocks that are allocated again and again; how many 4 KiB or 2 MiB each depends on the
    system."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("no glibc")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | environ
    command = [sys.executable, "-c", FAULTS, how]
    found = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return int(found.stdout)


def test_large_blocks_that_are_kept_cost_no_page_faults():
    assert faults("keep") * 10 < faults("map")


def test_the_environment_wins():
    assert faults("keep") * 10 < faults("keep", MALLOC_MMAP_THRESHOLD_="1000000")
