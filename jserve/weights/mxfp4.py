"""Decodes experts in mxfp4, as GPT-OSS publishes them, one expert at a time.

32 numbers share a scale, a power of two, and two numbers lie in a byte, the first one in its low half::

    blocks u8 [E, N, D/32, 16]    scales u8 [E, N, D/32]    number = FP4[half of a byte] * 2^(scale - 127)

Every such number is one of bfloat16.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

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


@cache
def _pairs() -> np.ndarray:
    """uint32[256 * 256]: the bits of both numbers of a byte, by scale and byte."""
    values = np.array([*FP4, *(-x for x in FP4)])
    byte = np.arange(256)
    both = np.stack([values[byte & 15], values[byte >> 4]], axis=1)
    with np.errstate(over="ignore"):  # what exceeds bfloat16 becomes infinite, which a load refuses
        numbers = np.ldexp(both, (byte - BIAS)[:, None, None]).astype(ml_dtypes.bfloat16)
    return numbers.view(np.uint32).reshape(-1)
