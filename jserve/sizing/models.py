"""The model that ``jserve plan`` is asked about: its family, dimensions and dtype, and no weights.

Owns the three ways to name it: a shape of ``jserve.shapes``, a config.json, a directory or hub name
that has one. Must not know devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.family import Arch, Family
from jserve.model.shard import ParamSpec, ShardRules, is_spec
from jserve.shapes import SHAPES
from jserve.sim.roofline import Shape
from jserve.weights import hf
from jserve.weights.source import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder without its weights."""

    name: str
    family: Family
    arch: Arch
    dtype: Any

    def specs(self, tp: int = 1) -> list[ParamSpec]:
        """Its parameters as ``tp`` devices keep them.

        Raises:
            ConfigError: it cannot be split over so many; ``field`` is the config.json key.
        """
        return jax.tree.leaves(self.family.specs(self.arch, tp), is_leaf=is_spec)

    @property
    def n_params(self) -> int:
        return sum(math.prod(s.shape) for s in self.specs())

    def weight_bytes(self, tp: int) -> int:
        """Of one device: split weights divided, replicated ones whole, as the engine counts them."""
        rules, total = ShardRules(), 0
        for spec in self.specs(tp):
            size = math.prod(spec.shape) * jnp.dtype(spec.dtype or self.dtype).itemsize
            total += size // (tp if any(rules.partition(spec.axes)) else 1)
        return total


def shape_of(arch: Arch, itemsize: int) -> Shape:
    """What a roofline asks of an architecture; ``itemsize``: bytes of a weight."""
    return Shape(
        layers=arch.L,
        hidden=arch.D,
        ffn=arch.F,
        heads=arch.N,
        kv_heads=arch.K,
        head=arch.H,
        vocab=arch.V,
        context=arch.max_position,
        tied=arch.tied,
        itemsize=itemsize,
        window=arch.widest,
    )


def find(name: str, revision: str = "", dtype: str = "auto") -> Model:
    """The model called ``name``; a directory comes before a known shape of that name.

    Raises:
        ConfigError: nothing there, or a config.json that cannot be honoured; ``field`` is the key,
        the file or ``model``.
    """
    title, config = _config(name, revision)
    family = family_for(config)
    stated = hf.dtype_name(config) if dtype == "auto" else dtype
    return Model(name=title, family=family, arch=family.arch(config), dtype=jnp.dtype(stated))


def _config(name: str, revision: str) -> tuple[str, Mapping[str, Any]]:
    path = Path(name)
    if not path.exists() and name.lower() in SHAPES:
        return name.lower(), SHAPES[name.lower()]
    if path.is_file():
        return path.absolute().parent.name, hf.read_json(path)
    try:
        source = resolve(name, revision, "dummy")
    except ConfigError as error:
        if error.field != "model":
            raise
        known = f"{error.message}; known shapes: {', '.join(SHAPES)}"
        raise ConfigError(known, field="model") from None
    return source.name, source.config
