"""GPTQ checkpoints, versions 1 and 2, of 2, 4 and 8 bits.

qweight  int32[D * bits / 32, N]   values along D, lowest bits first
qzeros   int32[D / g, N * bits / 32]   along N; version 1 has them less one
scales   float16[D / g, N]         w[n, d] = (q - zero) * scale, of group g_idx[d]
g_idx    int32[D]                  missing or d // g unless ``desc_act``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.matrix import Matrix, fields
from jserve.weights.quant.values import group_size, is_linear, one_of, refuse
from jserve.weights.safetensors import broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """The modules and tensors of a GPTQ checkpoint."""

    bits: int
    group: int
    symmetric: bool
    version: int
    head: bool
    """``lm_head`` is quantised, too."""
    dtype: str

    @property
    def middle(self) -> int:
        return 2 ** (self.bits - 1)

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        if not is_linear(module) or (module == "lm_head" and not self.head):
            return None
        kind = "int8" if self.bits == 8 else "int4"
        return Form(kind=kind, group=self.group, zeros=not self.symmetric, dtype=self.dtype)

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        name, per = f"{stem}.qweight", 32 // self.bits
        shape = tensors.shape(name)
        D = shape[0] * per
        if len(shape) != 2 or (self.group and D % self.group) or shape[1] % per:
            raise broken(tensors.path(name), f"shape {shape}, groups of {self.group}", name)
        N, groups = shape[1], self._groups(D)
        tensors.check(name, shape, ("int32",))
        tensors.check(f"{stem}.scales", (groups, N), FLOATS)
        tensors.check(f"{stem}.qzeros", (groups, N // per), ("int32",))
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``.

        Raises:
            WeightsError: ``g_idx`` puts the inputs in another order, or zeros that a symmetric file cannot have.
        """
        N, D = self.check(tensors, stem)
        groups, per = self._groups(D), 32 // self.bits
        self._check_order(tensors, stem, D)
        words = tensors.get(f"{stem}.qweight", (D // per, N), ("int32",))
        q_ND = fields(np.ascontiguousarray(words.T), self.bits).astype(np.int16)
        scale_BN = tensors.get(f"{stem}.scales", (groups, N), FLOATS).astype(np.float32)
        zero_BN = self._zeros(tensors, stem, (groups, N))
        return Matrix(
            q=(q_ND - self.middle).astype(np.int8),
            scale=np.ascontiguousarray(scale_BN.T),
            zero=None if self.symmetric else np.ascontiguousarray(zero_BN.T),
        )

    def _groups(self, D: int) -> int:
        return D // (self.group or D)

    def _zeros(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> np.ndarray:
        """int8[groups, N]: zeros less the middle of the range."""
        name, (groups, N) = f"{stem}.qzeros", shape
        words = tensors.get(name, (groups, N * self.bits // 32), ("int32",))
        stored = fields(words, self.bits).astype(np.int16)
        zeros = (stored + 1) % 2**self.bits if self.version == 1 else stored
        if self.symmetric and (zeros != self.middle).any():
            why = f"a symmetric checkpoint of version {self.version} has zeros of {self.middle}"
            raise broken(tensors.path(name), f"{why} alone", name)
        return (zeros - self.middle).astype(np.int8)

    def _check_order(self, tensors: Tensors, stem: str, D: int) -> None:
        name = f"{stem}.g_idx"
        if not self.group or not tensors.has(name):
            return
        found = tensors.get(name, (D,), ("int32", "int64"))
        if not np.array_equal(found, np.arange(D) // self.group):
            why = "inputs in an order of their own (desc_act) are not supported"
            raise broken(tensors.path(name), why, name)


def read(config: Mapping[str, Any], dtype: str) -> tuple[Gptq, Gptq]:
    """The format of a ``quantization_config``.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    bits = one_of(config, "bits", 2, 4, 8)
    group = group_size(config)
    if config.get("desc_act") and group:
        refuse("desc_act", "inputs in an order of their own are not supported with groups")
    if config.get("dynamic"):
        refuse("dynamic", "rules by module are not supported")
    version = one_of(config, "checkpoint_format", "gptq", "gptq_v2", None)
    made = Gptq(
        bits=bits,
        group=group,
        symmetric=one_of(config, "sym", True, False),
        version=2 if version == "gptq_v2" else 1,
        head=bool(config.get("lm_head")),
        dtype=dtype,
    )
    return made, made
