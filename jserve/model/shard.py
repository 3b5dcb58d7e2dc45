"""A weight is declared once: its shape, its logical axes, where it lies in a checkpoint, how to
draw it.

Owns ``ParamSpec`` and the rules that map logical axes to mesh axes. Everything else (abstract
trees, shardings, loading, dummy weights) is a ``tree.map`` over specs. Idea: jax-llm-examples'
ArrayInfo. Must not know file formats; ``jserve.weights`` reads ``Part``s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jserve.errors import ConfigError

AXIS = "tp"
"""The tensor-parallel mesh axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One checkpoint tensor inside a parameter: reshaped to ``view``, its axis-0 entries repeated
    ``repeat`` times, then laid along the parameter's ``concat`` axis after the parts before
    it."""

    name: str
    shape: tuple[int, ...]
    """Shape in the checkpoint; anything else is refused."""
    view: tuple[int, ...]
    repeat: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter: concatenation of ``parts`` along ``concat`` (one part: the part itself)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis per dimension, a key of ``ShardRules`` or None."""
    parts: tuple[Part, ...]
    concat: int = 0
    init: float = 0.02
    """Standard deviation of dummy weights."""
    init_mean: float = 0.0
    dtype: Any = None
    """None: the model's dtype."""
    positive: bool = False
    """Values at or below zero in a checkpoint are an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRules:
    """Logical axis -> mesh axis (None: replicated)."""

    vocab: str | None = AXIS
    kv_heads: str | None = AXIS
    ffn: str | None = AXIS
    embed: str | None = None
    extra: dict[str, str | None] = field(default_factory=dict)

    def partition(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        return PartitionSpec(*(self._axis(a) for a in axes))

    def _axis(self, name: str | None) -> str | None:
        if name is None:
            return None
        return self.extra[name] if name in self.extra else getattr(self, name)

    def sharding(self, mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, self.partition(axes))


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def partitions(specs: Any, rules: ShardRules) -> Any:
    """The tree of PartitionSpecs of a tree of ParamSpecs."""
    return jax.tree.map(lambda s: rules.partition(s.axes), specs, is_leaf=is_spec)


def shardings(specs: Any, mesh: Mesh, rules: ShardRules) -> Any:
    """The tree of NamedShardings of a tree of ParamSpecs."""
    return jax.tree.map(lambda s: rules.sharding(mesh, s.axes), specs, is_leaf=is_spec)


def abstract(specs: Any, mesh: Mesh, rules: ShardRules, dtype: Any) -> Any:
    """ShapeDtypeStructs with shardings, for ahead-of-time compilation and restore."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(
            s.shape, s.dtype or dtype, sharding=rules.sharding(mesh, s.axes)
        ),
        specs,
        is_leaf=is_spec,
    )


def make_mesh(tp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A one-axis mesh of the first ``tp`` devices, Auto (shard_map refuses Explicit axes).

    Raises:
        ConfigError: fewer devices than ``tp``.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < tp:
        raise ConfigError(
            f"tensor_parallel_size {tp} exceeds the {len(devices)} devices of this machine",
            field="tensor_parallel_size",
        )
    return jax.make_mesh((tp,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:tp])
