"""Numbers and scales of small floats, as files have them: e2m1 in halves of bytes, e4m3, e8m0 powers of two."""

from __future__ import annotations

import math

import numpy as np

from jserve.weights.hf import FLOATS, Kinds, Tensors
from jserve.weights.quant.matrix import E2M1
from jserve.weights.safetensors import broken

E4M3: Kinds = ("float8_e4m3fn",)
E8M0: Kinds = ("uint8", "float8_e8m0fnu")
E8M0_BIAS, E8M0_NAN = 127, 255


def doubled(tensors: Tensors, name: str, shape: tuple[int, int]) -> np.ndarray:
    """int8[N, D]: twice the e2m1 numbers of tensor ``name``, uint8[N, D / 2], the first of two in the low half."""
    N, D = shape
    stored = tensors.get(name, (N, D // 2), ("uint8",))
    return E2M1[np.stack([stored & 15, stored >> 4], axis=-1).reshape(N, D)]


def matrix_shape(tensors: Tensors, name: str, kinds: Kinds) -> tuple[int, int]:
    """(rows, columns) of a matrix of one of these types.

    Raises:
        WeightsError: it is missing, no matrix, or of another type.
    """
    shape = tensors.shape(name)
    if len(shape) != 2 or min(shape) < 1:
        raise broken(tensors.path(name), f"shape {shape} is no matrix", name)
    tensors.check(name, shape, kinds)
    return shape[0], shape[1]


def scales(
    tensors: Tensors,
    name: str,
    shape: tuple[int, ...],
    kinds: Kinds = FLOATS,
    *,
    signed: bool = False,
) -> np.ndarray:
    """float32: scales of tensor ``name``; whole numbers and e8m0 are exponents of two.

    Args:
        signed: they may be negative, too.

    Raises:
        WeightsError: as ``Tensors.check``, or they are not finite or not positive.
    """
    found = tensors.get(name, shape, kinds)
    if found.dtype.name in E8M0:
        exponents = found.view(np.uint8).astype(np.int32)
        with np.errstate(over="ignore"):
            made = np.ldexp(np.float32(1), exponents - E8M0_BIAS)
        made = np.where(exponents == E8M0_NAN, np.float32(np.nan), made)
    else:
        made = found.astype(np.float32)
    if not (np.isfinite(made).all() and ((made > 0) | (signed & (made < 0))).all()):
        which = "not zero" if signed else "positive"
        raise broken(tensors.path(name), f"scales must be finite and {which}", name)
    return made


def finite(tensors: Tensors, name: str, q: np.ndarray) -> np.ndarray:
    """``q``, refused where it has NaN (0x7f and 0xff in e4m3)."""
    if (q.view(np.uint8) & 0x7F == 0x7F).any():
        raise broken(tensors.path(name), "has NaN values", name)
    return q


def inputs(block: int, D: int) -> int:
    """Inputs of a group: as many of a block as divide a row whose last block is cut; 0: all of a row."""
    return math.gcd(block, D) if block else 0


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """float32[N, groups]: scales of blocks, or of the whole matrix, for each row and group of inputs."""
    N, D = shape
    if not block[0]:
        return np.full((N, 1), scale.reshape(-1)[0], np.float32)
    group = inputs(block[1], D)
    rows, columns = np.arange(N) // block[0], np.arange(0, D, group) // block[1]
    return scale[rows][:, columns]
