"""Quantised checkpoints of every format, packed value by value as the formats' descriptions say.

Independent of jserve's readers: plain loops over Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
Tensors = dict[str, np.ndarray]

Packer = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]
"""(rng, N, D) -> (tensors by ending, float32[N, D] that they stand for)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format with one choice of its options."""

    config: Mapping[str, Any]
    pack: Packer
    form: str = "int4"
    """In which a matrix of gate and up is served on one device, see ``test_weights_quant.said``."""


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """int32[rows, ceil(n / (32 // bits))]: values along a row, lowest bits first."""
    per, (rows, n) = 32 // bits, values.shape
    made = np.zeros((rows, -(-n // per)), np.uint32)
    for r in range(rows):
        for i in range(n):
            made[r, i // per] |= np.uint32(int(values[r, i]) << (bits * (i % per)))
    return made.view(np.int32)


def dense_words(values: np.ndarray, bits: int) -> np.ndarray:
    """int32[rows, ceil(n * bits / 32)]: values end to end."""
    made = []
    for row in values:
        line = sum(int(v) << (bits * i) for i, v in enumerate(row))
        n = -(-len(row) * bits // 32)
        made.append([(line >> (32 * k)) & 0xFFFFFFFF for k in range(n)])
    return np.array(made, np.uint32).view(np.int32)


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return rng.uniform(0.002, 0.02, shape).astype(dtype)


def awq(group: int, zeros: bool) -> Format:
    def pack(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        B = D // group
        q, z = (
            rng.integers(0, 16, (D, N)),
            rng.integers(0, 16, (B, N)) if zeros else np.full((B, N), 8),
        )
        s = scales(rng, (B, N), np.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def mixed(x: np.ndarray) -> np.ndarray:
            return words(x.reshape(len(x), -1, 8)[:, :, order].reshape(len(x), -1), 4)

        made = {"qweight": mixed(q), "scales": s} | ({"qzeros": mixed(z)} if zeros else {})
        at = np.arange(D) // group
        return made, ((q - z[at]).astype(np.float32) * s[at].astype(np.float32)).T

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": zeros,
        "version": "gemm",
    }
    return Format(config=config, pack=pack, form=f"int4 g{group}" + " zeros" * zeros)


def order_of(D: int) -> np.ndarray:
    """The group of each input is that of its place in this order; one of all matrices with D inputs."""
    return np.random.default_rng(D).permutation(D)


def gptq(bits: int, group: int, symmetric: bool, version: int, order: bool = False) -> Format:
    def pack(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        B, top = (D // group if group > 0 else 1), 2**bits
        z = np.full((B, N), top // 2) if symmetric else rng.integers(0, top, (B, N))
        q, s = rng.integers(0, top, (D, N)), scales(rng, (B, N), np.float16)
        stored = (z - 1) % top if version == 1 else z
        into = words if 32 % bits == 0 else dense_words
        made = {"qweight": into(q.T, bits).T.copy(), "qzeros": into(stored, bits), "scales": s}
        at = (order_of(D) if order else np.arange(D)) // (D // B)
        made["g_idx"] = at.astype(np.int32)
        return made, ((q - z[at]).astype(np.float32) * s[at].astype(np.float32)).T

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    kind = "int8" if bits == 8 else "int4"
    form = kind + f" g{group}" * (group > 0) + " zeros" * (not symmetric) + " ordered" * order
    return Format(config=config, pack=pack, form=form)


def fp8_blocks(
    rng: np.random.Generator, N: int, D: int, block: int, ending: str
) -> tuple[Tensors, np.ndarray]:
    q = rng.normal(0, 60, (N, D)).astype(E4M3)
    s = scales(rng, (-(-N // block), -(-D // block)))
    wide = q.astype(np.float32)
    for n in range(N):
        for d in range(D):
            wide[n, d] *= s[n // block, d // block]
    return {"weight": q, ending: s}, wide


def fp8(block: int) -> Format:
    def pack(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        if block:
            return fp8_blocks(rng, N, D, block, "weight_scale_inv")
        q, s = rng.normal(0, 60, (N, D)).astype(E4M3), scales(rng, (1,))
        return {"weight": q, "weight_scale": s}, q.astype(np.float32) * s

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Format(
        config=config | ({"weight_block_size": [block, block]} if block else {}),
        pack=pack,
        form="e4m3" + f" g{int(np.gcd(block, 64))}" * (block > 0) + " rounded",
    )


def compressed(fmt: str, weights: Mapping[str, Any], **group: Any) -> Format:
    bits, strategy = weights["num_bits"], weights["strategy"]
    size, symmetric = weights.get("group_size", 0), weights.get("symmetric", True)
    dense, order = group.pop("dense", False), bool(weights.get("actorder"))
    form = group.pop("form", "")

    def pack(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        B, top = (D // size if strategy == "group" else 1), 2 ** (bits - 1)
        if strategy == "block":
            return fp8_blocks(rng, N, D, weights["block_structure"][0], "weight_scale")
        s = scales(rng, (1,) if strategy == "tensor" else (N, B))
        if weights["type"] == "float":
            q = rng.normal(0, 60, (N, D)).astype(E4M3)
            return {"weight": q, "weight_scale": s}, q.astype(np.float32) * s
        q = rng.integers(-top, top, (N, D))
        z = np.zeros((N, B), int) if symmetric else rng.integers(-top, top, (N, B))
        z = np.full((N, B), z[0, 0]) if strategy == "tensor" else z
        at, wide_s = np.arange(D) // (D // B), np.broadcast_to(s, (N, B))
        at = order_of(D) // (D // B) if order else at
        wide = (q - z[:, at]).astype(np.float32) * wide_s[:, at]
        if fmt != "pack-quantized":
            made = {"weight": q.astype(np.int8), "weight_scale": s}
            z = z[0] if strategy == "tensor" else z
            return made | ({} if symmetric else {"weight_zero_point": z.astype(np.int8)}), wide
        into = dense_words if dense else words
        made = {
            "weight_packed": into(q + top, bits),
            "weight_scale": s.astype(ml_dtypes.bfloat16),
            "weight_shape": np.array([N, D], np.int64),
        }
        wide_s = made["weight_scale"].astype(np.float32)
        if order:
            made["weight_g_idx"] = at.astype(np.int32)
        if not symmetric:
            made["weight_zero_point"] = into((z + top).T, bits).T.copy()
        return made, (q - z[:, at]).astype(np.float32) * wide_s[:, at]

    scheme = {"weights": {"symmetric": True, "dynamic": False, **weights}, "targets": ["Linear"]}
    config = {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme | group},
    }
    return Format(config=config, pack=pack, form=form)


TOKEN8 = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FORMATS: dict[str, Format] = {
    "awq": awq(32, True),
    "awq without zeros": awq(32, False),
    "gptq 4 bits": gptq(4, 32, True, 1),
    "gptq 4 bits, zeros": gptq(4, 32, False, 1),
    "gptq version 2": gptq(4, 32, False, 2),
    "gptq version 2, symmetric": gptq(4, 32, True, 2),
    "gptq 8 bits, rows": gptq(8, -1, True, 1),
    "gptq 2 bits": gptq(2, 64, False, 1),
    "gptq 2 bits, symmetric": gptq(2, 32, True, 1),
    "gptq 3 bits": gptq(3, 32, False, 1),
    "gptq 3 bits, symmetric": gptq(3, 32, True, 2),
    "gptq ordered": gptq(4, 32, True, 1, order=True),
    "gptq ordered, zeros": gptq(8, 16, False, 2, order=True),
    "fp8": fp8(0),
    "fp8 blocks": fp8(40),
    "float-quantized": compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        input_activations=TOKEN8 | {"type": "float"},
        form="e4m3 rounded",
    ),
    "float of a matrix": compressed(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, form="e4m3"
    ),
    "float blocks": compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [40, 40]},
        input_activations=TOKEN8 | {"type": "float", "strategy": "group"},
        form="e4m3 g8 rounded",
    ),
    "int-quantized": compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        input_activations=TOKEN8 | {"type": "int"},
        form="int8 rounded",
    ),
    "naive-quantized": compressed(
        "naive-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        input_activations=TOKEN8 | {"type": "int"},
        form="int8 rounded",
    ),
    "naive-quantized, float": compressed(
        "naive-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        input_activations=TOKEN8 | {"type": "float"},
        form="e4m3 rounded",
    ),
    "int of a matrix, zeros": compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False},
        form="int8 zeros",
    ),
    "int-quantized, zeros": compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        form="int8 zeros",
    ),
    "pack-quantized": compressed("pack-quantized", INT4, form="int4 g32"),
    "pack-quantized, zeros": compressed(
        "pack-quantized", INT4 | {"symmetric": False}, form="int4 g32 zeros"
    ),
    "pack 3 bits": compressed("pack-quantized", INT4 | {"num_bits": 3}, form="int4 g32"),
    "pack 3 bits, dense": compressed(
        "pack-quantized", INT4 | {"num_bits": 3}, dense=True, form="int4 g32"
    ),
    "pack 2 bits": compressed("pack-quantized", INT4 | {"num_bits": 2}, form="int4 g32"),
    "pack 5 bits": compressed("pack-quantized", INT4 | {"num_bits": 5}, form="int8 g32"),
    "pack 5 bits, dense": compressed(
        "pack-quantized", INT4 | {"num_bits": 5}, dense=True, form="int8 g32"
    ),
    "pack 6 bits": compressed("pack-quantized", INT4 | {"num_bits": 6}, form="int8 g32"),
    "pack 6 bits, dense, zeros": compressed(
        "pack-quantized",
        INT4 | {"num_bits": 6, "symmetric": False},
        dense=True,
        form="int8 g32 zeros",
    ),
    "pack 7 bits": compressed("pack-quantized", INT4 | {"num_bits": 7}, form="int8 g32"),
    "pack 7 bits, dense": compressed(
        "pack-quantized", INT4 | {"num_bits": 7}, dense=True, form="int8 g32"
    ),
    "pack 8 bits": compressed(
        "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, form="int8"
    ),
    "pack ordered": compressed(
        "pack-quantized", INT4 | {"actorder": "group"}, form="int4 g32 ordered"
    ),
}
