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

from jserve.errors import WeightsError
from jserve.model.quant import Form, QTensor, quantised_leaves
from jserve.model.shard import abstract, padded
from jserve.model.step import StepModel
from jserve.runner.compiler import Compiler
from jserve.weights.adopt import Match, in_host_memory, matched
from jserve.weights.quant.rounding import as_tensor

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
        wide, at = model.family.wide or model.family, (model.mesh, model.rules, model.dtype)
        self._specs = padded(wide.specs(model.arch, model.tp), model.rules, model.mesh.shape)
        self._canonical = wide.specs(model.arch, 1)
        own = abstract(model.specs(), *at)
        self._structure = jax.tree.structure(own)
        leaves: list[Leaf] = jax.tree.leaves(own)
        given: list[Leaf] = jax.tree.leaves(abstract(self._specs, *at))
        in_float32 = [_as(leaf, np.float32) for leaf in given]
        layouts = [given] if in_float32 == given else [given, in_float32]
        forms = [x.form if isinstance(x, QTensor) else None for x in quantised_leaves(own)]
        self._made_elsewhere = any(form is not None and not form.method for form in forms)
        update, make = _update(leaves, forms), compiler or Compiler()
        self._programs = [
            (layout, make("weight_update", update, leaves, layout, options=options))
            for layout in ([] if self._made_elsewhere else layouts)
        ]

    def __call__(self, own: Any, params: Any) -> Any:
        """The tree ``own`` with the values of ``params``, once they are there; ``own`` is donated.

        ``params``: the same tree of numpy or jax arrays of any floating dtype and sharding, or what
        ``adopt`` takes besides; ``own`` is left as it is if this raises.

        Raises:
            WeightsError: a leaf is missing, unknown, deleted, or has another shape or no floating
                dtype; ``field`` is ``params.<path>``. Or the engine's checkpoint is quantised.
        """
        if self._made_elsewhere:
            why = "the checkpoint is quantised; only weights quantised on load can be replaced"
            raise WeightsError(f"params: {why}", field="params")
        matches = matched(params, self._specs, self._canonical)
        layout, program = max(
            self._programs, key=lambda p: sum(map(_fits, (m.array for m in matches), p[0]))
        )
        given = [_staged(m, leaf) for m, leaf in zip(matches, layout, strict=True)]
        new = program(jax.tree.leaves(own), given)
        return jax.tree.unflatten(self._structure, jax.block_until_ready(new))


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
