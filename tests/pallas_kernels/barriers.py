"""Announced arrivals of barriers in compiled kernels.

The interpreter fails where arrivals are fewer or more than a barrier announces (``test_barriers`` plants both), but it
counts warpgroups, and it runs tiles, not PTX. Two things connect it to what is compiled: kernels of the table are
interpreted with the numbers of arrivals that they are compiled with, and in the PTX a barrier waits for 128 threads an
arrival, and whole warpgroups arrive.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.launch import plgpu

THREADS = 128
"""Of a warpgroup, each of which arrives."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it was traced: the warpgroups of a block, and its scratch."""

    warpgroups: int
    scratch: Mapping[str, Any]


@contextlib.contextmanager
def launched() -> Iterator[list[Launch]]:
    """Collect the kernels that are traced meanwhile, in order."""
    found: list[Launch] = []
    original = plgpu.kernel

    def kernel(*args: Any, **options: Any) -> Any:
        found.append(Launch(options.get("num_threads") or 1, options.get("scratch_types") or {}))
        return original(*args, **options)

    plgpu.kernel = kernel
    try:
        yield found
    finally:
        plgpu.kernel = original


def announced(scratch: Mapping[str, Any]) -> Counter[int]:
    """Arrivals -> barriers that announce so many."""
    found: Counter[int] = Counter()
    for one in scratch.values():
        if isinstance(one, plgpu.Barrier):
            found[one.num_arrivals] += math.prod(np.atleast_1d(one.num_barriers))
    return found


def check_barriers(ptx: str, scratch: Mapping[str, Any]) -> None:
    """Every barrier of ``scratch`` is set up for all threads of the arrivals that it announces, and every arrival of
    the code is one of a whole warpgroup, each thread once. Where there is no barrier nothing arrives."""
    numbers = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    set_up = re.findall(r"mbarrier\.init\.shared\S* \[%\w+\], (%?\w+);", ptx)
    found = Counter(int(numbers.get(count, count)) for count in set_up)
    assert found == {THREADS * n: times for n, times in announced(scratch).items()}
    arrivals = [line.strip() for line in ptx.splitlines() if "mbarrier.arrive" in line]
    assert bool(arrivals) == bool(found)
    for line in arrivals:
        assert line.startswith("mbarrier.arrive."), f"not by all threads of a warpgroup: {line}"
        if "expect_tx" not in line:
            assert line.endswith("], 1;"), f"not one arrival a thread: {line}"
