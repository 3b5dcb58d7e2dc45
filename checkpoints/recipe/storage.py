"""Training state on disk: one safetensors file, replaced atomically.

Owns the file format. Leaves are stored in tree order; the structure comes from a fresh state, so a
checkpoint only loads into the configuration that wrote it. No pickle.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def save_state(path: Path, state, about: dict) -> None:
    leaves = {f"{i:04d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(leaves, str(partial), metadata={"about": json.dumps(about)})
    os.replace(partial, path)


def load_state(path: Path, like) -> tuple[Any, dict]:
    """The stored state in the structure of `like`, and what was noted about it."""
    with safe_open(str(path), "numpy") as file:
        leaves = [file.get_tensor(name) for name in sorted(file.keys())]
        about = json.loads(file.metadata()["about"])
    expected = jax.tree.leaves(like)
    if [x.shape for x in leaves] != [x.shape for x in expected]:
        raise ValueError(f"{path} was written by another configuration")
    return jax.tree.unflatten(jax.tree.structure(like), leaves), about
