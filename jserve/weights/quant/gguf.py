"""Quantised matrices of GGUF files: each has a type of its own.

A config made of the file's header (``jserve.gguf.config``) names them: ``types``, module -> type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.gguf.types import QUANTISED
from jserve.model.quant import Form
from jserve.weights.hf import BYTES, Tensors
from jserve.weights.quant.gguf_blocks import decoded
from jserve.weights.quant.matrix import Matrix
from jserve.weights.quant.values import is_linear, refuse
from jserve.weights.safetensors import broken

BLOCKS = ".blocks"
"""Ending of the tensors uint8[N, bytes of a row]."""
FORMS: dict[str, dict[str, Any]] = {
    "Q4_0": {"kind": "int4", "group": 32},
    "Q4_1": {"kind": "uint4", "group": 32, "shifts": True},
    "Q5_0": {"kind": "int8", "group": 32},
    "Q5_1": {"kind": "int8", "group": 32, "shifts": True},
    "Q8_0": {"kind": "int8", "group": 32},
    "Q4_K": {"kind": "uint4", "group": 32, "shifts": True},
    "Q5_K": {"kind": "int8", "group": 32, "shifts": True},
    "Q6_K": {"kind": "int8", "group": 16},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """The quantised modules of a GGUF file."""

    types: Mapping[str, str]
    dtype: str

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        kind = self.types.get(module)
        if kind is None or not is_linear(module):
            return None
        return Form(**FORMS[kind], dtype=self.dtype)

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        name, kind = f"{stem}{BLOCKS}", self.types[stem]
        shape = tensors.shape(name)
        _, block, size = QUANTISED[kind]
        if len(shape) != 2 or shape[1] % size:
            raise broken(tensors.path(name), f"shape {shape} is no matrix of {kind}", name)
        tensors.check(name, shape, BYTES)
        return shape[0], shape[1] // size * block

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``."""
        name = f"{stem}{BLOCKS}"
        self.check(tensors, stem)
        found = decoded(self.types[stem], tensors.get(name, tensors.shape(name), BYTES))
        shift = found.scale if found.shift is None else found.shift
        if not (np.isfinite(found.scale).all() and np.isfinite(shift).all()):
            raise broken(tensors.path(name), "scales must be finite", name)
        return found


def read(config: Mapping[str, Any], dtype: str) -> tuple[Gguf, Gguf]:
    """The format of a ``quantization_config`` that ``jserve.gguf.config`` made.

    Raises:
        ConfigError: a type that is not read; ``field`` is the key.
    """
    types = config.get("types")
    if not isinstance(types, Mapping):
        refuse("types", "must be an object")
    for module, kind in types.items():
        if kind not in FORMS:
            refuse(f"types.{module[:80]}", f"{str(kind)[:40]!r} is not read")
    made = Gguf(types=dict(types), dtype=dtype)
    return made, made
