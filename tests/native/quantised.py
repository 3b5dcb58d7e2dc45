"""Quantised weights for the kernels' own entry, and float64 of what they stand for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from jserve.native.library import KINDS, LEVELS, Library
from tests.native.direct import rounded

FOUR_BITS = {
    "int4": np.arange(16) - 8.0,
    "uint4": np.arange(16.0),
    "e2m1": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0]),
}
"""What four bits stand for."""


@dataclass
class Weights:
    """A quantised matrix [N, K]."""

    kind: str
    q: np.ndarray
    scale: np.ndarray
    """float32[N, groups]."""
    zero: np.ndarray | None = None
    shift: np.ndarray | None = None
    """float32[N, groups], of few bits like the scales beside them: weights are exact in float32."""

    @cached_property
    def numbers(self) -> np.ndarray:
        """float64[N, K]."""
        if self.kind in FOUR_BITS:
            blocks = self.q.reshape(len(self.q), -1, 16)
            halves = np.concatenate([blocks & 15, blocks >> 4], axis=2)
            return FOUR_BITS[self.kind][halves].reshape(len(self.q), -1)
        return self.q.astype(np.float64)

    @cached_property
    def wide(self) -> np.ndarray:
        """float64[N, K]: the weights."""
        N, groups = self.scale.shape
        q = self.numbers.reshape(N, groups, -1)
        zero = 0 if self.zero is None else self.zero[..., None].astype(np.float64)
        shift = 0 if self.shift is None else self.shift[..., None].astype(np.float64)
        wide = (q - zero) * self.scale[..., None].astype(np.float64) - shift
        return wide.reshape(N, -1)


def weights(kind: str, N: int, K: int, *, group: int = 0, off: str = "") -> Weights:
    """``off``: zeros, shifts, or neither."""
    rng = np.random.default_rng([N, K, group, len(off)])
    groups = K // group if group else 1
    power = 2.0 ** rng.integers(-3, 3, (N, groups))
    scale, zero, shift = (rng.random((N, groups), np.float32) + 0.5) * power, None, None
    if off == "zeros":
        zero = rng.integers(-8, 8, (N, groups)).astype(np.int8)
    if off == "shifts":
        scale = rng.integers(32, 96, (N, groups)) / 64 * power
        shift = (rng.integers(-400, 400, (N, groups)) / 16 * power).astype(np.float32)
    drawn: Any = rng.integers(0, 256, (N, K // 2 if kind in FOUR_BITS else K)).astype(np.uint8)
    if kind == "e4m3":
        drawn = np.where(drawn & 0x7F == 0x7F, 0, drawn).astype(np.uint8)
    dtypes: dict[str, Any] = dict.fromkeys(FOUR_BITS, np.uint8)
    dtypes["e4m3"] = ml_dtypes.float8_e4m3fn
    q = drawn.view(dtypes.get(kind, np.int8))
    return Weights(kind, q, scale.astype(np.float32), zero, shift)


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
    arrays = (x, w.q, w.scale, w.zero, w.shift)
    at = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in arrays]
    sizes = [ctypes.c_int64(n) for n in (M, N, K)]
    run, to = library.handle.jserve_run_quantised, ctypes.c_void_p(y.ctypes.data)
    kind, level_number = KINDS.index(w.kind), LEVELS.index(level)
    got = run(level_number, kind, *at, ctypes.c_int64(groups), to, *sizes, int(fused))
    assert got == 1
    return y
