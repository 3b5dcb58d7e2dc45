"""bitsandbytes checkpoints: NF4 and FP4 in blocks, and int8 of rows.

4 bits  weight                   uint8[N * D / 2, 1]   codes row by row, the first of two in the high half
        weight.absmax            float32[blocks], or uint8 where the scales are quantised, too:
        weight.quant_map         float32[16]           number of a code
        weight.nested_absmax     float32[blocks / 256], weight.nested_quant_map float32[256]
        weight.quant_state.bitsandbytes__nf4 (or fp4)  uint8: a JSON object: shape, blocksize, nested_offset
8 bits  weight                   int8[N, D]
        SCB                      float32[N]            w = q * SCB / 127

Sixteen numbers of a table are no whole numbers, so 4 bits are served in the type of the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.quant import WIDE, Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.floats import matrix_shape, scales
from jserve.weights.quant.matrix import Matrix
from jserve.weights.quant.values import is_linear, names, one_of, refuse
from jserve.weights.safetensors import broken

log = logging.getLogger(__name__)

STATE = "weight.quant_state.bitsandbytes__"
MAX_STATE = 4096
"""Bytes of the JSON object of a matrix."""
MOST = 1 << 40
"""Numbers of a matrix."""
ROUNDED = "int8 activations with outliers (llm_int8_threshold) stay as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipping:
    """The modules of either: all but those named in part."""

    skipped: tuple[str, ...]
    dtype: str

    def has(self, module: str) -> bool:
        parts = module.split(".")
        return is_linear(module) and not any(
            name in parts or module == name or f"{name}." in module for name in self.skipped
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb8(Skipping):
    """int8 of rows."""

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        return Form(kind="int8", dtype=self.dtype) if self.has(module) else None

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        N, D = matrix_shape(tensors, f"{stem}.weight", ("int8",))
        tensors.check(f"{stem}.SCB", (N,), FLOATS)
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``."""
        N, D = self.check(tensors, stem)
        if tensors.has(name := f"{stem}.weight_format"):
            layout = int(tensors.get(name, (1,), ("uint8",)).reshape(-1)[0])
            if layout:
                raise broken(tensors.path(name), f"layout {layout}, only 0 (row) is read", name)
        found = scales(tensors, f"{stem}.SCB", (N,)) / np.float32(127)
        return Matrix(q=tensors.get(f"{stem}.weight", (N, D), ("int8",)), scale=found[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb4(Skipping):
    """NF4 or FP4 in blocks."""

    kind: str
    """nf4 or fp4."""

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        return Form(kind=WIDE, dtype=self.dtype) if self.has(module) else None

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        state = self._state(tensors, stem)
        N, D = state.shape
        tensors.check(f"{stem}.weight", (N * D // 2, 1), ("uint8",))
        tensors.check(f"{stem}.weight.quant_map", (16,), FLOATS)
        blocks = N * D // state.block
        kinds = ("uint8",) if state.nested else FLOATS
        tensors.check(f"{stem}.weight.absmax", (blocks,), kinds)
        if state.nested:
            tensors.check(f"{stem}.weight.nested_quant_map", (256,), FLOATS)
            nested = (-(-blocks // state.nested),)
            tensors.check(f"{stem}.weight.nested_absmax", nested, FLOATS)
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``; the numbers of the table are ``q``, as float32."""
        N, D = self.check(tensors, stem)
        state = self._state(tensors, stem)
        stored = tensors.get(f"{stem}.weight", (N * D // 2, 1), ("uint8",)).reshape(-1)
        codes = np.stack([stored >> 4, stored & 15], axis=-1).reshape(N, D)
        table = tensors.get(f"{stem}.weight.quant_map", (16,), FLOATS).astype(np.float32)
        scale = _absmax(tensors, stem, N * D // state.block, state)
        # A block of zeros has a scale of 0; scales that are quantised, too, may be rounded to less.
        signed = not state.nested and (scale < 0).any()
        if signed or not np.isfinite(scale).all() or not np.isfinite(table).all():
            name = f"{stem}.weight.absmax"
            why = "scales must be finite and not negative"
            raise broken(tensors.path(name), why, name)
        return Matrix(q=table[codes], scale=scale.reshape(N, -1))

    def _state(self, tensors: Tensors, stem: str) -> QuantState:
        name = f"{stem}.{STATE}{self.kind}"
        shape = tensors.shape(name)
        if len(shape) != 1 or not 0 < shape[0] <= MAX_STATE:
            raise broken(tensors.path(name), f"shape {shape} is no short text", name)
        try:
            return QuantState.of(json.loads(tensors.get(name, shape, ("uint8",)).tobytes()))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            why = f"is no JSON object of a matrix: {str(error)[:80]}"
            raise broken(tensors.path(name), why, name) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantState:
    """The JSON object of a matrix."""

    shape: tuple[int, int]
    block: int
    """Numbers that share a scale."""
    nested: int
    """Scales that share one; 0: they are not quantised."""
    offset: float

    @classmethod
    def of(cls, given: Any) -> QuantState:
        """Raises ValueError, KeyError or TypeError for any other object."""
        N, D = (_natural(n) for n in given["shape"])
        block, nested = _natural(given["blocksize"]), "nested_blocksize" in given
        if N * D > MOST or D % block:
            raise ValueError(f"blocks of {block} in a matrix {(N, D)}; they must divide a row")
        return cls(
            shape=(N, D),
            block=block,
            nested=_natural(given["nested_blocksize"]) if nested else 0,
            offset=float(given["nested_offset"]) if nested else 0.0,
        )


def _natural(n: Any) -> int:
    if type(n) is not int or not 0 < n <= MOST:
        raise ValueError(f"{n!r} is no size")
    return n


def _absmax(tensors: Tensors, stem: str, blocks: int, state: QuantState) -> np.ndarray:
    """float32[blocks]."""
    name = f"{stem}.weight.absmax"
    if not state.nested:
        return tensors.get(name, (blocks,), FLOATS).astype(np.float32)
    codes = tensors.get(name, (blocks,), ("uint8",))
    table = tensors.get(f"{stem}.weight.nested_quant_map", (256,), FLOATS).astype(np.float32)
    shape = (-(-blocks // state.nested),)
    of = tensors.get(f"{stem}.weight.nested_absmax", shape, FLOATS).astype(np.float32)
    return table[codes] * of.repeat(state.nested)[:blocks] + np.float32(state.offset)


def read(config: Mapping[str, Any], dtype: str) -> tuple[Bnb8, Bnb8] | tuple[Bnb4, Bnb4]:
    """The format of a ``quantization_config``.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    four = one_of(config, "load_in_4bit", True, False, None)
    eight = one_of(config, "load_in_8bit", True, False, None)
    skipped = ("lm_head", *names(config, "llm_int8_skip_modules"))
    if bool(four) == bool(eight):
        refuse("load_in_4bit", "either this or load_in_8bit must be true")
    if eight:
        log.warning("bitsandbytes int8: %s", ROUNDED)
        made8 = Bnb8(skipped=skipped, dtype=dtype)
        return made8, made8
    kind = one_of(config, "bnb_4bit_quant_type", "nf4", "fp4", None) or "fp4"
    one_of(config, "bnb_4bit_quant_storage", "uint8", None)
    made = Bnb4(kind=kind, skipped=skipped, dtype=dtype)
    return made, made
