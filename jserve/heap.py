"""Sets the C library's heap as steps on a CPU need it, and gives freed memory back to the system.

XLA allocates the scratch memory of a program in every run. glibc maps what is large and unmaps it when it is freed, so
each step would have a page fault for every page of logits and the like that it touches: half the time of a step of a
small model over eight rows. tcmalloc and jemalloc, which other servers on CPUs are run with, keep freed memory, too.

Threads keep heaps of their own, which hold 64 MiB each: one for all, without that bound, was slower (its lock).
A variable of the environment that sets the heap wins, and a C library without ``mallopt`` is left alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of ``mallopt`` (malloc.h)."""
_MANY = 65536
"""Mapped allocations at most, as glibc starts."""


def map_large(environ: Mapping[str, str] = os.environ) -> None:
    """Map large blocks apart until ``keep_freed``, as glibc starts: weights are given back when they are freed."""
    _set(environ, {_MMAP_MAX: _MANY})


def keep_freed(environ: Mapping[str, str] = os.environ) -> None:
    """From here on what is freed is kept for the next allocation, up to 2 GiB of it, until ``give_back``."""
    _set(environ, {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1})


def give_back() -> None:
    """Give what is freed back to the system; compiling and tracing alone leave hundreds of megabytes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(environ: Mapping[str, str], values: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environ):
        return
    for parameter, value in values.items():
        mallopt(parameter, value)
