"""Places parameters that a user passes in (say, from training) where the engine wants them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jserve.errors import WeightsError
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.model.quant import Form, QTensor
from jserve.model.shard import ShardRules
from jserve.weights.layout import relayout
from jserve.weights.place import matrices, named, sharding_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A leaf that was handed over, and the parameter that it is."""

    name: str
    array: Any
    """A numpy or jax array of the shape of ``spec`` or ``base``, not deleted; floating, or of the very type of
    ``spec`` where that is an integer or a small float."""
    spec: ParamSpec
    base: ParamSpec
    """The same parameter on one device."""


def matched(params: Any, specs: Any, canonical: Any = None) -> list[Match]:
    """The leaves of ``params`` by parameter, in the order of ``specs``; nothing is copied.

    ``params`` is the same tree of jax or numpy arrays (lists may be dicts with the index as key,
    int or str), a flax ``nnx.State``, or nested mappings of nnx variables. ``canonical``
    (``family.specs(arch, 1)``) also admits parameters in the layout of one device where the specs
    repeat kv heads or pad the vocabulary. Where ``specs`` are of quantised matrices, these are ``QTensor``s
    of the same form.

    Raises:
        WeightsError: a path is missing or unknown, or a leaf was deleted, has another shape, form or
            dtype; ``field`` is ``params.<path>``.
    """
    given = _arrays(dict(leaves_of(params)), specs)
    wanted = named(specs)
    _check_paths(given, [name for name, _ in wanted])
    bases = wanted if canonical is None else named(canonical)
    return [
        Match(name=name, array=_checked(given[name], name, spec, base), spec=spec, base=base)
        for (name, spec), (_, base) in zip(wanted, bases, strict=True)
    ]


def adopt(
    params: Any, specs: Any, mesh: Mesh, rules: ShardRules, dtype: Any, *, canonical: Any = None
) -> Any:
    """A copy of ``params`` as a tree like ``specs``, cast and sharded: it shares no buffer with
    ``params``, which ``matched`` describes.

    Raises:
        WeightsError: as ``matched``.
        ConfigError: the mesh does not fit the rules.
    """
    leaves = []
    for match in matched(params, specs, canonical):
        spec = match.spec
        sharding = sharding_of(spec, match.name, mesh, rules)
        placed = place(match.array, match.base, spec, sharding, spec.dtype or dtype)
        # One parameter at a time: the copies of a cast or a new layout are gone before the next one.
        leaves.append(jax.block_until_ready(jnp.copy(placed)))
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def place(array: Any, base: ParamSpec, spec: ParamSpec, sharding: Any, dtype: Any) -> jax.Array:
    """``array``, laid out by ``spec`` or ``base``, as ``spec`` lays it out, cast and sharded."""
    if array.shape != spec.shape:
        array = relayout(array, base, spec, jnp.concatenate)
    if array.dtype != dtype:
        array = array.astype(dtype)
    return jax.device_put(array, sharding)


def in_host_memory(match: Match, dtype: Any) -> np.ndarray:
    """The parameter as its spec lays it out, cast; it may share memory with ``match.array``."""
    array = np.asarray(match.array)
    if array.shape != match.spec.shape:
        array = relayout(array, match.base, match.spec)
    return array.astype(dtype, copy=False)


def is_nnx_state(tree: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(tree, nnx.State)


def _nnx() -> Any:
    """The module, None where nobody has loaded it: whoever has its types has. It takes a start 0.2 s."""
    return sys.modules.get("flax.nnx")


def leaves_of(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(dotted path, array) of every leaf."""
    if is_nnx_state(tree):
        tree = _nnx().to_pure_dict(tree)
    elif (nnx := _nnx()) is not None and isinstance(tree, nnx.Variable):
        tree = tree[...]
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_of(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from leaves_of(value, (*path, str(i)))
    else:
        yield ".".join(path), tree


def has_quantised(params: Any) -> bool:
    """True if a matrix of a tree that was handed over is quantised."""
    return any(isinstance(x, QTensor) for _, x in leaves_of(params))


def _arrays(given: dict[str, Any], specs: Any) -> dict[str, Any]:
    """``given`` with the arrays of a quantised matrix by names of their own, ``layers.0.qkv.q`` and so on.

    Raises:
        WeightsError: a matrix is quantised and the specs' is not, or the reverse, or is in another form.
    """
    wanted = matrices(specs)
    found: dict[str, Any] = {}
    for name, leaf in given.items():
        spec = wanted.get(name)
        if spec is not None and isinstance(leaf, QTensor) != isinstance(spec, QTensor):
            found_as, wanted_as = (
                "not quantised" if not isinstance(x, QTensor) else x.form.name for x in (leaf, spec)
            )
            raise _refused(name, f"is {found_as}, must be {wanted_as}")
        if not isinstance(leaf, QTensor):
            found[name] = leaf
            continue
        if isinstance(spec, QTensor):
            _check_form(name, leaf.form, spec.form)
        found |= {f"{name}.{part}": x for part, x in leaf.arrays().items()}
    return found


def _check_form(name: str, got: Form, wanted: Form) -> None:
    """Refuse another form. The method that chose numbers, and the type of the model beside them, may differ."""
    pairs = [(f.name, getattr(got, f.name), getattr(wanted, f.name)) for f in fields(Form)]
    differ = [
        pair
        for pair in pairs
        if pair[0] not in ("dtype", "method", "made_as") and pair[1] != pair[2]
    ]
    if differ:
        whys = ", ".join(f"{field} {a!r}, must be {b!r}" for field, a, b in differ)
        raise _refused(name, f"is in another form: {whys}")


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
    if is_exact(spec.dtype):
        if array.dtype != spec.dtype:
            raise _refused(name, f"dtype {array.dtype}, must be {np.dtype(spec.dtype)}")
    elif not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise _refused(name, f"dtype {array.dtype}, must be bf16, f16 or f32")
    if isinstance(array, jax.Array) and array.is_deleted():
        raise _refused(name, "its buffer was deleted (donated to a jitted function?)")
    return array


def is_exact(dtype: Any) -> bool:
    """True for integers and small floats, that others cannot be cast to."""
    if dtype is None:
        return False
    return not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2


def _refused(name: str, why: str) -> WeightsError:
    return WeightsError(f"params.{name}: {why}", field=f"params.{name}")
