"""modelopt checkpoints: FP8 with a scale of a matrix and one of its activations, and NVFP4.

weight          FP8: float8_e4m3fn[N, D]; NVFP4: uint8[N, D / 2], the first of two numbers in the low half
weight_scale    FP8: a number; NVFP4: e4m3[N, D / 16]
weight_scale_2  NVFP4: a number, a factor of all
input_scale     a number
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.floats import E4M3, doubled, matrix_shape, scales
from jserve.weights.quant.fp8 import Fp8
from jserve.weights.quant.matrix import Matrix
from jserve.weights.quant.values import is_linear, names, one_of, refuse
from jserve.weights.safetensors import broken

GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4:
    """The modules and tensors of an NVFP4 checkpoint."""

    skipped: tuple[str, ...]
    dtype: str

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``. Activations stay as they are."""
        if not is_linear(module) or excluded(module, self.skipped):
            return None
        return Form(kind="e2m1", group=GROUP, dtype=self.dtype)

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        name = f"{stem}.weight"
        N, half = matrix_shape(tensors, name, ("uint8",))
        if 2 * half % GROUP:
            raise broken(tensors.path(name), f"groups of {GROUP} in {2 * half} inputs", name)
        tensors.check(f"{stem}.weight_scale", (N, 2 * half // GROUP), E4M3)
        tensors.check(f"{stem}.weight_scale_2", (1,), FLOATS)
        return N, 2 * half

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``."""
        N, D = self.check(tensors, stem)
        found = scales(tensors, f"{stem}.weight_scale", (N, D // GROUP), E4M3)
        found = found * scales(tensors, f"{stem}.weight_scale_2", (1,))
        if tensors.has(name := f"{stem}.input_scale"):
            tensors.get(name, (1,), FLOATS)  # known, and of activations in 4 bits alone
        return Matrix(q=doubled(tensors, f"{stem}.weight", (N, D)), scale=found * np.float32(0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeloptFp8(Fp8):
    """The modules and tensors of an FP8 checkpoint; its names have wildcards."""

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        return None if excluded(module, self.skipped) else Fp8.form_of(self, module, D)


def excluded(module: str, skipped: tuple[str, ...]) -> bool:
    """True if one of ``skipped`` is the module, one that holds it, or a pattern of it with wildcards."""
    return any(
        module == name or module.startswith(f"{name}.") or fnmatch.fnmatchcase(module, name)
        for name in skipped
    )


def read(config: Mapping[str, Any], dtype: str) -> tuple[Fp8, Fp8] | tuple[Nvfp4, Nvfp4]:
    """The format of a ``quantization_config``, or of what hf_quant_config.json has for one.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    algo = one_of(config, "quant_algo", "FP8", "NVFP4")
    skipped = ("lm_head", *(names(config, "exclude_modules") or names(config, "ignore")))
    for name in skipped:
        if len(name) > MAX_NAME or name.count("*") > MAX_STARS:
            refuse("exclude_modules", f"{name[:80]!r} is too long, or has too many wildcards")
    if algo == "FP8":
        fp8 = ModeloptFp8(skipped=skipped, static=True, dtype=dtype)
        return fp8, fp8
    one_of(config, "group_size", GROUP, None)
    made = Nvfp4(skipped=skipped, dtype=dtype)
    return made, made


MAX_NAME, MAX_STARS = 200, 4
"""Of a name with wildcards, so that it cannot run for ever."""
