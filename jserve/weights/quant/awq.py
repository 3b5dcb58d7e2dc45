"""AWQ checkpoints, layout ``gemm``.

qweight  int32[D, N / 8]       columns 0 2 4 6 1 3 5 7 of eight, lowest bits first
qzeros   int32[D / g, N / 8]   alike; missing, or all 8, where ``zero_point`` is false
scales   float16[D / g, N]     w[n, d] = (q - zero) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.floats import scales
from jserve.weights.quant.matrix import Matrix, fields
from jserve.weights.quant.values import group_size, is_linear, names, of_auto_round, one_of
from jserve.weights.safetensors import broken

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that holds each of its columns."""
MIDDLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """The modules and tensors of an AWQ checkpoint."""

    group: int
    zeros: bool
    skipped: tuple[str, ...]
    """Parts of module names."""
    dtype: str
    signed: bool
    """Scales may be negative."""

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        if not is_linear(module) or any(part in module for part in self.skipped):
            return None
        return Form(kind="int4", group=self.group, zeros=self.zeros, dtype=self.dtype)

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        name = f"{stem}.qweight"
        shape = tensors.shape(name)
        whole = len(shape) == 2 and min(shape) > 0
        if not whole or (self.group and shape[0] % self.group):
            raise broken(tensors.path(name), f"shape {shape}, groups of {self.group}", name)
        D, N = shape[0], shape[1] * 8
        groups = D // (self.group or D)
        tensors.check(name, shape, ("int32",))
        tensors.check(f"{stem}.scales", (groups, N), FLOATS)
        if self.zeros:
            tensors.check(f"{stem}.qzeros", (groups, N // 8), ("int32",))
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``.

        Raises:
            WeightsError: there are zeros that the config has not.
        """
        N, D = self.check(tensors, stem)
        groups = D // (self.group or D)
        q = _columns(tensors.get(f"{stem}.qweight", (D, N // 8), ("int32",)))
        scale = scales(tensors, f"{stem}.scales", (groups, N), signed=self.signed).T
        zero = self._zeros(tensors, f"{stem}.qzeros", (groups, N // 8))
        return Matrix(q=np.ascontiguousarray(q.T), scale=np.ascontiguousarray(scale), zero=zero)

    def _zeros(self, tensors: Tensors, name: str, shape: tuple[int, int]) -> np.ndarray | None:
        """int8[N, groups], less the middle; None: they are 0."""
        if not self.zeros and not tensors.has(name):
            return None
        zero = np.ascontiguousarray(_columns(tensors.get(name, shape, ("int32",))).T)
        if self.zeros:
            return zero
        if zero.any():
            why = f"has zeros beside {MIDDLE}, though the config says zero_point false"
            raise broken(tensors.path(name), why, name)
        return None


def _columns(words: np.ndarray) -> np.ndarray:
    """int8[rows, N], -8 to 7, of int32[rows, N / 8]."""
    nibbles = fields(words, 4).reshape(*words.shape, 8)[..., ORDER]
    return nibbles.reshape(words.shape[0], -1).astype(np.int8) - MIDDLE


def read(config: Mapping[str, Any], dtype: str) -> tuple[Awq, Awq]:
    """The format of a ``quantization_config``.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    one_of(config, "bits", 4)
    one_of(config, "version", "gemm", "GEMM", None)
    one_of(config, "format", "gemm", None)
    one_of(config, "backend", "autoawq", "auto", None)  # of others the words lie otherwise
    zeros = one_of(config, "zero_point", True, False)
    skipped = names(config, "modules_to_not_convert")
    if not config.get("lm_head"):
        skipped = (*skipped, "lm_head")
    made = Awq(
        group=group_size(config),
        zeros=zeros,
        skipped=skipped,
        dtype=dtype,
        signed=of_auto_round(config),
    )
    return made, made
