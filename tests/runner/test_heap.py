"""Whether freed memory leaves the process."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from jserve.runner.heap import give_back

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
    give_back()
    try:
        assert resident_mib() < full - N * BLOCK / 2**20 / 2
    finally:
        libc.free(blocks[-1])
