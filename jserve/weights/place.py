"""Places parameters on a mesh, one shard at a time.

It owns names of parameters, their shardings, what of a user's rules cannot be honoured, the walk over the spec tree
and the check of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jserve.errors import ConfigError
from jserve.model.mesh import n_parts
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.model.quant import QTensor
from jserve.model.shard import Axes, ShardRules, padded, rule
from jserve.weights.layout import Index, check

Progress = Callable[[str, int, int], None]
"""(parameter just loaded, bytes so far, bytes in all)."""

Make = Callable[[ParamSpec, NamedSharding], jax.Array]

Then = Callable[[str, jax.Array], Any]
"""(name of a parameter, its array) -> what becomes of it, before the next one is made."""

MakeShard = Callable[[ParamSpec, Index, list[Any]], Iterable[jax.Array]]
"""(spec, index, devices that hold this shard) -> the shard on each of them."""

SCANS = ("off", "sample", "full")
SAMPLE = 4096
"""Elements that the sampling scan looks at, in each tensor or shard."""

ALIGN = 64
"""Byte alignment from which XLA:CPU takes a numpy buffer over without copying it."""

_SLAB = 1 << 18


def tp_size(mesh: Mesh | AbstractMesh, rules: ShardRules) -> int:
    """Shards of the kv heads on ``mesh``: the ``tp`` of ``Family.specs``.

    Raises:
        ConfigError: the mesh lacks the rule's axis; ``field`` is the rule.
    """
    return n_parts(rules.split("kv_heads", mesh.shape), mesh.shape)


def named(specs: Any) -> list[tuple[str, ParamSpec]]:
    """(dotted name, spec) of every parameter, in tree order."""
    found = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), spec) for path, spec in found]


def matrices(specs: Any) -> dict[str, ParamSpec | QTensor]:
    """As ``named``, with a quantised matrix as one."""
    whole = jax.tree_util.tree_leaves_with_path(
        specs, is_leaf=lambda x: is_spec(x) or isinstance(x, QTensor)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in whole}


def sharding_of(
    spec: ParamSpec, name: str, mesh: Mesh | AbstractMesh, rules: ShardRules
) -> NamedSharding:
    """The sharding of one parameter.

    Raises:
        ConfigError: a rule names an axis the mesh lacks, or one that splits another dimension of the parameter already,
        or a dimension does not divide; ``field`` is the rule.
    """
    taken: set[str] = set()
    for n, logical, axis in zip(spec.shape, spec.axes, rules.laid(spec.axes), strict=True):
        if logical is None or axis is None:
            continue
        rules.split(logical, mesh.shape)  # raises for an axis that the mesh lacks
        parts, axes = n_parts(axis, mesh.shape), {axis} if isinstance(axis, str) else {*axis}
        if n % parts:
            why = (
                f"{name} {spec.shape} does not split over the {parts} devices of mesh axis {axis!r}"
            )
            raise ConfigError(f"{rule(logical)}: {why}", field=rule(logical))
        if taken & axes:
            why = f"mesh axis {min(taken & axes)!r} splits another dimension of {name} already"
            raise ConfigError(f"{rule(logical)}: {why}", field=rule(logical))
        taken |= axes
    return rules.sharding(mesh, spec.axes)


def placed(specs_at: Callable[[int], Any], mesh: Mesh | AbstractMesh, rules: ShardRules) -> Any:
    """The specs of a model, ``padded``, once all of them are known to lie on ``mesh`` as ``rules`` say.

    Args:
        specs_at: ``Family.specs`` of the model, for a number of shards of its kv heads.

    Raises:
        ConfigError: a rule cannot be honoured; ``field`` is the rule where the rules are those of a sharding, else it
            may be an option or a key of config.json.
    """
    tp = tp_size(mesh, rules)
    Axes.of(rules, mesh.shape)
    try:
        specs = padded(specs_at(tp), rules, mesh.shape)
    except ConfigError as error:
        if rules.stated is None or tp == 1 or (error.field or "").startswith("sharding."):
            raise
        name = rule("kv_heads")
        raise ConfigError(f"{name}: {error.message}", field=name) from None
    for name, spec in named(specs):
        sharding_of(spec, name, mesh, rules)
    _check_used(specs, rules, mesh.shape)
    return specs


def _check_used(specs: Any, rules: ShardRules, sizes: Mapping[str, int]) -> None:
    """Refuse a user's rule that splits nothing of the model. That of kv_heads splits KV, whatever weights do."""
    used = {"kv_heads"}
    for _, spec in named(specs):
        pairs = zip(spec.axes, rules.laid(spec.axes), strict=True)
        used |= {logical for logical, axis in pairs if isinstance(logical, str) and axis}
    for name in rules.stated or ():
        if rules.split(name, sizes) is not None and name not in used:
            why = "it splits no weight of this model" + " beside earlier rules" * rules.auto
            raise ConfigError(f"{rule(name)}: {why}", field=rule(name))


