"""The tensors of a checkpoint as a quantised model asks for them, whatever its format calls them.

It owns the way from names of ``model.quant_specs`` to a reader of the format. A matrix is read whole and kept until
a few others were asked for: its numbers and its scales are two parameters.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jserve.model.quant_specs import (
    BLOCKS,
    ENDINGS,
    INPUT,
    NUMBERS,
    ORDER,
    SCALE,
    SHIFT,
    WEIGHT,
    ZERO,
    stem,
)
from jserve.weights.hf import FLOATS, Kinds, Tensors
from jserve.weights.quant.matrix import Matrix, packed
from jserve.weights.quant.mxfp4_experts import Mxfp4Experts
from jserve.weights.quant.scheme import Scheme
from jserve.weights.safetensors import broken

KEPT = 4
"""Matrices that are kept: the most that make one parameter of no experts, and one more."""
KEPT_SCALES = 1024
"""Matrices whose scales, zeros and the like are kept: those of a layer's experts."""
ROUTERS = (".gate", ".router", ".shared_expert_gate")
"""Endings of their modules."""


class QuantisedTensors:
    """``tensors`` as the loader reads them: their quantised matrices by ``scheme``, which is their checkpoint's, all
    else as it is."""

    __slots__ = ("_kept", "_reader", "_scales", "_scheme", "_tensors", "widened")

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:
        assert scheme.reader is not None, "the checkpoint is not quantised"
        self._tensors, self._scheme, self._reader = tensors, scheme, scheme.reader
        self._kept: OrderedDict[str, Matrix] = OrderedDict()
        self._scales: OrderedDict[str, Matrix] = OrderedDict()
        self.widened: set[str] = set()
        """Quantised modules that were asked for in the type of the model."""

    def check(self, name: str, shape: tuple[int, ...], kinds: Kinds = FLOATS) -> None:
        """As ``Tensors.check``."""
        module, ending = _parts(name)
        if not self._quantised(module, ending, shape):
            self._tensors.check(name, shape, kinds)
            return
        N, D = self._reader.check(self._tensors, module)
        if ending == INPUT:
            return
        rows = N if ending == ORDER else math.prod(shape[:-1])
        inputs = shape[-1] if ending in ("", NUMBERS, ORDER) else D
        if rows != N or inputs not in (D, D // 2 if ending == NUMBERS else D):
            why = f"shape {(N, D)}, the config asks for {(rows, inputs)}"
            raise broken(self.path(name), why, module)

    def get(self, name: str, shape: tuple[int, ...], kinds: Kinds = FLOATS) -> Any:
        """As ``Tensors.get``; scales repeated where ``shape`` has more than the file. Experts in mxfp4 come one by one:
        ``x[e]`` reads one."""
        module, ending = _parts(name)
        if not self._quantised(module, ending, shape):
            return self._tensors.get(name, shape, kinds)
        self.check(name, shape, kinds)
        if isinstance(self._reader, Mxfp4Experts):
            return self._reader.part(self._tensors, module, ending, shape)
        if ending:
            return self._stored(module, ending, shape)
        self.widened.add(module)
        return self._matrix(module, self._kept).widened()

    def _stored(self, module: str, ending: str, shape: tuple[int, ...]) -> np.ndarray:
        matrix = self._matrix(module, self._kept if ending == NUMBERS else self._scales)
        if ending == NUMBERS:
            as_they_are = shape[1] == matrix.q.shape[1]
            return matrix.q if as_they_are else packed(matrix.q, self._kind(module, matrix))
        if ending == ORDER:
            return np.arange(shape[0], dtype=np.int32) if matrix.order is None else matrix.order
        if ending == INPUT:
            assert matrix.input_scale is not None, f"{module} has no scale of activations"
            return matrix.input_scale
        found = {SCALE: matrix.scale, ZERO: matrix.zero, SHIFT: matrix.shift}[ending]
        if found is None:
            return np.zeros(shape, np.int8)
        return found.repeat(shape[1] // found.shape[1], axis=1)

    def path(self, name: str) -> Path:
        """The file that holds tensor ``name``, or the first one of a quantised matrix."""
        module, _ = _parts(name)
        if not module or self._tensors.has(name):
            return self._tensors.path(name)
        start = f"{module.removeprefix('model.')}."
        found = [n for n in self._tensors.names() if n.removeprefix("model.").startswith(start)]
        return self._tensors.path(found[0] if found else name)

    def has(self, name: str) -> bool:
        """As ``Tensors.has``; parts of a quantised matrix are always there, or ``check`` says what is missing."""
        return bool(_parts(name)[1]) or self._tensors.has(name)

    def drop_pages(self) -> None:
        self._tensors.drop_pages()

    def _quantised(self, module: str, ending: str, shape: tuple[int, ...]) -> bool:
        """True if the reader gives this tensor."""
        if ending or not module or len(shape) != 2:
            return bool(ending)
        stored = self._scheme.modules.form_of(module, shape[1]) is not None
        return stored and not self._is_router(module)

    def _is_router(self, module: str) -> bool:
        """True for a router of experts that the file has as it is: few configs name them."""
        name = f"{module}{WEIGHT}"
        wide = self._tensors.has(name) and self._tensors.dtype(name) in FLOATS
        return wide and module.endswith(ROUTERS)

    def _kind(self, module: str, matrix: Matrix) -> str:
        form = self._scheme.form_of(module, matrix.q.shape[1])
        assert form is not None, f"{module} is not quantised"
        return form.kind

    def _matrix(self, module: str, kept: OrderedDict[str, Matrix]) -> Matrix:
        """A matrix, or of ``_scales`` one whose numbers may be missing."""
        if module not in kept:
            made = self._reader.read(self._tensors, module)
            _keep(self._kept, KEPT, module, made)
            _keep(self._scales, KEPT_SCALES, module, replace(made, q=np.empty((0, 0), np.int8)))
        kept.move_to_end(module)
        return kept[module]


def _keep(kept: OrderedDict[str, Matrix], most: int, module: str, matrix: Matrix) -> None:
    kept[module] = matrix
    while len(kept) > most:
        kept.popitem(last=False)


def _parts(name: str) -> tuple[str, str]:
    """(module, ending) of a tensor that ``quant_specs`` names; ("", "") of one that is no weight."""
    for ending in ENDINGS:
        if name.endswith(BLOCKS + ending):
            return name.removesuffix(ending), ending
        if name.endswith(WEIGHT + ending):
            return stem(name.removesuffix(ending)), ending
    return (stem(name), "") if name.endswith(WEIGHT) else ("", "")
