"""Puts the arrays that every step reads on huge pages of the host's memory.

A processor finds memory through tables with an entry for every 4 KiB, and each entry that it has to look up stops the
stream of weights or KV for a while; in a virtual machine for longer, since there are two tables. Linux gives pages of
2 MiB, one entry each, to memory that asks for them (its usual setting, ``madvise``; see Documentation/admin-guide/mm/
transhuge.rst of its source). Where a system has none, all stays as it is::

    arrays    |  a  |    b    |      | c |
    regions   |--- 2 MiB ---|--- 2 MiB ---|     whole ones that touch an array: neighbours may lie on them too
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

REGION = 2 << 20
"""Bytes of a huge page, on x86-64 and on arm64 with pages of 4 KiB."""
LEAST = 256 << 10
"""Bytes of an array for which its regions are worth asking."""
_ADVISE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE, and MADV_COLLAPSE, which moves at once what is there already (Linux 6.1)."""


class HugePages:
    """Moves arrays to huge pages in a thread of its own: a second for each GiB, beside what else a start does.

    Args:
        tree: jax arrays that will not be freed soon; those that are not on a CPU stay as they are.
    """

    def __init__(self, tree: Any) -> None:
        self._n_bytes = 0
        self._thread = threading.Thread(target=self._move, args=(tree,), name="huge-pages")
        self._thread.start()

    def wait(self) -> int:
        """Bytes of the arrays' regions that are on huge pages; 0 where the system has none or moves nothing at once."""
        self._thread.join()
        return self._n_bytes

    def _move(self, tree: Any) -> None:
        self._n_bytes = use_huge_pages(tree)


def use_huge_pages(tree: Any) -> int:
    """Move the arrays of ``tree`` to huge pages, in place: addresses and values stay, also for readers meanwhile.

    Returns:
        As ``HugePages.wait``.
    """
    if sys.platform != "linux":
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum([_moved(advise, *run) for run in regions(_spans(tree))])


def _moved(advise: Callable[..., int], begin: int, end: int) -> int:
    advise(begin, end - begin, _ADVISE)
    if advise(begin, end - begin, _COLLAPSE) == 0:
        return end - begin
    # Some regions cannot be moved, as the ends of a run that are not all mapped: which, only single calls tell.
    return REGION * sum(advise(at, REGION, _COLLAPSE) == 0 for at in range(begin, end, REGION))


def regions(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs (begin, end) of whole regions, ascending, that hold all ``spans`` (begin, end) of addresses."""
    runs: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        begin, end = begin // REGION * REGION, -(-end // REGION) * REGION
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((begin, end))
    return runs


def _spans(tree: Any) -> Iterator[tuple[int, int]]:
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            if shard.device.platform == "cpu" and shard.data.nbytes >= LEAST:
                begin = shard.data.unsafe_buffer_pointer()
                yield begin, begin + shard.data.nbytes
