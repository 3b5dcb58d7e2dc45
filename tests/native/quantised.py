"""Quantised weights for the kernels' own entry, and float64 of what they stand for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from jserve.native.library import LEVELS, Library
from tests.native.direct import rounded

KINDS = {"int8": 1, "int4": 2, "e4m3": 3, "rounded": 4}
"""The library's numbers of what weights are."""


@dataclass
class Weights:
    """A quantised matrix [N, K]."""

    kind: str
    q: np.ndarray
    scale: np.ndarray
    """float32[N, groups]."""
    zero: np.ndarray | None = None

    @cached_property
    def numbers(self) -> np.ndarray:
        """float64[N, K]."""
        if self.kind == "int4":
            blocks = self.q.reshape(len(self.q), -1, 16)
            halves = np.concatenate([blocks & 15, blocks >> 4], axis=2).astype(np.float64) - 8
            return halves.reshape(len(self.q), -1)
        return self.q.astype(np.float64)

    @cached_property
    def wide(self) -> np.ndarray:
        """float64[N, K]: the weights."""
        N, groups = self.scale.shape
        q = self.numbers.reshape(N, groups, -1)
        zero = 0 if self.zero is None else self.zero[..., None].astype(np.float64)
        return ((q - zero) * self.scale[..., None].astype(np.float64)).reshape(N, -1)


def weights(kind: str, N: int, K: int, *, group: int = 0, zeros: bool = False) -> Weights:
    rng = np.random.default_rng([N, K, group, int(zeros)])
    groups = K // group if group else 1
    scale = (rng.random((N, groups), np.float32) + 0.5) * 2.0 ** rng.integers(-3, 3, (N, groups))
    zero = rng.integers(-8, 8, (N, groups)).astype(np.int8) if zeros else None
    drawn: Any = rng.integers(0, 256, (N, K // 2 if kind == "int4" else K)).astype(np.uint8)
    if kind == "e4m3":
        drawn = np.where(drawn & 0x7F == 0x7F, 0, drawn).astype(np.uint8)
    dtypes = {"int4": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn}
    return Weights(kind, drawn.view(dtypes.get(kind, np.int8)), scale.astype(np.float32), zero)


def exact(x: np.ndarray, w: Weights, *, widened: bool = False) -> np.ndarray:
    """float64 result of x rounded to bfloat16, or to int8 by its row's scale; ``widened``: of weights that are rounded
    to bfloat16, too."""
    if w.kind != "rounded":
        return rounded(x) @ (rounded(w.wide.astype(np.float32)) if widened else w.wide).T
    most = np.abs(x).max(axis=1, keepdims=True)
    scale = np.where(most == 0, np.float32(1), most) * np.float32(1 / 127)
    sums = np.round(x / scale).astype(np.float64) @ w.numbers.T
    scaled = sums.astype(np.float32) * scale * w.scale[:, 0]
    assert scaled.dtype == np.float32
    return scaled


def silu(y: np.ndarray) -> np.ndarray:
    """Of the first half of the columns, times the second."""
    gate, up = np.split(y.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def multiply(
    library: Library, level: str, x: np.ndarray, w: Weights, *, fused: bool = False, out: Any = None
) -> np.ndarray:
    """The kernel's result; ``fused``: ``silu`` of it."""
    (M, K), N, groups = x.shape, len(w.q) // (2 if fused else 1), w.scale.shape[1]
    y = np.full((M, N), np.nan, np.float32) if out is None else out
    zero = None if w.zero is None else ctypes.c_void_p(w.zero.ctypes.data)
    at = [ctypes.c_void_p(a.ctypes.data) for a in (x, w.q, w.scale)]
    sizes = [ctypes.c_int64(n) for n in (M, N, K)]
    run, to = library.handle.jserve_run_quantised, ctypes.c_void_p(y.ctypes.data)
    kind, level_number = KINDS[w.kind], LEVELS.index(level)
    got = run(level_number, kind, *at, zero, ctypes.c_int64(groups), to, *sizes, int(fused))
    assert got == 1
    return y
