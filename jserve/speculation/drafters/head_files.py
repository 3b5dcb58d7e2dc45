"""Reads the directory of a speculative head: its tensors, sizes and renamed specs.

It owns which tensors are there, sizes that must be the target's, and specs whose tensors stand under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jserve.model.hf_values import integer, refuse
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.speculation.drafters.drafter import Drafter
from jserve.weights.hf import Tensors
from jserve.weights.source import Source


@dataclass(frozen=True, slots=True)
class Head:
    """A drafter's head as its directory describes it."""

    drafter: Drafter
    unread: tuple[str, ...] = ()
    """Tensors of the format that are not loaded."""


class HeadFiles:
    """config.json and the tensors of a head's directory; dummy weights have no tensors."""

    def __init__(self, source: Source) -> None:
        self.config: Mapping[str, Any] = source.config
        self.directory: Path = source.directory
        self.dummy = source.format == "dummy"
        self.tensors = Tensors(source.weights) if source.format == "safetensors" else None

    def names(self) -> set[str]:
        """Of the tensors, without the ``model.`` that some exporters put before them."""
        if self.tensors is None:
            return set()
        return {name.removeprefix("model.") for name in self.tensors.names()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor, None if it is not there."""
        if self.tensors is None or name not in self.names():
            return None
        return self.tensors.shape(name)


def must_be(config: Mapping[str, Any], key: str, size: int) -> None:
    """Refuse a size that config.json states and that is not the target's."""
    if config.get(key) is not None and integer(config, key) != size:
        refuse(key, f"is {config[key]}, the target's is {size}")


def must_be_off(config: Mapping[str, Any], *keys: str) -> None:
    """Refuse switches that are on."""
    for key in keys:
        if config.get(key):
            refuse(key, f"{config[key]!r} is not supported in a head")


def renamed(specs: Any, rename: Callable[[str], str]) -> Any:
    """The tree of specs, its checkpoint tensors under other names."""

    def one(spec: ParamSpec) -> ParamSpec:
        return replace(spec, parts=tuple(replace(p, name=rename(p.name)) for p in spec.parts))

    return jax.tree.map(one, specs, is_leaf=is_spec)
