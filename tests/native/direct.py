"""Products by the library's own entry, without XLA, beside float64, and memory that ends where a page does."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np

from jserve.native.library import LEVELS, Library

_LIBC = ctypes.CDLL(None)


def rounded(x: np.ndarray) -> np.ndarray:
    """float64 of what bfloat16 keeps."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def operands(M: int, N: int, K: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x float32[M, K], w bfloat16[N, K]."""
    rng = np.random.default_rng([seed, M, N, K])
    return (
        rng.standard_normal((M, K), np.float32),
        rng.standard_normal((N, K), np.float32).astype(ml_dtypes.bfloat16),
    )


def exact(x: np.ndarray, w: np.ndarray, *, fused: bool = False) -> np.ndarray:
    """float64 result of the rounded operands."""
    y = rounded(x) @ w.astype(np.float64).T
    if not fused:
        return y
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def multiply(
    library: Library,
    level: str,
    x: np.ndarray,
    w: np.ndarray,
    *,
    fused: bool = False,
    out: Any = None,
) -> np.ndarray:
    """The kernel's result; ``fused``: silu of the first half of w's rows times the second."""
    (M, K), N = x.shape, w.shape[0] // (2 if fused else 1)
    y = np.full((M, N), np.nan, np.float32) if out is None else out
    at = [ctypes.c_void_p(a.ctypes.data) for a in (x, w, y)]
    sizes = [ctypes.c_int64(n) for n in (M, N, K)]
    run = library.handle.jserve_run_product
    assert run(LEVELS.index(level), *at, *sizes, int(fused)) == 1
    return y


class Guarded:
    """Arrays whose last byte is the last of a page, with a page after it that may not be touched."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def like(self, x: np.ndarray) -> np.ndarray:
        size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        self._maps.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        none = 0
        assert _LIBC.mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, none) == 0
        made = np.frombuffer(memory, np.uint8, x.nbytes, size - x.nbytes).view(x.dtype)
        made = made.reshape(x.shape)
        made[...] = x
        return made
