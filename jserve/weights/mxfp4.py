"""Reads experts in mxfp4, as GPT-OSS publishes them, one expert at a time: decoded, or in the form of a QTensor.

32 numbers share a scale, a power of two, and two numbers lie in a byte, the first one in its low half::

    blocks u8 [E, N, D/32, 16]    scales u8 [E, N, D/32]    number = FP4[half of a byte] * 2^(scale - 127)

Every such number is one of bfloat16.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from jserve.model.quant import PACKED
from jserve.weights.quant.matrix import E2M1

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the three low bits; the fourth is the sign."""
BIAS = 127


class Mxfp4:
    """The numbers [E, N, D] of a tensor: ``x[e]`` is bfloat16 [N, D]; the newest expert is kept."""

    def __init__(self, blocks: np.ndarray, scales: np.ndarray) -> None:
        self._blocks, self._scales = blocks, scales
        self._newest: tuple[int, np.ndarray] | None = None

    def __getitem__(self, e: int) -> np.ndarray:
        if self._newest is None or self._newest[0] != e:
            self._newest = e, self._decoded(e)
        return self._newest[1]

    def _decoded(self, e: int) -> np.ndarray:
        at = self._scales[e][..., None].astype(np.uint16) * np.uint16(256) + self._blocks[e]
        pairs = _pairs().take(at)
        return pairs.view(ml_dtypes.bfloat16).reshape(len(pairs), -1)


class Mxfp4Numbers:
    """``x[e]``: the numbers of an expert as ``model.quant`` has them: uint8[N, D / 2] of e2m1, or int8[N, D], twice
    the numbers."""

    def __init__(self, blocks: np.ndarray, packed: bool) -> None:
        self._blocks, self._packed = blocks, packed
        self._newest: tuple[int, np.ndarray] | None = None

    def __getitem__(self, e: int) -> np.ndarray:
        if self._newest is None or self._newest[0] != e:
            self._newest = e, self._made(self._blocks[e])
        return self._newest[1]

    def _made(self, blocks: np.ndarray) -> np.ndarray:
        N, codes = len(blocks), np.stack([blocks & 15, blocks >> 4], axis=-1)
        if not self._packed:
            return E2M1[codes].reshape(N, -1)
        codes = codes.reshape(N, -1, 2, PACKED // 2)
        return (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(N, -1)


class Mxfp4Scales:
    """``x[e]``: float32[N, groups], what ``Mxfp4Numbers`` are multiplied by; repeated to ``groups``."""

    def __init__(self, scales: np.ndarray, groups: int) -> None:
        self._scales, self._repeats = scales, groups // scales.shape[-1]

    def __getitem__(self, e: int) -> np.ndarray:
        exponents = self._scales[e].astype(np.int32) - BIAS - 1
        return np.ldexp(np.float32(1), exponents).repeat(self._repeats, axis=-1)


@cache
def _pairs() -> np.ndarray:
    """uint32[256 * 256]: the bits of both numbers of a byte, by scale and byte."""
    values = np.array([*FP4, *(-x for x in FP4)])
    byte = np.arange(256)
    both = np.stack([values[byte & 15], values[byte >> 4]], axis=1)
    with np.errstate(over="ignore"):  # what exceeds bfloat16 becomes infinite, which a load refuses
        numbers = np.ldexp(both, (byte - BIAS)[:, None, None]).astype(ml_dtypes.bfloat16)
    return numbers.view(np.uint32).reshape(-1)
