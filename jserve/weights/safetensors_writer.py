"""Writes one safetensors file, as ``weights.safetensors`` reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jserve.weights.safetensors import DTYPES

NAMES = {kind: name for name, kind in DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write ``tensors`` to ``path``, which appears whole or not at all; the same tensors give the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    header, at = {}, 0
    ordered = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    for name, x in ordered.items():
        header[name] = {
            "dtype": NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [at, at + x.nbytes],
        }
        at += x.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in ordered.values():
            file.write(x.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
