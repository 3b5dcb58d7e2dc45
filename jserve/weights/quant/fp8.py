"""Checkpoints with ``quant_method: fp8``: e4m3 with a scale for a matrix, or for blocks of it.

weight            float8_e4m3fn[N, D]
weight_scale      a number: of the matrix
weight_scale_inv  float32 or bfloat16 [ceil(N / 128), ceil(D / 128)]: a factor, despite its name
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.matrix import Matrix
from jserve.weights.quant.values import is_linear, names, one_of, refuse
from jserve.weights.safetensors import broken

E4M3 = ("float8_e4m3fn",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """The modules and tensors of such a checkpoint."""

    block: tuple[int, int]
    """Rows and inputs that share a scale; (0, 0): all."""
    skipped: tuple[str, ...]
    dtype: str

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``. Activations are rounded as the weights are: with a scale per token and group."""
        if not is_linear(module) or module in self.skipped:
            return None
        return Form(kind="e4m3", group=inputs(self.block[1], D), rounded=True, dtype=self.dtype)

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        name = f"{stem}.weight"
        shape = tensors.shape(name)
        if len(shape) != 2:
            raise broken(tensors.path(name), f"shape {shape} is no matrix", name)
        tensors.check(name, shape, E4M3)
        tensors.check(self._scale(stem), self._scales(shape), FLOATS)
        return shape[0], shape[1]

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``."""
        N, D = self.check(tensors, stem)
        q = tensors.get(f"{stem}.weight", (N, D), E4M3)
        name = self._scale(stem)
        found = tensors.get(name, self._scales((N, D)), FLOATS).astype(np.float32)
        check_scales(tensors, name, found)
        return Matrix(q=finite(tensors, stem, q), scale=spread(found, self.block, (N, D)))

    def _scale(self, stem: str) -> str:
        return f"{stem}.weight_scale_inv" if self.block[0] else f"{stem}.weight_scale"

    def _scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not self.block[0]:
            return (1,)
        return tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))


def inputs(block: int, D: int) -> int:
    """Inputs of a group: as many of a block as divide a row whose last block is cut; 0: all of a row."""
    return int(np.gcd(block, D)) if block else 0


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """float32[N, groups]: scales of blocks, or of the whole matrix, for each row and group of inputs."""
    N, D = shape
    if not block[0]:
        return np.full((N, 1), scale.reshape(-1)[0], np.float32)
    group = inputs(block[1], D)
    rows, columns = np.arange(N) // block[0], np.arange(0, D, group) // block[1]
    return scale[rows][:, columns]


def check_scales(tensors: Tensors, name: str, scale: np.ndarray) -> None:
    """Refuse scales that are not finite or not positive."""
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise broken(tensors.path(name), "scales must be finite and positive", name)


def finite(tensors: Tensors, stem: str, q: np.ndarray) -> np.ndarray:
    """``q``, refused where it has NaN (0x7f and 0xff in e4m3)."""
    if (q.view(np.uint8) & 0x7F == 0x7F).any():
        name = f"{stem}.weight"
        raise broken(tensors.path(name), "has NaN values", name)
    return q


def read(config: Mapping[str, Any], dtype: str) -> tuple[Fp8, Fp8]:
    """The format of a ``quantization_config``.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    one_of(config, "fmt", "e4m3", None)
    one_of(config, "activation_scheme", "dynamic", None)
    size = config.get("weight_block_size")
    if size is not None and (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or n < 1 for n in size)
    ):
        refuse("weight_block_size", f"must be two positive numbers, not {size!r}")
    skipped = names(config, "modules_to_not_convert") or names(config, "ignored_layers")
    made = Fp8(
        block=(size[0], size[1]) if size else (0, 0), skipped=("lm_head", *skipped), dtype=dtype
    )
    return made, made
