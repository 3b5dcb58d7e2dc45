"""Quantised checkpoints in 4-bit floats, small scales, tables and other forms, packed value by value.

Independent of jserve's readers: plain loops over Python numbers, as the formats' descriptions say.
"""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np

from tests.weights.quant_files import E4M3, Format, Tensors, compressed, fp8_blocks, gptq, scales

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def floats4(codes: np.ndarray) -> np.ndarray:
    """float32: e2m1 of each code, bit 3 its sign."""
    return np.array(
        [[MAGNITUDES[c & 7] * (-1.0 if c & 8 else 1.0) for c in row] for row in codes], np.float32
    )


def bytes_of(codes: np.ndarray, first_high: bool = False) -> np.ndarray:
    """uint8[rows, n / 2]: two codes in a byte, the first in the low half, or in the high one."""
    rows = []
    for row in codes:
        pairs = [(int(row[i]), int(row[i + 1])) for i in range(0, len(row), 2)]
        rows.append([a << 4 | b if first_high else a | b << 4 for a, b in pairs])
    return np.array(rows, np.uint8)


def repeated(x: np.ndarray, g: int) -> np.ndarray:
    return np.array([[row[d // g] for d in range(len(row) * g)] for row in x], x.dtype)


def e4m3_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.1, 400, shape).astype(E4M3)


def nvfp4(divisor: bool) -> Any:
    """compressed-tensors has the scale of the matrix as a divisor, modelopt as a factor."""

    def pack(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        codes, s = rng.integers(0, 16, (N, D)), e4m3_scales(rng, (N, D // 16))
        if divisor:
            of_all = np.array([rng.uniform(5000, 9000)], np.float32)
            wide = floats4(codes) * repeated(s.astype(np.float32) / of_all, 16)
            names = ("weight_packed", "weight_global_scale", "input_global_scale")
        else:
            of_all = np.array(rng.uniform(1e-4, 2e-4), np.float32)
            wide = floats4(codes) * repeated(s.astype(np.float32) * of_all, 16)
            names = ("weight", "weight_scale_2", "input_scale")
        values = (bytes_of(codes), of_all, np.ones(1, np.float32))
        return dict(zip(names, values, strict=True)) | {"weight_scale": s}, wide

    return pack


def mx(bits: int) -> Any:
    """Groups of 32 whose scales are exponents of two."""

    def pack(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        exponents = rng.integers(115, 123, (N, D // 32)).astype(np.uint8)
        s = repeated(np.array([[2.0 ** (int(e) - 127) for e in r] for r in exponents]), 32)
        if bits == 4:
            codes = rng.integers(0, 16, (N, D))
            made, q = {"weight_packed": bytes_of(codes)}, floats4(codes)
        else:
            q8 = rng.normal(0, 60, (N, D)).astype(E4M3)
            made, q = {"weight": q8}, q8.astype(np.float32)
        return made | {"weight_scale": exponents}, q * s.astype(np.float32)

    return pack


def microscaled(fmt: str, pack: Any, bits: int, strategy: str, group: int, form: str) -> Format:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group}
    config = compressed(fmt, weights, input_activations=weights | {"dynamic": "local"}).config
    return Format(config=config, pack=pack, form=form)


def modelopt(algo: str, pack: Any, form: str) -> Format:
    config = {"quant_method": "modelopt", "quant_algo": algo, "exclude_modules": ["lm*"]}
    return Format(config=config, pack=pack, form=form)


def static(pack: Any) -> Any:
    """With a scale of activations."""

    def packed(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        made, wide = pack(rng, N, D)
        return made | {"input_scale": np.array(0.01 + 0.001 * (N % 7), np.float32)}, wide

    return packed


def fp8_matrix(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
    q, s = rng.normal(0, 60, (N, D)).astype(E4M3), scales(rng, ())
    return {"weight": q, "weight_scale": s}, q.astype(np.float32) * s


def fp8_powers(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
    made, _ = fp8_blocks(rng, N, D, 32, "weight_scale_inv")
    s = made["weight_scale_inv"].astype(E8M0)
    rows = [[float(s[n // 32, d // 32]) for d in range(D)] for n in range(N)]
    wide = made["weight"].astype(np.float32) * np.array(rows, np.float32)
    return made | {"weight_scale_inv": s}, wide


def fp8_bf16(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
    made, _ = fp8_blocks(rng, N, D, 32, "weight_scale_inv")
    s = made["weight_scale_inv"].astype(ml_dtypes.bfloat16)
    rows = [[float(s[n // 32, d // 32]) for d in range(D)] for n in range(N)]
    wide = made["weight"].astype(np.float32) * np.array(rows, np.float32)
    return made | {"weight_scale_inv": s}, wide


def fbgemm(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
    q, s = rng.normal(0, 60, (N, D)).astype(E4M3), scales(rng, (N, 1))
    bound = np.array([1200.0], np.float32)
    made = {"weight": q, "weight_scale": s, "input_scale_ub": bound}
    return made, q.astype(np.float32) * s


def bnb4(kind: str, nested: bool) -> Format:
    def pack(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
        table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        codes, blocks = rng.integers(0, 16, N * D), N * D // 32
        absmax = rng.uniform(0.05, 0.2, blocks).astype(np.float32)
        state = {"shape": [N, D], "blocksize": 32, "dtype": "float32", "quant_type": kind}
        made = {"weight": bytes_of(codes[None], first_high=True).reshape(-1, 1)}
        if nested:
            u8, small = rng.integers(0, 256, blocks), np.linspace(-1, 1, 256, dtype=np.float32)
            of = rng.uniform(0.01, 0.05, -(-blocks // 256)).astype(np.float32)
            absmax = np.array([small[u] * of[i // 256] for i, u in enumerate(u8)], np.float32)
            absmax = absmax + np.float32(0.125)
            state |= {"nested_blocksize": 256, "nested_offset": 0.125, "nested_dtype": "float32"}
            made |= {"weight.nested_absmax": of, "weight.nested_quant_map": small}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        made |= {
            "weight.absmax": u8.astype(np.uint8) if nested else absmax,
            "weight.quant_map": table,
            f"weight.quant_state.bitsandbytes__{kind}": text,
        }
        wide = np.array([table[c] * absmax[i // 32] for i, c in enumerate(codes)], np.float32)
        return made, wide.reshape(N, D)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Format(config=config, pack=pack, form="wide")


def bnb8(rng: np.random.Generator, N: int, D: int) -> tuple[Tensors, np.ndarray]:
    q, scb = rng.integers(-127, 128, (N, D)), rng.uniform(0.5, 2, N).astype(np.float32)
    made = {"weight": q.astype(np.int8), "SCB": scb, "weight_format": np.zeros((), np.uint8)}
    return made, q.astype(np.float32) * (scb / np.float32(127))[:, None]


def auto_round(packing: str, of: Format) -> Format:
    config = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": 32,
        "sym": of.config.get("sym", False),
    }
    return Format(config=config, pack=of.pack, form=of.form)


E4M3_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT8_TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor"}
MX = ("group", 32)
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def more(awq: Format, packed: Format) -> dict[str, Format]:
    """Formats by name."""
    of_matrix = compressed("float-quantized", E4M3_TENSOR)
    fp8 = {"quant_method": "fp8"}
    return {
        "nvfp4": microscaled(
            "nvfp4-pack-quantized", nvfp4(True), 4, "tensor_group", 16, "e2m1 g16"
        ),
        "mxfp4": microscaled("mxfp4-pack-quantized", mx(4), 4, *MX, "e2m1 g32"),
        "mxfp8": microscaled("mxfp8-quantized", mx(8), 8, *MX, "e4m3 g32"),
        "float static": Format(
            config=compressed(
                "float-quantized", E4M3_TENSOR, input_activations=E4M3_TENSOR | {"dynamic": False}
            ).config,
            pack=static(of_matrix.pack),
            form="e4m3 static",
        ),
        "fp8 static": Format(
            config=fp8 | {"activation_scheme": "static"},
            pack=static(fp8_matrix),
            form="e4m3 static",
        ),
        "fp8 powers of two": Format(
            config=fp8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
            pack=fp8_powers,
            form="e4m3 g32 rounded",
        ),
        "fp8 blocks, bfloat16 scales": Format(
            config=fp8 | {"weight_block_size": [32, 32]}, pack=fp8_bf16, form="e4m3 g32 rounded"
        ),
        "int static": Format(
            config=compressed(
                "int-quantized", INT8_TENSOR, input_activations=INT8_TENSOR | {"dynamic": False}
            ).config,
            pack=static(compressed("int-quantized", INT8_TENSOR).pack),
            form="int8 static",
        ),
        "fbgemm": Format(
            config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            pack=fbgemm,
            form="e4m3 bounded",
        ),
        "modelopt fp8": modelopt("FP8", static(fp8_matrix), "e4m3 static"),
        "modelopt nvfp4": modelopt("NVFP4", nvfp4(False), "e2m1 g16"),
        "nf4": bnb4("nf4", False),
        "fp4, nested": bnb4("fp4", True),
        "bitsandbytes int8": Format(config=BNB8, pack=bnb8, form="int8"),
        "auto-round gptq": auto_round("auto_round:auto_gptq", gptq(4, 32, True, 1)),
        "auto-round awq": auto_round("auto_round:auto_awq", awq),
        "auto-round fp8": Format(
            config=fp8
            | {"quant_method": "auto-round", "packing_format": "auto_round:fp8"}
            | {"weight_block_size": [32, 32]},
            pack=fp8_bf16,
            form="e4m3 g32 rounded",
        ),
        "auto-round llm_compressor": Format(
            config=dict(packed.config)
            | {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            pack=packed.pack,
            form=packed.form,
        ),
    }
