"""Parameters that a user hands over (say, from training) put where the engine wants them.

Owns matching a tree of arrays against the specs. Must not know families or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jserve.errors import WeightsError
from jserve.model.shard import ParamSpec, ShardRules, is_spec
from jserve.weights.layout import relayout
from jserve.weights.place import named, sharding_of


def adopt(
    params: Any, specs: Any, mesh: Mesh, rules: ShardRules, dtype: Any, *, canonical: Any = None
) -> Any:
    """``params`` as a tree like ``specs``: cast and resharded; no copy where both fit already.

    ``params`` is the same tree of jax or numpy arrays (lists may be dicts with the index as key,
    int or str), a flax ``nnx.State``, or nested mappings of nnx variables. ``canonical``
    (``family.specs(arch, 1)``) also admits parameters in the layout of one device where the specs
    repeat kv heads.

    Raises:
        WeightsError: a path is missing or unknown, or a leaf has another shape or no floating
            dtype; ``field`` is ``params.<path>``.
        ConfigError: the mesh does not fit the rules.
    """
    given = dict(_leaves(params, ()))
    wanted = named(specs)
    _check_paths(given, [name for name, _ in wanted])
    plain = (
        [spec for _, spec in named(canonical)] if canonical is not None else [s for _, s in wanted]
    )
    leaves = []
    for (name, spec), base in zip(wanted, plain, strict=True):
        array = _checked(given[name], name, spec, base)
        sharding = sharding_of(spec, name, mesh, rules)
        leaves.append(place(array, base, spec, sharding, spec.dtype or dtype))
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def place(array: Any, base: ParamSpec, spec: ParamSpec, sharding: Any, dtype: Any) -> jax.Array:
    """``array``, laid out by ``spec`` or ``base``, as ``spec`` lays it out, cast and sharded."""
    if array.shape != spec.shape:
        array = relayout(array, base, spec, jnp.concatenate)
    if array.dtype != dtype:
        array = array.astype(dtype)
    return jax.device_put(array, sharding)


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """(dotted path, array) of every leaf."""
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    if isinstance(tree, nnx.Variable):
        tree = tree[...]
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, (*path, str(i)))
    else:
        yield ".".join(path), tree


def _check_paths(given: Mapping[str, Any], wanted: list[str]) -> None:
    missing = [name for name in wanted if name not in given]
    if missing:
        raise _refused(missing[0], f"missing ({len(missing)} of {len(wanted)} are)")
    extra = sorted(set(given) - set(wanted))
    if extra:
        raise _refused(extra[0], f"no such parameter ({len(extra)} unknown)")


def _checked(array: Any, name: str, spec: ParamSpec, base: ParamSpec) -> Any:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise _refused(name, f"not an array but {type(array).__name__}")
    if tuple(array.shape) not in (spec.shape, base.shape):
        raise _refused(name, f"shape {tuple(array.shape)}, must be {spec.shape}")
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise _refused(name, f"dtype {array.dtype}, must be bf16, f16 or f32")
    return array


def _refused(name: str, why: str) -> WeightsError:
    return WeightsError(f"params.{name}: {why}", field=f"params.{name}")
