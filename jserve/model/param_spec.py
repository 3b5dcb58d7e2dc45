"""A weight is declared once: its shape, its logical axes, where it lies in a checkpoint, how to draw it.

It owns ``ParamSpec``. Everything else (abstract trees, shardings, loading, dummy weights) is a ``tree.map`` over specs;
``jserve.weights`` reads ``Part``s. Idea: jax-llm-examples' ArrayInfo.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jserve.model.mesh import MeshAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One checkpoint tensor inside a parameter, or some of its rows: reshaped to ``view``, its axis-0 entries
    repeated ``repeat`` times, then laid along the parameter's ``concat`` axis after the parts before
    it."""

    name: str
    shape: tuple[int, ...]
    """Shape in the checkpoint; anything else is refused."""
    view: tuple[int, ...]
    """As many entries as follow row ``first``, or fewer where other parts read the rest."""
    repeat: int = 1
    first: int = 0
    """Row of the tensor that the part begins with."""
    cut: tuple[int, ...] = ()
    """The shape that the whole tensor has before ``order`` and ``within``, which make it ``view``; (): there are
    neither."""
    order: tuple[int, ...] = ()
    """The axes of ``cut``, as they follow each other in ``view``, the first one first; (): as they are."""
    scales: str = ""
    """The tensor of the scales, where this one is mxfp4 (``jserve.weights.mxfp4``): then ``shape`` is that of its
    blocks, ``cut`` that of its numbers, and there is an ``order``."""
    within: tuple[int, int] | None = None
    """First and end of the entries along axis 1 that belong to the part; None: all."""

    @property
    def n_rows(self) -> int:
        """Rows of the tensor that the part reads."""
        if self.cut:
            return self.shape[0]
        return math.prod(self.view) // math.prod(self.shape[1:])

    def seen(self, tensor: Any) -> Any:
        """The part's entries of ``tensor`` (shape ``shape``) as ``view``; a view, unless an ``order`` forbids it."""
        if self.cut:
            x = tensor.reshape(self.cut)
            x = x.transpose(self.order) if self.order else x
            x = x if self.within is None else x[:, self.within[0] : self.within[1]]
            return x.reshape(self.view)
        if self.n_rows != self.shape[0]:
            tensor = tensor[self.first : self.first + self.n_rows]
        return tensor.reshape(self.view)

    def entry(self, tensor: Any, i: int) -> Any:
        """``seen(tensor)[i]`` of a part with an ``order``, as a view: ``seen`` would make an array as large as the
        tensor, of which ``tensor[e]`` is all that is read."""
        n = self.view[0] // self.cut[0]
        x = tensor[i // n].reshape(self.cut[1:]).transpose([axis - 1 for axis in self.order[1:]])
        return x if n == 1 else x[i % n]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The experts of a layer that a parameter has along its first axis."""

    n: int
    width_key: str
    """The key of config.json that says how wide one is; errors name it."""


@dataclass(frozen=True, slots=True)
class OnMesh:
    """A dimension that lies over these mesh axes, whatever the rules say."""

    axis: MeshAxis
    path: str = ""
    """The key of ``ShardRules.params`` that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter: concatenation of ``parts`` along ``concat`` (one part: the part itself)."""

    shape: tuple[int, ...]
    axes: tuple[str | OnMesh | None, ...]
    """Logical axis per dimension, a key of ``ShardRules``, or None; or where it lies."""
    parts: tuple[Part, ...]
    concat: int = 0
    init: float = 0.02
    """Standard deviation of dummy weights."""
    init_mean: float = 0.0
    dtype: Any = None
    """None: the model's dtype."""
    positive: bool = False
    """Values at or below zero in a checkpoint are an error."""
    pad: int = 0
    """Entries at the end of ``concat`` that no part fills and nothing reads."""
    copies: int = 0
    """Entries at the end of ``concat`` that repeat its first ones: spare slots of experts, as they are before any
    expert moves."""
    experts: ExpertSizes | None = None
    """Of a parameter of experts."""
    spellings: tuple[tuple[Part, ...], ...] = ()
    """Other parts that give the same parameter, of checkpoints that lack the first of ``parts`` and have the first of
    these."""


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def spelled(specs: Any, has: Callable[[str], bool]) -> Any:
    """``specs`` with the parts that a checkpoint has; ``has`` says whether it has a tensor of this name. Where it has
    none of the spellings the first one stays, for errors to name."""

    def one(spec: ParamSpec) -> ParamSpec:
        ways = (spec.parts, *spec.spellings)
        parts = next((p for p in ways if p and has(p[0].name)), spec.parts)
        return replace(spec, parts=parts, spellings=())

    return jax.tree.map(one, specs, is_leaf=is_spec)


def dtype_of(params: Any, specs: Any) -> Any:
    """The model's dtype: that of the parameters whose spec names none."""
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    return next(x.dtype for x, spec in leaves if spec.dtype is None)
