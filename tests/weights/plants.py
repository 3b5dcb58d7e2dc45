"""Faults that readers of quantised weights are known for, each as a patch that a test and the quality gate must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import kv_bytes, quant
from jserve.weights.quant import awq, compressed, fp8, gptq, tensors

Patch = pytest.MonkeyPatch


def nibble_order(patch: Patch) -> None:
    """The second of two values first."""
    real = compressed.fields

    def swapped(words: np.ndarray, bits: int) -> np.ndarray:
        found = real(words, bits)
        return found.reshape(*found.shape[:-1], -1, 2)[..., ::-1].reshape(found.shape)

    patch.setattr(compressed, "fields", swapped)


def awq_order(patch: Patch) -> None:
    """Columns as they lie."""
    patch.setattr(awq, "ORDER", tuple(range(8)))


def missing_one(patch: Patch) -> None:
    """Zeros of version 1 as they are stored."""
    real = gptq._of
    patch.setattr(gptq, "_of", lambda *args: replace(real(*args), version=2))


def next_scale(patch: Patch) -> None:
    """Each group has the scale of the one after it."""
    real = compressed._scales
    patch.setattr(compressed, "_scales", lambda *args: np.roll(real(*args), -1, axis=1))


def doubled_layer(patch: Patch) -> None:
    """Scales of the last matrix of layer 1, twice as large."""
    real = compressed._scales

    def scales(of: Any, stem: str, *args: Any) -> np.ndarray:
        return real(of, stem, *args) * (2 if "layers.1.mlp.down" in stem else 1)

    patch.setattr(compressed, "_scales", scales)


def block_index(patch: Patch) -> None:
    """Each block of rows has the scale of the one after it."""
    real = fp8.spread
    patch.setattr(fp8, "spread", lambda s, *args: real(np.roll(s, -1, axis=0), *args))


def _stored(patch: Patch, ending: str, only: str, change: Callable[[Any], Any]) -> None:
    real = tensors.QuantisedTensors._stored

    def stored(self: Any, module: str, end: str, shape: tuple[int, ...]) -> np.ndarray:
        found = real(self, module, end, shape)
        return change(found) if end == ending and only in module else found

    patch.setattr(tensors.QuantisedTensors, "_stored", stored)


def skipped_order(patch: Patch) -> None:
    """Inputs of ``down`` as they come."""
    _stored(patch, tensors.ORDER, "down_proj", lambda x: np.arange(len(x), dtype=np.int32))


def dropped_shift(patch: Patch) -> None:
    _stored(patch, tensors.SHIFT, "", np.zeros_like)


READ: dict[str, tuple[Callable[[Patch], None], str]] = {
    "nibble order": (nibble_order, "pack-quantized"),
    "awq order": (awq_order, "awq"),
    "missing +1": (missing_one, "gptq 4 bits, zeros"),
    "next group's scale": (next_scale, "pack-quantized"),
    "doubled scales of one layer": (doubled_layer, "pack-quantized"),
    "skipped order of down": (skipped_order, "gptq ordered"),
    "block index off by one": (block_index, "fp8 blocks"),
    "shift dropped": (dropped_shift, "Q4_1"),
}
"""Faults in what is read of a file, and a format that has them: one of ``tests.weights``, or a type of GGUF."""


def kv_scale_of_another_head(patch: Patch) -> None:
    """The scale that lies behind an int8 vector is that of the head before."""

    def encode(x: jax.Array) -> jax.Array:
        scale = kv_bytes._or_nan(x, jnp.abs(x).max(-1, keepdims=True) * (1 / 127))
        q = jnp.clip(jnp.round(kv_bytes._ratio(x, scale)), -127, 127).astype(jnp.int8)
        return jnp.concatenate([q, kv_bytes._bytes(jnp.roll(scale, 1, axis=-2))], axis=-1)

    patch.setattr(kv_bytes, "_encode_int8", encode)


def scale_per_tensor(patch: Patch) -> None:
    """Activations share the scale of the largest of all tokens."""

    def rounded(x_TBG: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        scale_TB = jnp.full(x_TBG.shape[:2], jnp.max(jnp.abs(x_TBG)) / 127)
        return jnp.round(x_TBG / scale_TB[..., None]).astype(jnp.int8), scale_TB

    patch.setattr(quant, "rounded", rounded)


def with_swapped_kv_scales(load: Callable[..., Any]) -> Callable[..., Any]:
    """``load`` whose scales of kv heads that lie twice, 0 0 1 1, are 0 1 0 1."""

    def loaded(*args: Any, **how: Any) -> Any:
        params = load(*args, **how)
        for layer in params["layers"]:
            qkv: quant.QTensor = layer["qkv"]
            assert qkv.shape[0] == 4
            moved = qkv.scale.at[:, -2:].set(qkv.scale[jnp.array([0, 2, 0, 2]), -2:])
            layer["qkv"] = replace(qkv, scale=jax.device_put(moved, qkv.scale.sharding))
        return params

    return loaded
