"""A quantised matrix on the host, as a reader of a format gives it.

It owns the bits: values inside words, and the packing that ``model.quant`` multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jserve.model.quant import PACKED, Form
from jserve.weights.hf import Tensors
from jserve.weights.safetensors import broken

E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""The sixteen numbers of 4-bit floats, twice: whole numbers hold them exactly."""
CODES = np.zeros(2 * 12 + 1, np.uint8)
"""Of the numbers of ``E2M1`` plus 12."""
CODES[E2M1[:8] + 12], CODES[E2M1[9:] + 12] = np.arange(8), np.arange(9, 16)
MIDDLE = {"int4": 8, "uint4": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """w[n, order[d]] = (q[n, d] - zero[n, d // g]) * scale[n, d // g] - shift[n, d // g], where g = D / groups."""

    q: np.ndarray
    """int8[N, D], or float8_e4m3fn. Of e2m1 twice the numbers; of what no kind holds, float32."""
    scale: np.ndarray
    """float32[N, groups]."""
    zero: np.ndarray | None = None
    """int8[N, groups]; None: 0."""
    shift: np.ndarray | None = None
    """float32[N, groups]; None: 0."""
    order: np.ndarray | None = None
    """int32[D]; None: as they are."""
    input_scale: np.ndarray | None = None
    """float32[1], of activations where the checkpoint states it."""

    def widened(self) -> np.ndarray:
        """float32[N, D]."""
        N, D = self.q.shape
        groups = self.scale.shape[1]
        wide = self.q.astype(np.float32).reshape(N, groups, D // groups)
        if self.zero is not None:
            wide -= self.zero[..., None]
        wide *= self.scale[..., None]
        if self.shift is not None:
            wide -= self.shift[..., None]
        wide = wide.reshape(N, D)
        return wide if self.order is None else wide[:, np.argsort(self.order)]


class Modules(Protocol):
    """The quantised modules of a model."""

    def form_of(self, module: str, D: int) -> Form | None:
        """The form of a module with ``D`` inputs; None: it is not quantised."""
        ...


class Reader(Protocol):
    """One format: which tensors a matrix has in a file, and what they mean."""

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """(N, D) of a matrix, by headers alone.

        Raises:
            WeightsError: a tensor is missing, or of another shape or dtype.
        """
        ...

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """Raises WeightsError as ``check``, and for values that no such file has."""
        ...


def ordered(
    tensors: Tensors, name: str, D: int, group: int, *, lacks: str = ""
) -> np.ndarray | None:
    """The order int32[D] of inputs whose groups tensor ``name`` gives; None: they are as they lie, or have one scale
    (``group`` 0), or there is no such tensor.

    Args:
        lacks: what the config would have to say for there to be another order, and does not; empty: it does.

    Raises:
        WeightsError: a group that is none, or that has not ``group`` inputs; an order that the config lacks.
    """
    if not group or not tensors.has(name):
        return None
    found = tensors.get(name, (D,), ("int32", "int64"))
    if found.size and (found.min() < 0 or found.max() >= D // group):
        raise broken(tensors.path(name), f"names groups beyond the {D // group} there are", name)
    if (np.bincount(found, minlength=D // group) != group).any():
        raise broken(tensors.path(name), f"has groups of more or less than {group} inputs", name)
    order = np.argsort(found, kind="stable").astype(np.int32)
    if np.array_equal(order, np.arange(D)):
        return None
    if lacks:
        why = f"has inputs in another order, though the config has no {lacks}"
        raise broken(tensors.path(name), why, name)
    return order


def packed(q: np.ndarray, kind: str = "int4") -> np.ndarray:
    """uint8[N, D / 2] of int8[N, D] as ``model.quant`` has them: int4, uint4, or of e2m1 twice the numbers."""
    N, D = q.shape
    codes = CODES[q + E2M1.max()] if kind == "e2m1" else (q + MIDDLE[kind]).astype(np.uint8)
    halves = codes.reshape(N, D // PACKED, 2, PACKED // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(N, D // 2)


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The values of ``bits`` bits inside words, lowest first: uint8[..., n * per].

    Args:
        words: int32 or uint32[..., n]; 32 // bits values each, upper bits beyond them unused.
    """
    per = 32 // bits
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return values.astype(np.uint8).reshape(*words.shape[:-1], -1)


def values(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """The first ``n`` values of rows of words, end to end: uint8[..., n]."""
    return dense_fields(words, bits, n) if 32 % bits else fields(words, bits)[..., :n]


def dense_fields(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """``n`` values of ``bits`` bits that lie end to end over the borders of words: uint8[..., n]."""
    first = np.arange(n, dtype=np.int64) * bits
    at, shift = first // 32, (first % 32).astype(np.uint64)
    words = words.view(np.uint32).astype(np.uint64)
    after = np.concatenate([words[..., 1:], np.zeros_like(words[..., :1])], axis=-1)
    both = words[..., at] | after[..., at] << np.uint64(32)
    return ((both >> shift) & np.uint64(2**bits - 1)).astype(np.uint8)
