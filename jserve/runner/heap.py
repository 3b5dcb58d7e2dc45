"""Gives the memory that starting needed back to the system."""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """Compiling and tracing leave hundreds of megabytes freed but resident, which glibc keeps unless asked; where the
    C library has no ``malloc_trim``, nothing happens."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
