"""The tensors of a GGUF file under the names of a Hugging Face checkpoint.

It owns what that format does to them: rows of queries and keys of Llamas lie in another order, norms of Gemmas have 1
added, and tables of embeddings are quantised, which ``read`` decodes. Quantised matrices are blocks for
``jserve.weights.quant.gguf``.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jserve.gguf import header
from jserve.gguf.config import ROPE_FACTORS, ArchitectureKeys
from jserve.gguf.names import hf_name
from jserve.gguf.types import QUANTISED, n_bytes
from jserve.weights.quant.gguf import BLOCKS
from jserve.weights.quant.gguf_blocks import decoded
from jserve.weights.quant.values import is_linear
from jserve.weights.safetensors import TensorInfo, broken

DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PAIRED = ("llama",)
"""Architectures whose rows of queries and keys lie in pairs that turn together."""
PLUS_ONE = ("gemma", "gemma2", "gemma3")
"""Architectures whose norms are stored plus 1."""


class GgufFile:
    """A checked, mapped file, as ``SafetensorsFile``.

    Raises:
        WeightsError: as ``jserve.gguf.header.read``.
    """

    __slots__ = ("_architecture", "_heads", "_kinds", "_map", "path", "tensors")

    def __init__(self, path: Path) -> None:
        found = header.read(path)
        self.path, self._map = path, header.mapped(path)
        self._architecture = architecture = str(found.metadata.get("general.architecture"))
        keys = ArchitectureKeys(found, architecture)
        heads = keys.size("attention.head_count")
        self._heads = {"q_proj": heads, "k_proj": keys.size("attention.head_count_kv", heads)}
        kept = {k: v for k, v in found.tensors.items() if k != ROPE_FACTORS}  # the config has it
        named = [_named(hf_name(k, architecture) or k, v) for k, v in kept.items()]
        self._kinds = {name: v.kind for (name, _), v in zip(named, kept.values(), strict=True)}
        self.tensors: Mapping[str, TensorInfo] = dict(named)

    def read(self, name: str) -> np.ndarray:
        """Tensor ``name``: a view of the file, or a copy where it is not stored as it is asked for."""
        info, kind = self.tensors[name], self._kinds[name]
        flat = np.frombuffer(self._map, np.uint8, info.stop - info.start, info.start)
        if kind in QUANTISED and not name.endswith(BLOCKS):
            rows = flat.reshape(-1, n_bytes(kind, info.shape[-1]))
            return decoded(kind, rows).widened().reshape(info.shape)
        found = flat.view(info.dtype).reshape(info.shape)
        if self._architecture in PLUS_ONE and name.endswith("norm.weight"):
            return found - np.asarray(1, found.dtype)
        part = name.split(".")[-2] if "." in name else ""
        if self._architecture not in PAIRED or part not in self._heads:
            return found
        if len(found) % (2 * self._heads[part]):
            raise broken(self.path, f"{len(found)} rows of {self._heads[part]} heads", name)
        return found[_halves(len(found), self._heads[part])]

    def drop_pages(self) -> None:
        """As ``SafetensorsFile.drop_pages``."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _named(name: str, info: header.GgufTensor) -> tuple[str, TensorInfo]:
    """The name and place of a tensor: the blocks of a quantised matrix, else its numbers."""
    dtype, shape = np.dtype(DTYPES.get(info.kind, np.float32)), info.shape
    module, _, ending = name.rpartition(".")
    if info.kind in QUANTISED and ending == "weight" and is_linear(module):
        name, dtype = module + BLOCKS, np.dtype(np.uint8)
        shape = (*shape[:-1], n_bytes(info.kind, shape[-1]))
    return name, TensorInfo(dtype=dtype, shape=shape, start=info.start, stop=info.stop)


def _halves(rows: int, heads: int) -> np.ndarray:
    """The rows in the order of a rope that turns both halves of a head: of pairs, all firsts, then all seconds."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
