"""Small model directories for the weight tests, written so that they can be broken anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jserve.model.arch import Arch
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.param_spec import is_spec
from jserve.weights.safetensors import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
BF16 = np.dtype(ml_dtypes.bfloat16)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def pack(tensors: Mapping[str, np.ndarray], pad: int = 8, edit: Any = None) -> bytes:
    """A safetensors file; ``edit`` may change the header dictionary before it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, blobs = 0, []
    for name, x in tensors.items():
        blob = np.ascontiguousarray(x).tobytes()
        offsets = [at, at + len(blob)]
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        at += len(blob)
        blobs.append(blob)
    if edit is not None:
        header = edit(header) or header
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % pad)
    return raw(text, b"".join(blobs))


def raw(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def tensors_of(
    family: Family, arch: Arch, dtype: Any = BF16, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random values for every checkpoint tensor of the family, all different."""
    rng = np.random.default_rng(seed)
    specs = jax.tree.leaves(family.specs(arch, 1), is_leaf=is_spec)
    shapes = {part.name: part.shape for spec in specs for part in spec.parts}
    return {n: rng.standard_normal(s).astype(np.float32).astype(dtype) for n, s in shapes.items()}


class Model:
    """A directory on disk with what was written into it."""

    def __init__(self, path: Path, config: Mapping[str, Any], dtype: Any = BF16) -> None:
        self.path = path
        self.config = dict(config)
        self.family = family_for(config)
        self.arch = self.family.arch(config)
        self.tensors = tensors_of(self.family, self.arch, dtype)
        path.mkdir(parents=True, exist_ok=True)
        self.write_json("config.json", self.config)

    def write_json(self, name: str, value: Any) -> None:
        (self.path / name).write_text(json.dumps(value))

    def single(self, edit: Any = None) -> Model:
        (self.path / "model.safetensors").write_bytes(pack(self.tensors, edit=edit))
        return self

    def sharded(self, n: int = 3) -> Model:
        """``n`` shards and an index; tensor i goes to shard i % n."""
        weight_map = {}
        for i in range(n):
            name = f"model-{i + 1:05}-of-{n:05}.safetensors"
            mine = dict(list(self.tensors.items())[i::n])
            (self.path / name).write_bytes(pack(mine))
            weight_map |= dict.fromkeys(mine, name)
        self.write_json("model.safetensors.index.json", {"weight_map": weight_map})
        return self


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of two arrays, dtype and shape included."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
