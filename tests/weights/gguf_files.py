"""GGUF files, put together byte by byte as the format's description says.

Independent of jserve's readers: a block is packed one number after the other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
Packed = tuple[np.ndarray, np.ndarray]
"""(uint8[blocks, bytes], float32[blocks, numbers])."""


def halves(rng: np.random.Generator, n: int) -> np.ndarray:
    """float16[n]: scales, some of them negative, as Q4_0 has them."""
    return (rng.uniform(0.002, 0.02, n) * rng.choice([-1, 1], n)).astype(np.float16)


def bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)


def simple(bits: int, signed: bool) -> Callable[[np.random.Generator, int], Packed]:
    """Blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1."""

    def pack(rng: np.random.Generator, n: int) -> Packed:
        q, d, m = rng.integers(0, 2**bits, (n, 32)), halves(rng, n), halves(rng, n)
        low, fifth = np.zeros((n, 16), np.uint8), np.zeros(n, np.uint32)
        for i in range(32):
            low[:, i % 16] |= ((q[:, i] & 15) << (4 if i >= 16 else 0)).astype(np.uint8)
            fifth |= ((q[:, i] >> 4) << i).astype(np.uint32)
        parts = [bytes_of(d)] + ([] if signed else [bytes_of(m)])
        parts += [bytes_of(fifth)] if bits == 5 else []
        wide = d.astype(np.float32)[:, None] * (q - 2 ** (bits - 1) * signed).astype(np.float32)
        wide = wide if signed else wide + m.astype(np.float32)[:, None]
        return np.concatenate([*parts, low], axis=1), wide

    return pack


def q8_0(rng: np.random.Generator, n: int) -> Packed:
    q, d = rng.integers(-128, 128, (n, 32)).astype(np.int8), halves(rng, n)
    wide = d.astype(np.float32)[:, None] * q.astype(np.float32)
    return np.concatenate([bytes_of(d), bytes_of(q)], axis=1), wide


def six_bits(scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """uint8[n, 12]: eight scales and eight shifts of six bits."""
    made = np.zeros((len(scale), 12), np.uint8)
    for j in range(8):
        if j < 4:
            made[:, j] |= scale[:, j].astype(np.uint8)
            made[:, j + 4] |= shift[:, j].astype(np.uint8)
        else:
            made[:, j + 4] = ((scale[:, j] & 15) | (shift[:, j] & 15) << 4).astype(np.uint8)
            made[:, j - 4] |= ((scale[:, j] >> 4) << 6).astype(np.uint8)
            made[:, j] |= ((shift[:, j] >> 4) << 6).astype(np.uint8)
    return made


def k_quant(bits: int) -> Callable[[np.random.Generator, int], Packed]:
    """Blocks of 256 in eight groups: Q4_K, Q5_K."""

    def pack(rng: np.random.Generator, n: int) -> Packed:
        q, d, m = rng.integers(0, 2**bits, (n, 256)), halves(rng, n), halves(rng, n)
        scale, shift = (rng.integers(0, 64, (n, 8)) for _ in range(2))
        low, fifth = np.zeros((n, 128), np.uint8), np.zeros((n, 32), np.uint8)
        wide = np.zeros((n, 256), np.float32)
        for i in range(256):
            g, at = i // 32, i // 64 * 32 + i % 32
            low[:, at] |= ((q[:, i] & 15) << (4 if g % 2 else 0)).astype(np.uint8)
            fifth[:, i % 32] |= ((q[:, i] >> 4) << g).astype(np.uint8)
            of = d.astype(np.float32) * scale[:, g], m.astype(np.float32) * shift[:, g]
            wide[:, i] = of[0].astype(np.float32) * q[:, i] - of[1].astype(np.float32)
        parts = [bytes_of(d), bytes_of(m), six_bits(scale, shift)]
        parts += [fifth] if bits == 5 else []
        return np.concatenate([*parts, low], axis=1), wide

    return pack


def q6_k(rng: np.random.Generator, n: int) -> Packed:
    q, d = rng.integers(0, 64, (n, 256)), halves(rng, n)
    scale = rng.integers(-128, 128, (n, 16)).astype(np.int8)
    low, high = np.zeros((n, 128), np.uint8), np.zeros((n, 64), np.uint8)
    wide = np.zeros((n, 256), np.float32)
    for i in range(256):
        half, quarter, at = i // 128, i % 128 // 32, i % 32
        byte = half * 64 + (quarter % 2) * 32 + at
        low[:, byte] |= ((q[:, i] & 15) << (4 * (quarter // 2))).astype(np.uint8)
        high[:, half * 32 + at] |= ((q[:, i] >> 4) << (2 * quarter)).astype(np.uint8)
        wide[:, i] = d.astype(np.float32) * scale[:, i // 16] * (q[:, i] - 32)
    return np.concatenate([low, high, bytes_of(scale), bytes_of(d)], axis=1), wide


BLOCKS: dict[str, tuple[int, Callable[[np.random.Generator, int], Packed]]] = {
    "Q4_0": (32, simple(4, True)),
    "Q4_1": (32, simple(4, False)),
    "Q5_0": (32, simple(5, True)),
    "Q5_1": (32, simple(5, False)),
    "Q8_0": (32, q8_0),
    "Q4_K": (256, k_quant(4)),
    "Q5_K": (256, k_quant(5)),
    "Q6_K": (256, q6_k),
}
"""Type -> (numbers of a block, random blocks)."""


def matrix(kind: str, rng: np.random.Generator, N: int, D: int) -> tuple[bytes, np.ndarray]:
    """The bytes of a random matrix, and float32[N, D]."""
    size, pack = BLOCKS[kind]
    stored, wide = pack(rng, N * D // size)
    return stored.tobytes(), wide.reshape(N, D)


def plain(kind: str, x: np.ndarray) -> bytes:
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    return np.ascontiguousarray(x.astype(kinds[kind])).tobytes()


def text(x: str) -> bytes:
    return struct.pack("<Q", len(x.encode())) + x.encode()


def value(x: Any) -> bytes:
    """Type and value of a key."""
    if isinstance(x, bool):
        return struct.pack("<IB", 7, x)
    if isinstance(x, int):
        return struct.pack("<II", 4, x)
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    if isinstance(x, str):
        return struct.pack("<I", 8) + text(x)
    if all(isinstance(e, str) for e in x):
        return struct.pack("<IIQ", 9, 8, len(x)) + b"".join(map(text, x))
    kind, code = (6, "f") if any(isinstance(e, float) for e in x) else (5, "i")
    return struct.pack("<IIQ", 9, kind, len(x)) + struct.pack(f"<{len(x)}{code}", *x)


Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> (type, shape, bytes)."""


def gguf(metadata: Mapping[str, Any], tensors: Tensors, version: int = 3) -> bytes:
    """A file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, x in metadata.items():
        head += text(key) + value(x)
    data = b""
    for name, (kind, shape, stored) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += stored + b"\0" * (-len(stored) % 32)
    return head + b"\0" * (-len(head) % 32) + data
