"""Finds the model of ``jserve plan`` and ``jserve simulate``: family, dimensions and dtype, without weights.

It owns the three ways to name it: a shape of ``jserve.shapes``, a config.json, a directory or hub name that has
one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jserve.errors import ConfigError, WeightsError
from jserve.gguf.header import is_gguf
from jserve.model.arch import Arch
from jserve.model.dot import paths
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.mesh import AXIS, n_parts
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.model.quant import bytes_by_form
from jserve.model.rope import for_requests
from jserve.model.shard import ShardRules, padded
from jserve.shapes import SHAPES
from jserve.sim.costs import SimulatedModel
from jserve.weights import hf
from jserve.weights.place import placed
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import Source, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder without its weights."""

    name: str
    family: Family
    arch: Arch
    dtype: Any
    asked: str = ""
    """The name that ``find`` was asked for."""
    penalises: bool = False
    """As in ``Source``."""

    def specs(self, tp: int = 1) -> list[ParamSpec]:
        """Its parameters as ``tp`` devices keep them.

        Raises:
            ConfigError: it cannot be split over so many; ``field`` is the config.json key.
        """
        return jax.tree.leaves(self.family.specs(self.arch, tp), is_leaf=is_spec)

    @property
    def n_params(self) -> int:
        family = self.family.wide or self.family
        specs = jax.tree.leaves(family.specs(self.arch, 1), is_leaf=is_spec)
        return sum(math.prod(s.shape) for s in specs)

    @property
    def itemsize(self) -> float:
        """Bytes of a parameter that a token reads, on average: less than those of ``dtype`` where matrices are
        quantised."""
        if self.family.wide is None:
            return self.dtype.itemsize
        table = 0 if self.arch.tied else self.arch.V * self.arch.D * self.dtype.itemsize
        wide = device_bytes(self.family.wide.specs(self.arch, 1), self.dtype, 1) - table
        return self.dtype.itemsize * (self.weight_bytes - table) / wide

    def form_bytes(self) -> dict[str, int]:
        """Bytes of the parameters in each form, of one device that has all of them."""
        return bytes_by_form(self.family.specs(self.arch, 1), self.dtype)

    def paths(self, tp: int, level: str, rows: Iterable[int]) -> dict[str, dict[str, list[int]]]:
        """As ``dot.paths``, of the matrices of ``tp`` devices."""
        return paths(self.family.specs(self.arch, tp), level, rows)

    @property
    def weight_bytes(self) -> int:
        """On a device that has all of them."""
        return device_bytes(self.specs(), self.dtype, 1)

    def bytes_on(self, mesh: AbstractMesh, rules: ShardRules) -> int:
        """Bytes of the weights on each device of ``mesh``.

        Raises:
            ConfigError: as ``placed``.
        """
        specs = placed(partial(self.family.specs, self.arch), mesh, rules)
        return _bytes_under(specs, self.dtype, rules, mesh.shape)


def device_bytes(specs: Any, dtype: Any, tp: int) -> int:
    """Bytes of a tree of specs on one device of ``tp``: split weights divided, the others whole, as
    the engine counts them."""
    rules, sizes = ShardRules(), {AXIS: tp}
    return _bytes_under(padded(specs, rules, sizes), dtype, rules, sizes)


def _bytes_under(specs: Any, dtype: Any, rules: ShardRules, sizes: Mapping[str, int]) -> int:
    total = 0
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        size = math.prod(spec.shape) * jnp.dtype(spec.dtype or dtype).itemsize
        total += size // math.prod(n_parts(axis, sizes) for axis in rules.partition(spec.axes))
    return total


def find(
    name: str,
    revision: str = "",
    dtype: str = "auto",
    *,
    quantization: tuple[str, str] = ("auto", ""),
    max_model_len: int = 0,
) -> Model:
    """The model called ``name``; a directory comes before a known shape of that name.

    Args:
        quantization: the options ``quantization`` and ``quantization_config``.
        max_model_len: that option.

    Raises:
        ConfigError: nothing there, or a config.json that cannot be honoured; ``field`` is the key,
        the file or ``model``.
    """
    source = source_of(name, revision)
    config = source.config
    stated = hf.dtype_name(config) if dtype == "auto" else dtype
    scheme = scheme_of(config, stated, *quantization)
    family = quantised(family_for(config), scheme)
    arch = for_requests(family.arch(config), max_model_len)
    return Model(
        name=source.name,
        family=family,
        arch=arch,
        dtype=jnp.dtype(stated),
        asked=name,
        penalises=source.penalises,
    )


def simulated(name: str) -> SimulatedModel:
    """The model called ``name``, for a roofline.

    Raises:
        ConfigError: as ``find``, with ``roofline`` for ``model``.
    """
    try:
        model = find(name)
    except ConfigError as error:
        field = "roofline" if error.field == "model" else error.field
        raise ConfigError(f"roofline {name}: {error.message}", field=field) from None
    return SimulatedModel(name=name, arch=model.arch, itemsize=model.dtype.itemsize)


def source_of(name: str, revision: str = "", load_format: str = "dummy") -> Source:
    """Finds the files of ``name``. With another ``load_format`` than dummy also the weights of a directory, if there
    are any: names and sizes are looked at. From the hub no weights are fetched.

    Raises:
        ConfigError: nothing there; ``field`` is the file or ``model``.
    """
    path = Path(name)
    if not path.exists() and name.lower() in SHAPES:
        return _without_weights(name.lower(), path, SHAPES[name.lower()])
    if path.is_file() and not is_gguf(path):
        found = _without_weights(path.absolute().parent.name, path.parent, hf.read_json(path))
        return dataclasses.replace(found, generation=hf.read_generation_config(path.parent))
    try:
        return resolve(name, revision, load_format if path.exists() else "dummy")
    except WeightsError:
        return resolve(name, revision, "dummy")
    except ConfigError as error:
        if error.field != "model":
            raise
        known = f"{error.message}; known shapes: {', '.join(SHAPES)}"
        raise ConfigError(known, field="model") from None


def _without_weights(name: str, directory: Path, config: Mapping[str, Any]) -> Source:
    return Source(
        name=name,
        directory=directory,
        format="dummy",
        weights=directory,
        config=config,
        generation={},
    )
