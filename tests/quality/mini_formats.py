"""The shipped model in formats that jserve does not write: rounded to the nearest, packed as their descriptions say."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jserve import build
from jserve.config import EngineConfig
from jserve.model.families import family_for
from jserve.model.quant import Form
from jserve.quality.texts import shipped, token_texts
from jserve.weights.offline.calibration import LayerStream
from jserve.weights.quant.rounding import scales_of
from jserve.weights.safetensors import SafetensorsFile
from jserve.weights.safetensors_writer import write_safetensors
from tests.model.assembly import assemble_all
from tests.weights import gguf_files
from tests.weights.test_weights_gguf import KEYS, gguf_name

Tensors = dict[str, np.ndarray]
GROUP, BLOCK = 64, 128
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def with_zeros(w_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values 0 to 15 [N, D], zeros 0 to 15 and float16 scales [N, B]) of groups, from least to most."""
    w_NBG = w_ND.reshape(len(w_ND), -1, GROUP)
    low, high = np.minimum(w_NBG.min(-1), 0), np.maximum(w_NBG.max(-1), 0)
    scale = ((high - low) / 15).astype(np.float16)
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(-low / wide), 0, 15).astype(np.int64)
    q = np.clip(np.rint(w_NBG / wide[..., None]) + zero[..., None], 0, 15).astype(np.int64)
    return q.reshape(w_ND.shape), zero, scale


def symmetric(w_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values 0 to 15 around 8, float16 scales of the least squared error)."""
    form = Form(kind="int4", group=GROUP, method="mse")
    scale = np.asarray(scales_of(jnp.asarray(w_ND), form)).astype(np.float16)
    w_NBG = w_ND.reshape(len(w_ND), -1, GROUP) / scale.astype(np.float32)[..., None]
    return (np.clip(np.rint(w_NBG), -8, 7) + 8).astype(np.int64).reshape(w_ND.shape), scale


def words(values: np.ndarray) -> np.ndarray:
    """int32[..., n / 8]: eight values of four bits to a word, the first lowest."""
    eight = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint32)
    return (eight << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def awq(name: str, w_ND: np.ndarray) -> Tensors:
    q, zero, scale = with_zeros(w_ND)

    def mixed(x: np.ndarray) -> np.ndarray:
        return words(x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape))

    return {"qweight": mixed(q.T), "qzeros": mixed(zero.T), "scales": scale.T.copy()}


def gptq(name: str, w_ND: np.ndarray) -> Tensors:
    q, zero, scale = with_zeros(w_ND)
    stored = (zero.T - 1) % 16
    return {
        "qweight": words(q).T.copy(),
        "qzeros": words(stored),
        "scales": scale.T.copy(),
        "g_idx": (np.arange(w_ND.shape[1]) // GROUP).astype(np.int32),
    }


def gptq_ordered(name: str, w_ND: np.ndarray) -> Tensors:
    """Groups of inputs in the order of their weights' sizes, for ``down``; the others' order is their own."""
    D = w_ND.shape[1]
    order = np.argsort(-np.square(w_ND).sum(0)) if "down_proj" in name else np.arange(D)
    q, scale = symmetric(w_ND[:, order])
    placed, group = np.empty_like(q), np.empty(D, np.int32)
    placed[:, order], group[order] = q, np.arange(D) // GROUP
    return {
        "qweight": words(placed).T.copy(),
        "qzeros": words(np.full(scale.T.shape, 7)),
        "scales": scale.T.copy(),
        "g_idx": group,
    }


def fp8_blocks(name: str, w_ND: np.ndarray) -> Tensors:
    N, D = w_ND.shape
    scale = np.ones((-(-N // BLOCK), -(-D // BLOCK)), np.float32)
    for a, b in np.ndindex(scale.shape):
        part = w_ND[a * BLOCK : (a + 1) * BLOCK, b * BLOCK : (b + 1) * BLOCK]
        scale[a, b] = np.abs(part).max() / 448
    spread = scale.repeat(BLOCK, 0)[:N].repeat(BLOCK, 1)[:, :D]
    return {"weight": (w_ND / spread).astype(E4M3), "weight_scale_inv": scale}


def fp8_rows(name: str, w_ND: np.ndarray) -> Tensors:
    scale = (np.abs(w_ND).max(1, keepdims=True) / 448).astype(np.float32)
    return {"weight": (w_ND / scale).astype(E4M3), "weight_scale": scale}


def floats4(w_NBG: np.ndarray) -> np.ndarray:
    """uint8[N, D / 2]: the nearest 4-bit floats, bit 3 their sign, the first of two in the low half."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    code = np.abs(np.abs(w_NBG)[..., None] - sizes).argmin(-1).astype(np.uint8)
    code = (code | (w_NBG < 0) << 3).astype(np.uint8).reshape(len(w_NBG), -1)
    return code[:, 0::2] | code[:, 1::2] << 4


def mxfp4(name: str, w_ND: np.ndarray) -> Tensors:
    w_NBG = w_ND.reshape(len(w_ND), -1, 32)
    power = np.floor(np.log2(np.abs(w_NBG).max(-1))) - 2
    packed = floats4(w_NBG / 2.0 ** power[..., None])
    return {"weight_packed": packed, "weight_scale": (power + 127).astype(np.uint8)}


