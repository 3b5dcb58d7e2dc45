"""The figures of starts, of lines and of a process."""

from __future__ import annotations

import mmap
import os

import psutil
import pytest

from bench.start import medians, pss_mib


def test_cold_and_warm_starts_are_apart():
    times = {"ready_s": 1.0, "cpu_s": 2.0, "beside_mib": 3.0}
    lines = [
        {"cold": n == 0, "first_token_s": float(s), **times} for n, s in enumerate((30, 4, 9, 5))
    ]
    found = medians(lines)
    assert found["cold"]["first_token_s"] == 30.0
    assert found["warm"]["first_token_s"] == 5.0
    assert set(medians(lines[:1])) == {"cold"}


def test_memory_is_of_the_process_and_shared_pages_count_in_part():
    resident = psutil.Process(os.getpid()).memory_info().rss / 2**20
    held = pss_mib(os.getpid())
    assert 0.3 * resident < held <= 1.1 * resident
    with mmap.mmap(
        -1, 64 << 20
    ) as kept:  # not of the heap, which an engine in this process may have made keep pages
        for start in range(0, len(kept), mmap.PAGESIZE):
            kept[start] = 1
        assert pss_mib(os.getpid()) - held == pytest.approx(len(kept) / 2**20, abs=8.0)
