"""Checkpoints in e4m3: ``fp8``, with a scale for a matrix or for blocks of it, and ``fbgemm_fp8``, of rows.

weight            float8_e4m3fn[N, D]
weight_scale      a number: of the matrix; fbgemm_fp8: float32[N, 1]
weight_scale_inv  float32, bfloat16 or e8m0 [ceil(N / 128), ceil(D / 128)]: a factor, despite its name
input_scale       a number: of activations, where ``activation_scheme`` is static
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.floats import E4M3, E8M0, finite, inputs, matrix_shape, scales, spread
from jserve.weights.quant.matrix import Matrix
from jserve.weights.quant.values import is_linear, matches, names, one_of, refuse
from jserve.weights.safetensors import broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """The modules and tensors of such a checkpoint."""

    skipped: tuple[str, ...]
    dtype: str
    block: tuple[int, int] = (0, 0)
    """Rows and inputs that share a scale; (0, 0): all."""
    rows: bool = False
    """A row has a scale of its own."""
    static: bool = False
    bound: float = 0.0

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``. Activations are rounded as the weights are: with a scale per token and group, or the
        checkpoint's."""
        if not is_linear(module) or any(matches(module, name) for name in self.skipped):
            return None
        return Form(
            kind="e4m3",
            group=inputs(self.block[1], D),
            rounded=True,
            static=self.static,
            bound=self.bound,
            dtype=self.dtype,
        )

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        N, D = matrix_shape(tensors, f"{stem}.weight", E4M3)
        tensors.check(self._scale(stem), self._scales(N, D), FLOATS + E8M0[1:])
        if self.static:
            tensors.check(f"{stem}.input_scale", (1,), FLOATS)
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``."""
        N, D = self.check(tensors, stem)
        name = f"{stem}.weight"
        q = finite(tensors, name, tensors.get(name, (N, D), E4M3))
        found = scales(tensors, self._scale(stem), self._scales(N, D), FLOATS + E8M0[1:])
        return Matrix(
            q=q,
            scale=found if self.rows else spread(found, self.block, (N, D)),
            input_scale=self._of_inputs(tensors, stem),
        )

    def _of_inputs(self, tensors: Tensors, stem: str) -> np.ndarray | None:
        """The static scale of activations. The bound of fbgemm_fp8 is in its files, too."""
        if self.static:
            return scales(tensors, f"{stem}.input_scale", (1,))
        name = f"{stem}.input_scale_ub"
        if self.bound and tensors.has(name):
            found = float(tensors.get(name, (1,), FLOATS).reshape(-1)[0])
            if not np.isclose(found, self.bound):
                why = f"is {found}, activation_scale_ub of the config is {self.bound}"
                raise broken(tensors.path(name), why, name)
        return None

    def _scale(self, stem: str) -> str:
        return f"{stem}.weight_scale_inv" if self.block[0] else f"{stem}.weight_scale"

    def _scales(self, N: int, D: int) -> tuple[int, ...]:
        if self.rows:
            return (N, 1)
        if not self.block[0]:
            return (1,)
        return (-(-N // self.block[0]), -(-D // self.block[1]))


def read(config: Mapping[str, Any], dtype: str) -> tuple[Fp8, Fp8]:
    """The format of a ``quantization_config``.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    one_of(config, "fmt", "e4m3", None)
    one_of(config, "scale_fmt", "ue8m0", "float", None)
    static = one_of(config, "activation_scheme", "dynamic", "static", None) == "static"
    block = _block(config.get("weight_block_size"))
    if static and block[0]:
        refuse("activation_scheme", "static scales are not read beside weight_block_size")
    skipped = names(config, "modules_to_not_convert") or names(config, "ignored_layers")
    made = Fp8(block=block, skipped=("lm_head", *skipped), static=static, dtype=dtype)
    return made, made


def _block(size: Any) -> tuple[int, int]:
    if size is None:
        return 0, 0
    whole = isinstance(size, list) and len(size) == 2
    if not whole or any(type(n) is not int or n < 1 for n in size):
        refuse("weight_block_size", f"must be two positive numbers, not {size!r}")
    return size[0], size[1]


def read_fbgemm(config: Mapping[str, Any], dtype: str) -> tuple[Fp8, Fp8]:
    """As ``read``, of ``fbgemm_fp8``."""
    bound = config.get("activation_scale_ub", 1200.0)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < np.inf:
        refuse("activation_scale_ub", f"must be a positive number, not {bound!r}")
    skipped = ("lm_head", *names(config, "modules_to_not_convert"))
    made = Fp8(rows=True, bound=float(bound), skipped=skipped, dtype=dtype)
    return made, made
