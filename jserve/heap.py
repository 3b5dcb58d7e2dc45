"""Sets the C library's heap as steps on a CPU need it, and gives freed memory back to the system.

XLA allocates the scratch memory of a program in every run. glibc maps what is large and unmaps it when it is freed, so
each step would have a page fault for every page of logits and the like that it touches: a third of the time of a step
of a small model. tcmalloc and jemalloc, which other servers on CPUs are run with, keep freed memory, too.

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


def keep_freed(environ: Mapping[str, str] = os.environ) -> None:
    """From here on what this process frees is kept for its next allocation, up to 2 GiB of it, until ``trim``. What was
    mapped before, as the weights of a first engine are, is given back when it is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environ):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def trim() -> None:
    """Give what is freed back to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def collect_and_trim() -> None:
    """``trim`` after a garbage collection: compiling and tracing leave hundreds of megabytes."""
    gc.collect()
    trim()
