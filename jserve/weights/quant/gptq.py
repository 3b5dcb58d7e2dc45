"""GPTQ checkpoints, versions 1 and 2, of 2, 3, 4 and 8 bits.

qweight  int32[D * bits / 32, N]   values along D, lowest bits first
qzeros   int32[D / g, N * bits / 32]   along N; version 1 has them less one
scales   float16[D / g, N]         w[n, d] = (q - zero) * scale, of group g_idx[d]
g_idx    int32[D]                  with ``desc_act``; elsewhere missing or d // g

3 bits lie end to end over the borders of words. ``dynamic`` has modules with bits of their own, or none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.floats import scales
from jserve.weights.quant.matrix import Matrix, ordered, values
from jserve.weights.quant.values import (
    check_patterns,
    group_size,
    is_linear,
    matches,
    names,
    of_auto_round,
    one_of,
    refuse,
)
from jserve.weights.safetensors import broken

VERSIONS = {"gptq": 1, "gptq_v2": 2}
INSIDE = "modules_in_block_to_quantize"
IN_LAYER = re.compile(r"\blayers\.\d+\.(.+)")
"""The name of a module in its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """The modules and tensors of a GPTQ checkpoint."""

    bits: int
    group: int
    symmetric: bool
    version: int
    ordered: bool
    head: bool
    """``lm_head`` is quantised, too."""
    dtype: str
    signed: bool
    """Scales may be negative."""
    inside: tuple[str, ...] | None
    """The modules of a layer that are quantised, by their names in it; None: all."""
    rules: tuple[tuple[str, Gptq | None], ...] = ()
    """Patterns of modules, and how those are quantised, None: they are not; the first that matches holds."""

    @property
    def middle(self) -> int:
        return 2 ** (self.bits - 1)

    def of(self, module: str) -> Gptq | None:
        """The settings of a module; None: it is not quantised."""
        if not is_linear(module) or (module == "lm_head" and not self.head):
            return None
        in_layer = IN_LAYER.search(module)
        if self.inside is not None and in_layer and in_layer[1] not in self.inside:
            return None
        return next((own for pattern, own in self.rules if matches(module, pattern)), self)

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        own = self.of(module)
        return None if own is None else own._form()

    def _form(self) -> Form:
        kind = "int8" if self.bits == 8 else "int4"
        zeros, order = not self.symmetric, self.ordered and self.group > 0
        return Form(kind=kind, group=self.group, zeros=zeros, ordered=order, dtype=self.dtype)

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        own = self.of(stem)
        assert own is not None, f"{stem} is not quantised"
        return own._check(tensors, stem)

    def _check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        name = f"{stem}.qweight"
        shape = tensors.shape(name)
        whole = len(shape) == 2 and min(shape) > 0
        whole = whole and shape[0] * 32 % self.bits == shape[1] * self.bits % 32 == 0
        D = shape[0] * 32 // self.bits if whole else 0
        if not whole or (self.group and D % self.group):
            raise broken(tensors.path(name), f"shape {shape}, groups of {self.group}", name)
        N, groups = shape[1], self._groups(D)
        tensors.check(name, shape, ("int32",))
        tensors.check(f"{stem}.scales", (groups, N), FLOATS)
        tensors.check(f"{stem}.qzeros", (groups, N * self.bits // 32), ("int32",))
        if self.ordered and self.group:
            tensors.check(f"{stem}.g_idx", (D,), ("int32", "int64"))
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``.

        Raises:
            WeightsError: ``g_idx`` puts the inputs in another order, or zeros that a symmetric file cannot have.
        """
        own = self.of(stem)
        assert own is not None, f"{stem} is not quantised"
        return own._read(tensors, stem)

    def _read(self, tensors: Tensors, stem: str) -> Matrix:
        N, D = self._check(tensors, stem)
        groups, order = self._groups(D), self._order(tensors, stem, D)
        words = tensors.get(f"{stem}.qweight", (D * self.bits // 32, N), ("int32",))
        q_ND = values(np.ascontiguousarray(words.T), self.bits, D).astype(np.int16)
        q_ND = q_ND if order is None else q_ND[:, order]
        scale_BN = scales(tensors, f"{stem}.scales", (groups, N), signed=self.signed)
        zero_BN = self._zeros(tensors, stem, (groups, N))
        return Matrix(
            q=(q_ND - self.middle).astype(np.int8),
            scale=np.ascontiguousarray(scale_BN.T),
            zero=None if self.symmetric else np.ascontiguousarray(zero_BN.T),
            order=order,
        )

    def _groups(self, D: int) -> int:
        return D // (self.group or D)

    def _zeros(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> np.ndarray:
        """int8[groups, N]: zeros less the middle of the range."""
        name, (groups, N) = f"{stem}.qzeros", shape
        words = tensors.get(name, (groups, N * self.bits // 32), ("int32",))
        stored = values(words, self.bits, N).astype(np.int16)
        zeros = (stored + 1) % 2**self.bits if self.version == 1 else stored
        if self.symmetric and (zeros != self.middle).any():
            why = f"a symmetric checkpoint of version {self.version} has zeros of {self.middle}"
            raise broken(tensors.path(name), f"{why} alone", name)
        return (zeros - self.middle).astype(np.int8)

    def _order(self, tensors: Tensors, stem: str, D: int) -> np.ndarray | None:
        of = "" if self.ordered else "desc_act"
        return ordered(tensors, f"{stem}.g_idx", D, self.group, lacks=of)


def read(config: Mapping[str, Any], dtype: str) -> tuple[Gptq, Gptq]:
    """The format of a ``quantization_config``.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    made = _of(config, dtype)
    given = config.get("dynamic") or {}
    if not isinstance(given, Mapping):
        refuse("dynamic", "must be an object")
    rules = tuple(_rule(config, pattern, own, dtype) for pattern, own in given.items())
    check_patterns((found for found, _ in rules), "dynamic")
    made = replace(made, rules=rules)
    return made, made


def _of(config: Mapping[str, Any], dtype: str) -> Gptq:
    one_of(config, "is_marlin_format", False, None)
    one_of(config, "pack_dtype", "int32", None)
    return Gptq(
        bits=one_of(config, "bits", 2, 3, 4, 8),
        group=group_size(config),
        symmetric=one_of(config, "sym", True, False),
        version=_version(config),
        ordered=bool(one_of(config, "desc_act", True, False, None)),
        head=bool(config.get("lm_head")),
        dtype=dtype,
        signed=of_auto_round(config),
        inside=_inside(config),
    )


def _version(config: Mapping[str, Any]) -> int:
    """1 or 2, of two keys that may say it."""
    older, newer = (one_of(config, key, *VERSIONS, None) for key in ("format", "checkpoint_format"))
    if older and newer and older != newer:
        refuse("format", f"{older!r} contradicts checkpoint_format {newer!r}")
    return VERSIONS.get(newer or older, 1)


def _inside(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of ``modules_in_block_to_quantize``: a list of them, or of lists."""
    given = config.get(INSIDE)
    if not given:
        return None
    if not isinstance(given, list):
        refuse(INSIDE, "must be a list of names, or of lists of names")
    rows = [row if isinstance(row, list) else [row] for row in given]
    return tuple(name for row in rows for name in names({INSIDE: row}, INSIDE))


def _rule(config: Mapping[str, Any], pattern: str, own: Any, dtype: str) -> tuple[str, Gptq | None]:
    """A line of ``dynamic``: ``-:`` and an expression of modules that are not quantised, ``+:``, or nothing, and one of
    those with settings of their own."""
    key = f"dynamic.{pattern[:80]}"
    found = "re:" + pattern.removeprefix("-:").removeprefix("+:")
    check_patterns([found], key)
    if pattern.startswith("-:"):
        return found, None
    if not isinstance(own, Mapping):
        refuse(key, "must be an object")
    return found, _of({**config, **own}, dtype)
