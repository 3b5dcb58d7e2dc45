"""Experts in mxfp4 of all experts together, as GPT-OSS publishes them, kept in 4 bits.

x_blocks  uint8[E, N, D / 32, 16]   two numbers in a byte, the first in its low half
x_scales  uint8[E, N, D / 32]       exponents of two
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jserve.model.quant import Form
from jserve.model.quant_specs import BLOCKS, NUMBERS
from jserve.weights.hf import BYTES, Tensors
from jserve.weights.mxfp4 import Mxfp4Numbers, Mxfp4Scales
from jserve.weights.quant.matrix import Matrix
from jserve.weights.safetensors import broken

GROUP = 32
NAN = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Experts:
    """The experts of such a checkpoint; nothing else of it is quantised."""

    dtype: str

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        return Form(kind="e2m1", group=GROUP, dtype=self.dtype) if module.endswith(BLOCKS) else None

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``, with the rows of all experts."""
        shape = tensors.shape(stem)
        if len(shape) != 4 or shape[-1] != GROUP // 2:
            raise broken(tensors.path(stem), f"shape {shape} is none of blocks", stem)
        tensors.check(stem, shape, BYTES)
        tensors.check(_scales(stem), shape[:-1], BYTES)
        return math.prod(shape[:2]), shape[2] * GROUP

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """Not used: experts are read one by one, by ``part``."""
        raise AssertionError(stem)

    def part(self, tensors: Tensors, stem: str, ending: str, shape: tuple[int, ...]) -> Any:
        """Numbers or scales, ``x[e]`` those of an expert, as ``shape`` [E, N, numbers of a row] has them.

        Raises:
            WeightsError: as ``check``, or a scale is NaN.
        """
        _, D = self.check(tensors, stem)
        whole = tensors.shape(stem)
        if ending == NUMBERS:
            return Mxfp4Numbers(tensors.get(stem, whole, BYTES), packed=shape[-1] != D)
        found = tensors.get(_scales(stem), whole[:-1], BYTES)
        if (found == NAN).any():
            raise broken(tensors.path(stem), "scales must be finite", _scales(stem))
        return Mxfp4Scales(found, shape[-1])


def _scales(stem: str) -> str:
    return stem.removesuffix(BLOCKS) + "_scales"


def read(config: Mapping[str, Any], dtype: str) -> tuple[Mxfp4Experts, Mxfp4Experts]:
    """The format of a ``quantization_config``; the family has checked that it has such experts."""
    made = Mxfp4Experts(dtype=dtype)
    return made, made
