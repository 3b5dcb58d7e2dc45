"""Parameters from checkpoint tensors in plain numpy: what ``Part`` means, and what loaders must agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.param_spec import ParamSpec, is_spec, spelled

Get = Callable[[str], np.ndarray]
"""Name of a tensor of the checkpoint -> the tensor."""


def assemble(spec: ParamSpec, get: Get) -> np.ndarray:
    """The whole parameter, padding as zeros."""
    pieces = []
    for part in spec.parts:
        x = np.asarray(get(part.name))
        assert x.shape == part.shape, part.name
        if part.cut:
            x = x.reshape(part.cut).transpose(part.order or range(len(part.cut)))
            low, high = part.within or (0, x.shape[1])
            x = x.take(range(low, high), axis=1)
        rows = x.reshape(x.shape[0], -1).ravel()[part.first * (x.size // x.shape[0]) :]
        x = rows[: np.prod(part.view)].reshape(part.view)
        pieces.append(np.repeat(x, part.repeat, axis=0))
    pad = [(0, spec.pad if d == spec.concat else 0) for d in range(len(spec.shape))]
    whole = np.pad(np.concatenate(pieces, axis=spec.concat), pad)
    return np.concatenate([whole, whole[: spec.copies]]).reshape(spec.shape)


def assemble_all(specs: Any, get: Get, dtype: Any) -> Any:
    """The parameter tree of ``specs``, unsharded, on the default device."""
    specs = spelled(specs, lambda name: _has(get, name))
    return jax.tree.map(
        lambda s: jnp.asarray(assemble(s, get), s.dtype or dtype), specs, is_leaf=is_spec
    )


def _has(get: Get, name: str) -> bool:
    try:
        get(name)
    except (KeyError, StopIteration):
        return False
    return True
