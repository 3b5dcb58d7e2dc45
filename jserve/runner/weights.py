"""Replaces an engine's weights with a caller's, by programs compiled before ready.

The caller's arrays are only read, so a trainer may donate or delete its own right after::

    the caller's leaf   in a layout that is compiled    as it is
                        any other                       through host memory: cast, laid out, on the mesh
    program             (own, donated; given) -> own    one launch overwrites all leaves or none

The engine's buffers are the destination, so no second copy of the weights is held beside the caller's,
and they keep their addresses. Leaves that take the way through host memory are on the device twice
until the program has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.shard import abstract
from jserve.model.step import StepModel
from jserve.runner.compiler import Compiler
from jserve.weights.adopt import Match, in_host_memory, matched

Leaf = jax.ShapeDtypeStruct


class WeightUpdate:
    """The compiled copies from each layout that a trainer's weights usually have: the engine's own, and
    the same in float32."""

    def __init__(
        self,
        model: StepModel,
        options: Mapping[str, str | bool],
        compiler: Compiler | None = None,
    ) -> None:
        self._specs = model.specs()
        self._canonical = model.family.specs(model.arch, 1)
        own = abstract(self._specs, model.mesh, model.rules, model.dtype)
        self._structure = jax.tree.structure(own)
        self._own: list[Leaf] = jax.tree.leaves(own)
        wide = [_as(leaf, np.float32) for leaf in self._own]
        layouts = [self._own] if wide == self._own else [self._own, wide]
        update, make = _update(self._own), compiler or Compiler()
        self._programs = [
            (layout, make("weight_update", update, self._own, layout, options=options))
            for layout in layouts
        ]

    def __call__(self, own: Any, params: Any) -> Any:
        """The tree ``own`` with the values of ``params``, once they are there; ``own`` is donated.

        ``params``: the same tree of numpy or jax arrays of any floating dtype and sharding, or what
        ``adopt`` takes besides; ``own`` is left as it is if this raises.

        Raises:
            WeightsError: a leaf is missing, unknown, deleted, or has another shape or no floating
                dtype; ``field`` is ``params.<path>``.
        """
        matches = matched(params, self._specs, self._canonical)
        layout, program = max(
            self._programs, key=lambda p: sum(map(_fits, (m.array for m in matches), p[0]))
        )
        given = [_staged(m, leaf) for m, leaf in zip(matches, layout, strict=True)]
        new = program(jax.tree.leaves(own), given)
        return jax.tree.unflatten(self._structure, jax.block_until_ready(new))


def _as(leaf: Leaf, dtype: Any) -> Leaf:
    return Leaf(leaf.shape, np.dtype(dtype), sharding=leaf.sharding)


def _update(own: list[Leaf]) -> Any:
    def weight_update(own: list[jax.Array], given: list[jax.Array]) -> list[jax.Array]:
        return [jnp.copy(new.astype(old.dtype)) for old, new in zip(own, given, strict=True)]

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
