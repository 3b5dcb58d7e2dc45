"""The blocks of quantised GGUF tensors as numbers, scales and shifts.

A row is blocks end to end. ``d`` and ``m`` are float16; of 32 numbers in 16 bytes, byte j holds number j in its low
half and number 16 + j in its high one::

    Q4_0  d, 16 bytes          (q - 8) d            Q4_1  d, m, 16 bytes             q d + m
    Q5_0  d, 32 bits, 16 bytes (q - 16) d           Q5_1  d, m, 32 bits, 16 bytes    q d + m
    Q8_0  d, 32 int8           q d                  the bits are the fifth of each number

    Q4_K  d, m, 12 bytes of scales, 128 bytes               q (d s) - m t     of 8 groups of 32
    Q5_K  d, m, 12 bytes of scales, 32 of fifth bits, 128
    Q6_K  128 bytes, 64 of upper bits, 16 int8 scales, d    (q - 32) (d s)    of 16 groups of 16

Every product of float32 here is exact, so the numbers are the ones that ggml computes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jserve.gguf.types import QUANTISED
from jserve.weights.quant.matrix import Matrix

Blocks = np.ndarray
"""uint8[blocks, bytes of a block]."""
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""q int8[blocks, numbers], scale float32[blocks, groups], shift alike or None."""


def decoded(kind: str, rows: np.ndarray) -> Matrix:
    """The matrix of uint8[N, bytes of a row]."""
    N = len(rows)
    q, scale, shift = DECODERS[kind](np.ascontiguousarray(rows).reshape(-1, QUANTISED[kind][2]))
    return Matrix(
        q=q.reshape(N, -1),
        scale=scale.reshape(N, -1),
        shift=None if shift is None else shift.reshape(N, -1),
    )


def _halves(blocks: Blocks, at: int) -> np.ndarray:
    """float32[blocks, 1] of a float16 at this byte."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(bytes_: np.ndarray) -> np.ndarray:
    """int8[..., 2 n]: low halves, then high ones."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1).astype(np.int8)


def _fifth(blocks: Blocks, at: int) -> np.ndarray:
    """int8[blocks, 32]: 16 where the bit of a number is set."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return (bits << 4).astype(np.int8)


def _q4_0(blocks: Blocks) -> Parts:
    return _nibbles(blocks[:, 2:]) - np.int8(8), _halves(blocks, 0), None


def _q4_1(blocks: Blocks) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), -_halves(blocks, 2)


def _q5_0(blocks: Blocks) -> Parts:
    return (_nibbles(blocks[:, 6:]) | _fifth(blocks, 2)) - np.int8(16), _halves(blocks, 0), None


def _q5_1(blocks: Blocks) -> Parts:
    q = _nibbles(blocks[:, 8:]) | _fifth(blocks, 4)
    return q, _halves(blocks, 0), -_halves(blocks, 2)


def _q8_0(blocks: Blocks) -> Parts:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _scales(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """float32[blocks, 8]: scales and shifts of groups, six bits of each in the 12 bytes behind d and m."""
    s = blocks[:, 4:16]
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    shift = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return _halves(blocks, 0) * scale, _halves(blocks, 2) * shift


def _q4_k(blocks: Blocks) -> Parts:
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return q.reshape(-1, 256), *_scales(blocks)


def _q5_k(blocks: Blocks) -> Parts:
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (q | (bits << 4).astype(np.int8)).reshape(-1, 256), *_scales(blocks)


def _q6_k(blocks: Blocks) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    upper = high >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    q = (low | (upper << 4).astype(np.int8)) - np.int8(32)
    scale = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return q.reshape(-1, 256), scale.astype(np.float32), None


DECODERS: dict[str, Callable[[Blocks], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