def build(
    specs: Any,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    make: Make,
    progress: Progress | None,
    then: Then = lambda _, array: array,
) -> Any:
    """A tree like ``specs`` of sharded arrays, one after the other, or of what ``then`` makes of them."""
    params = named(specs)
    plans = [(name, spec, sharding_of(spec, name, mesh, rules)) for name, spec in params]
    total = sum(math.prod(s.shape) * np.dtype(s.dtype or dtype).itemsize for _, s in params)
    leaves, done = [], 0
    for name, spec, sharding in plans:
        check(spec, name)
        array = make(spec, sharding)
        done += array.nbytes
        leaves.append(then(name, array))
        del array
        if progress is not None:
            progress(name, done, total)
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def from_shards(spec: ParamSpec, sharding: NamedSharding, make: MakeShard) -> jax.Array:
    """A parameter out of this process's shards; ``make`` is called once per distinct shard."""
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        key = tuple(s.indices(n)[:2] for s, n in zip(index or (), spec.shape, strict=True))
        holders.setdefault(key, []).append(device)
    shards = [
        shard
        for key, devices in holders.items()
        for shard in make(spec, tuple(slice(*ends) for ends in key), devices)
    ]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised host array whose first byte is ``ALIGN``-aligned."""
    dtype = np.dtype(dtype)
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(n_bytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


def bad_values(block: np.ndarray, scan: str) -> str | None:
    """The fault of the values of a host array, or None."""
    if scan == "off" or block.size == 0:
        return None
    if scan == "sample":
        step = -(-block.size // SAMPLE)
        if block.flags.c_contiguous:
            return _verdict(block.reshape(-1)[::step])
        picks = np.arange(0, block.size, step)
        return _verdict(block[np.unravel_index(picks, block.shape)])
    # In slabs, because the temporaries of a scan over a whole shard would double its memory.
    flags = ["external_loop", "buffered"]
    slabs = np.nditer(block, flags=flags, buffersize=_SLAB, order="K")  # type: ignore[arg-type]
    return next(filter(None, map(_verdict, slabs)), None)  # type: ignore[arg-type]


def _verdict(values: np.ndarray) -> str | None:
    if np.isfinite(values).all():
        return None
    return "has NaN values" if np.isnan(values).any() else "has infinite values"


def bad_values_on_device(array: jax.Array, scan: str) -> str | None:
    """The same for an array already on devices; scanned there, only flags come back."""
    if scan == "off" or array.size == 0:
        return None
    if scan == "sample":
        step = -(-array.size // SAMPLE)
        array = (
            array[(slice(None, None, max(1, step // array.shape[-1])),)] if array.ndim else array
        )
    if bool(jnp.isfinite(array).all()):
        return None
    return "has NaN values" if bool(jnp.isnan(array).any()) else "has infinite values"
