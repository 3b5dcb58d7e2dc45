"""Replaces an engine's weights with a caller's, by programs compiled before ready.

The caller's arrays are only read, so a trainer may donate or delete its own right after::

    source              a tree, checkpoint names, a directory    to leaves (``weights.handed``)
                        an adapter's factors                     added to the engine's own (``weights.adapters``)
                        the same tree, quantised in its form     as it is
    a leaf of it        in a layout that is compiled             as it is, from any sharding of the same devices
                        any other                                through host memory: cast, laid out, on the mesh
    program             (own, donated; given) -> own             one launch overwrites all leaves or none
    a part of a tree    leaves that lie as the engine's own      copied on the device, without a program
                        others                                   through host memory, as above
                        those that it lacks                      not touched

The engine's buffers are the destination, so no second copy of the weights is held beside the caller's,
and they keep their addresses. Leaves that take the way through host memory, and those of a part, are on the device
twice until all are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import WeightsError
from jserve.model.quant import Form, QTensor, quantised_leaves
from jserve.model.shard import abstract, padded
from jserve.model.step import StepModel
from jserve.runner.compiler import Compiler
from jserve.weights.adapters import AdapterDelta, changes
from jserve.weights.adopt import (
    Match,
    has_quantised,
    in_host_memory,
    is_nnx_state,
    leaves_of,
    matched,
)
from jserve.weights.handed import from_directory, from_names, named_arrays
from jserve.weights.place import named
from jserve.weights.quant.rounding import as_tensor

Leaf = jax.ShapeDtypeStruct


class WeightUpdate:
    """The compiled copies from each layout that a trainer's weights usually have: the engine's own, the same in
    float32, and that of the arrays with which the engine started.

    Args:
        trained: the latter, by parameter; {}: there were none.
    """

    def __init__(
        self,
        model: StepModel,
        options: Mapping[str, str | bool],
        compiler: Compiler | None = None,
        *,
        trained: Mapping[str, Leaf] | None = None,
    ) -> None:
        wide, at = model.family.wide or model.family, (model.mesh, model.rules, model.dtype)
        self._read = partial(
            from_directory, family=wide, arch=model.arch, mesh=at[0], rules=at[1], dtype=at[2]
        )
        self._tied = ("lm_head.weight",) if model.arch.tied else ()
        self._specs = padded(wide.specs(model.arch, model.tp), model.rules, model.mesh.shape)
        self._canonical = wide.specs(model.arch, 1)
        own = abstract(model.specs(), *at)
        self._structure = jax.tree.structure(own)
        leaves: list[Leaf] = jax.tree.leaves(own)
        given: list[Leaf] = jax.tree.leaves(abstract(self._specs, *at))
        in_float32 = [_as(leaf, np.float32) for leaf in given]
        layouts: list[tuple[list[Leaf], Any]] = [(given, None)]
        layouts += [(in_float32, None)] if in_float32 != given else []
        names = [name for name, _ in named(self._specs)]
        started = [
            _started(leaf, (trained or {}).get(n)) for n, leaf in zip(names, given, strict=True)
        ]
        if started not in (given, in_float32):  # on meshes that the model does not know
            layouts.append((started, tuple(repr(leaf.sharding) for leaf in started)))
        forms = [x.form if isinstance(x, QTensor) else None for x in quantised_leaves(own)]
        self._quantised = any(form is not None for form in forms)
        self._made_elsewhere = any(form is not None and not form.method for form in forms)
        update, make = _update(leaves, forms), compiler or Compiler()
        self._programs = [
            (layout, make("weight_update", update, leaves, layout, options=options, about=about))
            for layout, about in ([] if self._made_elsewhere else layouts)
        ]
        self._quantised_specs = (model.specs(), model.family.specs(model.arch, 1))
        copied = _update(leaves, [None] * len(leaves))
        self._copies = (
            [(leaves, make("weight_copy", copied, leaves, leaves, options=options))]
            if self._quantised
            else []
        )

    def __call__(self, own: Any, source: Any, *, some: bool = False) -> Any:
        """The tree ``own`` with the values of ``source``, once they are there; ``own`` is donated.

        Args:
            source: the same tree of numpy or jax arrays of any floating dtype and sharding, or what ``adopt`` or
                ``weights.handed`` take besides; ``own`` is left as it is if this raises.
            some: parameters that ``source`` lacks keep their values.

        Raises:
            WeightsError: a leaf is missing, unknown, deleted, or has another shape, form or no floating
                dtype; ``field`` is ``params.<path>``. Or the engine's checkpoint is quantised and ``source`` is not, or
                its weights were quantised on load and the update is partial.
        """
        programs = self._programs
        if self._quantised and _is_tree(source) and has_quantised(source):
            matches, programs = self._as_they_are(own, source, some), self._copies
        elif self._made_elsewhere:
            why = "the checkpoint is quantised; only a tree of matrices in its forms replaces them"
            raise WeightsError(f"params: {why}", field="params")
        else:
            matches = self._matches(own, source, some)
        if some or isinstance(source, AdapterDelta):
            return jax.tree.unflatten(self._structure, _in_part(jax.tree.leaves(own), matches))
        layout, program = max(
            programs, key=lambda p: sum(map(_fits, (m.array for m in matches), p[0]))
        )
        given = [_staged(m, leaf) for m, leaf in zip(matches, layout, strict=True)]
        new = program(jax.tree.leaves(own), given)
        return jax.tree.unflatten(self._structure, jax.block_until_ready(new))

    def shared(self, source: Any) -> tuple[Any, dict[str, jax.Array]]:
        """(the tree of parameters, made of the very arrays of the tree ``source``; these by name).

        Raises:
            WeightsError: ``source`` is no tree, or a leaf would have to be copied; ``field`` is ``params.<path>``.
        """
        by_name = isinstance(source, str | Path | AdapterDelta) or named_arrays(source) is not None
        if by_name or self._quantised:
            why = (
                "the engine's weights are quantised" if self._quantised else "only a tree has them"
            )
            raise WeightsError(f"alias: arrays are used as they are; {why}", field="alias")
        matches = matched(dict(leaves_of(source)), self._specs, self._canonical)
        layout, _ = self._programs[0]
        for match, leaf in zip(matches, layout, strict=True):
            if not _fits(match.array, leaf):
                wanted = f"{leaf.dtype}{list(leaf.shape)} in the engine's sharding"
                raise WeightsError(
                    f"params.{match.name}: alias takes a jax array of {wanted}",
                    field=f"params.{match.name}",
                )
        leaves = [_staged(match, leaf) for match, leaf in zip(matches, layout, strict=True)]
        tree = jax.tree.unflatten(self._structure, leaves)
        return tree, {match.name: match.array for match in matches}

    def _as_they_are(self, own: Any, source: Any, some: bool) -> list[Match]:
        """The arrays of a tree whose matrices are quantised as the engine's are."""
        kept = dict(leaves_of(own)) if some else {}
        return matched(kept | dict(leaves_of(source)), *self._quantised_specs)

    def _matches(self, own: Any, source: Any, some: bool) -> list[Match]:
        if isinstance(source, AdapterDelta):
            return self._changed(own, source)
        if isinstance(source, str | Path):
            source = self._read(source)
        pairs = named_arrays(source)
        if pairs is not None:
            source = from_names(pairs, self._canonical, ignore=self._tied)
        given = dict(leaves_of(source))
        if some and self._quantised:
            why = "weights that were quantised on load are replaced together"
            raise WeightsError(f"params: a partial update: {why}", field="params")
        kept = dict(leaves_of(own)) if some else {}
        return matched(kept | given, self._specs, self._canonical)

    def _changed(self, own: Any, delta: AdapterDelta) -> list[Match]:
        """The engine's own weights; those that ``delta`` changes, with what it adds in float32, in host memory."""
        if self._quantised:
            why = "an adapter cannot be added to weights that were quantised on load"
            raise WeightsError(f"params: {why}", field="params")
        found, given = changes(delta, self._canonical), dict(leaves_of(own))
        bases = dict(named(self._canonical))
        for name, spec in named(self._specs):
            if name in found:
                match = Match(name=name, array=found[name], spec=spec, base=bases[name])
                change = in_host_memory(match, np.dtype(np.float32))
                given[name] = np.asarray(given[name]).astype(np.float32) + change
        return matched(given, self._specs, self._canonical)