def nvfp4(name: str, w_ND: np.ndarray) -> Tensors:
    w_NBG = w_ND.reshape(len(w_ND), -1, 16)
    of_all = np.float32(448 * 6 / np.abs(w_ND).max())
    scale = (np.abs(w_NBG).max(-1) / 6 * of_all).astype(E4M3)
    packed = floats4(w_NBG / (scale.astype(np.float32) / of_all)[..., None])
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": np.array([of_all], np.float32),
    }


@cache
def most() -> dict[str, float]:
    """Module -> the largest of its inputs on the texts that ship for calibration."""
    config = EngineConfig.of(dtype="float32")
    texts = token_texts(build.text_side(config), shipped("calibration.jsonl"))[:128]
    source = build.located(config)
    family = family_for(source.config)
    arch, specs = family.arch(source.config), family.specs(family.arch(source.config), 1)
    params = assemble_all(specs, shipped_tensors().__getitem__, jnp.float32)
    stream, found = LayerStream(arch, texts), {}
    stream.enter(params["embed"])
    for layer, p in enumerate(params["layers"]):
        for name, stats in stream.stats(layer, p).items():
            for part in specs["layers"][layer][name].parts:
                found[part.name.removesuffix(".weight")] = float(np.asarray(stats.most_D).max())
        stream.pass_layer(layer, p)
    return found


def static(kind: str, name: str, w_ND: np.ndarray) -> Tensors:
    """A scale of the matrix and one of its inputs, by the largest of each."""
    top = {"float": 448, "int": 127}[kind]
    scale = np.abs(w_ND).max() / top
    q = w_ND / scale
    return {
        "weight": q.astype(E4M3) if kind == "float" else np.rint(q).astype(np.int8),
        "weight_scale": np.array([scale], np.float32),
        "input_scale": np.array([most()[name] / top], np.float32),
    }


def compressed(fmt: str, kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": more.get("size")}
    inputs = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": weights | {"symmetric": True, "dynamic": False},
        "input_activations": inputs if more.get("inputs") else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


OF_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[str, np.ndarray], Tensors], dict[str, Any]]] = {
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
    ),
    "gptq 4 bits, zeros": (gptq, OF_GPTQ | {"sym": False, "desc_act": False}),
    "gptq ordered": (gptq_ordered, OF_GPTQ | {"sym": True, "desc_act": True}),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "fp8 rows": (fp8_rows, compressed("float-quantized", "float", 8, "channel")),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", "float", 4, "group", size=32)),
    "nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", "float", 4, "tensor_group", size=16)),
    "fp8 static": (
        partial(static, "float"),
        compressed("float-quantized", "float", 8, "tensor", inputs=True),
    ),
    "int8 static": (
        partial(static, "int"),
        compressed("int-quantized", "int", 8, "tensor", inputs=True),
    ),
}
"""Name -> (tensors of a matrix, ``quantization_config``)."""


def shipped_tensors() -> Tensors:
    """float32."""
    file = SafetensorsFile(build.shipped() / "model.safetensors")
    return {name: np.array(file.read(name)).astype(np.float32) for name in file.tensors}


def written(path: Path, name: str) -> Path:
    """The directory of the shipped model in a format of ``FORMATS``, or the GGUF file in a type of GGUF."""
    path.mkdir()
    tensors = shipped_tensors()
    if name not in FORMATS:
        return _gguf(path, tensors)
    pack, section = FORMATS[name]
    for key in [n for n in tensors if n.endswith("_proj.weight")]:
        stem = key.removesuffix(".weight")
        made = pack(stem, tensors.pop(key))
        tensors |= {f"{stem}.{ending}": x for ending, x in made.items()}
    write_safetensors(path / "model.safetensors", tensors)
    for file in build.shipped().iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (path / file.name).symlink_to(file)
    config = json.loads((build.shipped() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return path


def q4_1(w_ND: np.ndarray) -> bytes:
    """Blocks of 32: scale, least, and value j in the low half of byte j beside value 16 + j."""
    w = w_ND.reshape(-1, 32)
    least = w.min(-1)
    scale = ((w.max(-1) - least) / 15).astype(np.float16)
    least = least.astype(np.float16)
    above = w - least.astype(np.float32)[:, None]
    q = np.clip(np.rint(above / scale.astype(np.float32)[:, None]), 0, 15).astype(np.uint8)
    halves = [x[:, None].view(np.uint8) for x in (scale, least)]
    return np.concatenate([*halves, q[:, :16] | q[:, 16:] << 4], axis=1).tobytes()


def _gguf(path: Path, tensors: Tensors) -> Path:
    config = json.loads((build.shipped() / "config.json").read_text())
    metadata = {"general.architecture": "qwen3"} | {
        f"qwen3.{key}": config[of] for key, of in KEYS.items() if config.get(of) is not None
    }
    made = {}
    for name, x in tensors.items():
        kind = "Q4_1" if name.endswith("_proj.weight") else "F32"
        stored = q4_1(x) if kind == "Q4_1" else gguf_files.plain("F32", x)
        made[gguf_name(name, False)] = (kind, x.shape, stored)
    file = path / "mini.gguf"
    file.write_bytes(gguf_files.gguf(metadata, made))
    return file
