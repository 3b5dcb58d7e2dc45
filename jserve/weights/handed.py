"""Reads weights that are handed over while the engine runs, whatever form they have, into a tree of parameters::

    the tree of the engine, an nnx state                as it is
    a mapping or an iterable of (checkpoint name, array)    put together in host memory, parameter by parameter
    a directory of safetensors or of Orbax              read onto the devices, as at a start

An iterable is read as it comes, and its arrays are let go once their parameter is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import WeightsError
from jserve.model.arch import Arch
from jserve.model.family import Family
from jserve.model.param_spec import ParamSpec
from jserve.model.rope import for_requests
from jserve.weights.adopt import is_nnx_state
from jserve.weights.layout import join
from jserve.weights.loader import load
from jserve.weights.place import bad_values, named
from jserve.weights.source import resolve


def from_directory(
    path: str | Path, family: Family, arch: Arch, mesh: Any, rules: Any, dtype: Any
) -> Any:
    """The parameters of a directory, on the devices as ``load`` lays them; of an Orbax checkpoint in host memory, since
    to restore it onto devices compiles programs.

    Raises:
        WeightsError, ConfigError: as ``load``.
        WeightsError: config.json is of another model; ``field`` is the directory.
    """
    source = resolve(str(path))
    if source.config.get("quantization_config"):
        raise WeightsError(f"{path}: a quantised checkpoint cannot be handed over", field=str(path))
    plain = replace(arch, sinks=0, kv_forms=(), kv_rotated=False)  # these are options of the engine
    if for_requests(family.arch(source.config), arch.max_position) != plain:
        raise WeightsError(f"{path}: config.json is of another model", field=str(path))
    if source.format == "orbax":
        from jserve.weights import orbax  # half a second that few updates need

        return orbax.in_host_memory(source.weights, family.specs(arch, 1))
    return load(family, arch, source, mesh, rules, dtype)


def named_arrays(source: Any) -> Iterator[tuple[str, Any]] | None:
    """The (checkpoint name, array) pairs of ``source``; None where it is a tree."""
    if is_nnx_state(source):
        return None
    if isinstance(source, Mapping):
        flat = all(isinstance(k, str) and hasattr(x, "shape") for k, x in source.items())
        dotted = any("." in str(name) for name in source)
        return iter(source.items()) if flat and dotted else None
    return iter(source) if isinstance(source, Iterable) and not hasattr(source, "shape") else None


def from_names(
    pairs: Iterable[tuple[str, Any]], specs: Any, *, ignore: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Path in ``specs`` -> parameter, of those whose tensors are among ``pairs``.

    Args:
        pairs: names as in ``ParamSpec.parts``, with or without the prefix ``model.``, and arrays of numpy, jax or
            any that numpy can read.
        specs: the parameters on one device.
        ignore: names that a checkpoint may have beside those of its parameters.

    Raises:
        WeightsError: a name that no parameter has, one that comes twice, another shape, no floating dtype, values
            that are not finite, or a parameter of which some tensors are missing; ``field`` is ``params.<name>``.
    """
    wanted = [(path, ways) for path, spec in named(specs) for ways in [_ways(spec)]]
    readers = _readers(wanted)
    held: dict[str, np.ndarray] = {}
    made: dict[str, np.ndarray] = {}
    seen: set[str] = set()
    for given, array in _pairs(pairs):
        name = next((n for n in _spellings(given) if n in readers), None)
        if name is None and given in ignore:
            continue
        if name is None:
            raise _refused(given, "no parameter of this model has such a tensor")
        if name in seen:
            raise _refused(given, "came twice")
        seen.add(name)
        held[name] = _checked(given, array, readers[name])
        for path, spec in readers[name]:
            if path not in made and all(part.name in held for part in spec.parts):
                made[path] = join(spec, held)
        if all(path in made for path, _ in readers[name]):
            _let_go(held, made, readers)
    for name in held:
        path, spec = next((p, s) for p, s in readers[name] if p not in made)
        lacking = next(part.name for part in spec.parts if part.name not in held)
        raise _refused(lacking, f"missing, and {name} came, which {path} has beside it")
    return made


Readers = dict[str, list[tuple[str, ParamSpec]]]
"""Checkpoint name -> the (path, spec) of each parameter that has a part of it."""


def _ways(spec: ParamSpec) -> list[ParamSpec]:
    """``spec`` with each of its spellings for parts."""
    ways = [parts for parts in (spec.parts, *spec.spellings) if parts]
    return [replace(spec, parts=parts, spellings=()) for parts in ways]


def _readers(wanted: list[tuple[str, list[ParamSpec]]]) -> Readers:
    readers: Readers = {}
    for path, ways in wanted:
        for spec in ways:
            for name in dict.fromkeys(part.name for part in spec.parts):
                readers.setdefault(name, []).append((path, spec))
    return readers


def _let_go(held: dict[str, Any], made: Mapping[str, Any], readers: Readers) -> None:
    """Drop the tensors that no parameter waits for any more."""
    for name in [n for n in held if all(path in made for path, _ in readers[n])]:
        del held[name]


def _pairs(pairs: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            what = type(pair).__name__
            raise WeightsError(f"params: not (name, array) but {what}", field="params")
        yield pair[0], pair[1]


def _spellings(name: str) -> tuple[str, ...]:
    return name, name.removeprefix("model."), f"model.{name}"


def _checked(name: str, array: Any, readers: list[tuple[str, ParamSpec]]) -> np.ndarray:
    if isinstance(array, jax.Array) and array.is_deleted():
        raise _refused(name, "its buffer was deleted (donated to a jitted function?)")
    array = np.asarray(array)
    shape = next(p.shape for _, s in readers for p in s.parts if p.name in _spellings(name))
    if array.shape != shape:
        raise _refused(name, f"shape {array.shape}, must be {shape}")
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise _refused(name, f"dtype {array.dtype}, must be bf16, f16 or f32")
    why = bad_values(array, "sample")
    if why:
        raise _refused(name, why)
    return array


def _refused(name: str, why: str) -> WeightsError:
    return WeightsError(f"params.{name}: {why}", field=f"params.{name}")