def _is_tree(source: Any) -> bool:
    """True for what is no directory, no adapter and no pairs of names and arrays; nothing is read of it."""
    if isinstance(source, str | Path | AdapterDelta):
        return False
    return isinstance(source, Mapping) or is_nnx_state(source)


def layout_of(params: Any) -> dict[str, Leaf]:
    """Path -> shape, dtype and sharding of the jax arrays of a tree that a user hands over; of others nothing."""
    if not _is_tree(params):
        return {}
    arrays = [(name, x) for name, x in leaves_of(params) if isinstance(x, jax.Array)]
    return {name: Leaf(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays}


def _started(own: Leaf, trained: Leaf | None) -> Leaf:
    """``trained`` if a program can turn it into ``own``: on the same devices, in the same kind of memory; else
    ``own``."""
    if trained is None or trained.shape != own.shape or trained.dtype.itemsize not in (2, 4):
        return own
    at, to = trained.sharding, own.sharding
    if not jnp.issubdtype(trained.dtype, jnp.floating) or at.memory_kind != to.memory_kind:
        return own
    places = [list(x.devices_indices_map(own.shape)) for x in (at, to)]
    if places[0] != places[1]:
        return own
    same = at.is_equivalent_to(to, len(own.shape))
    return Leaf(own.shape, trained.dtype, sharding=to if same else at)


def _as(leaf: Leaf, dtype: Any) -> Leaf:
    return Leaf(leaf.shape, np.dtype(dtype), sharding=leaf.sharding)


def _update(own: list[Leaf], forms: list[Form | None]) -> Any:
    """The program; ``forms`` are those in which the given matrices are kept."""

    def weight_update(own: list[jax.Array], given: list[jax.Array]) -> list[jax.Array]:
        made = [x if f is None else as_tensor(x, f) for x, f in zip(given, forms, strict=True)]
        new = jax.tree.leaves(made)
        return [jnp.copy(new.astype(old.dtype)) for old, new in zip(own, new, strict=True)]

    # The old values are not read, and their buffers are still the place of the new ones.
    return jax.jit(
        weight_update,
        donate_argnums=(0,),
        keep_unused=True,
        out_shardings=[leaf.sharding for leaf in own],
    )


def _fits(array: Any, leaf: Leaf) -> bool:
    """True if the program that was compiled for ``leaf`` can read ``array`` where it lies."""
    return (
        isinstance(array, jax.Array)
        and (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
        and array.sharding.is_equivalent_to(leaf.sharding, array.ndim)
    )


def _staged(match: Match, leaf: Leaf) -> jax.Array:
    """``match`` in the layout of ``leaf``, by transfers alone: nothing compiles."""
    if not _fits(match.array, leaf):
        return jax.device_put(in_host_memory(match, leaf.dtype), leaf.sharding)
    parts = {part.device: part.data for part in match.array.addressable_shards}
    sharding: Any = leaf.sharding
    arrays = [parts[device] for device in sharding.addressable_devices_indices_map(leaf.shape)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def _in_part(own: list[jax.Array], matches: list[Match]) -> list[jax.Array]:
    """``own``, but for what ``matches`` has other arrays of: in new buffers, for which the old ones go once all are
    there. By transfers alone."""
    new = [
        leaf if match.array is leaf else _own_buffer(match, leaf)
        for match, leaf in zip(matches, own, strict=True)
    ]
    jax.block_until_ready(new)
    for leaf, other in zip(own, new, strict=True):
        if other is not leaf:
            leaf.delete()
    return new


def _own_buffer(match: Match, leaf: jax.Array) -> jax.Array:
    """``match`` as ``leaf`` lies, in a buffer that nobody else has."""
    like = Leaf(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    if _fits(match.array, like):
        return _copied(_staged(match, like))
    # On a CPU a device's array may share the memory of the numpy one.
    return jax.device_put(np.array(in_host_memory(match, leaf.dtype)), leaf.sharding)


def _copied(leaf: jax.Array) -> jax.Array:
    """A transfer from devices to themselves: ``jnp.copy`` would compile."""
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def delete_leaves(source: Any, kept: Any) -> None:
    """Delete the jax arrays of a tree but those that ``kept`` has too; names and files have none to delete."""
    own = {id(leaf) for leaf in jax.tree.leaves(kept)}
    if isinstance(source, str | Path) or named_arrays(source) is not None:
        return
    for leaf in jax.tree.leaves([leaf for _, leaf in leaves_of(source)]):
        if isinstance(leaf, jax.Array) and id(leaf) not in own and not leaf.is_deleted():
            leaf.delete()


def own_copy(params: Any, *, read: bool) -> Any:
    """Arrays like the leaves of ``params``; with their values where somebody will ``read`` them.

    Raises:
        WeightsError: a leaf that has to be read is deleted.
    """

    def one(leaf: jax.Array) -> jax.Array:
        if read and leaf.is_deleted():
            raise WeightsError(
                "params: shared weights were deleted, and are replaced together", field="params"
            )
        if read:
            return _copied(leaf)
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    return jax.tree.map(one, params)


def to_host(params: Any, *, delete: bool = True) -> Any:
    """``params`` as numpy arrays; those on devices are deleted, unless they are somebody else's."""

    def one(leaf: jax.Array) -> np.ndarray:
        kept = np.array(leaf)  # a copy: on a CPU asarray shares the buffer that is deleted
        if delete:
            leaf.delete()
        return kept

    return jax.tree.map(one, params)


def to_devices(params: Any, kept: Any) -> Any:
    """The arrays ``kept`` where the deleted ``params`` lay."""
    return jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), kept, params)
