"""The slots of a layer's experts: which of them a token's assignment goes to, and which of these a device has.

Where experts lie on different devices, each has as many slots, its own after those of the devices before it::

    slots      0 1 2 3 | 4 5 6 7      of two devices
    experts    0 1 2 3   4 5 0 3      two spare slots have experts 0 and 3 once more

Which expert a slot has is data, so experts move without another program. A token goes to one of its expert's slots by
its position alone: not by the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from jserve.model.arch import Arch, Moe
from jserve.model.collectives import reduce, shard_index
from jserve.model.mesh import MeshAxis

_SPREAD = 0x9E3779B1
"""Neighbouring positions times this differ in their upper bits."""
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
"""Bytes of a weight -> the whole numbers that devices add; a sum of floats would lose the sign of a zero."""


@register_dataclass
@dataclass(frozen=True)
class Placement:
    """The slots of each expert, of one layer or, with an axis before the others, of all."""

    slot_ER: jax.Array
    """int32: the first ``n_E`` of a row are slots; the rest has no meaning."""
    n_E: jax.Array
    """int32, at least 1."""

    def of_layer(self, i: int) -> Placement:
        """The placement of the ``i``-th layer that has experts."""
        return Placement(slot_ER=self.slot_ER[i], n_E=self.n_E[i])


@register_dataclass
@dataclass(frozen=True)
class ExpertState:
    """Of all layers that have experts; the same on every device."""

    places: Placement
    load_LE: jax.Array
    """int32: tokens that chose each expert since this was last set to 0."""

    def counted(self, count_LE: jax.Array | None) -> ExpertState:
        """The same with the tokens of one step more."""
        assert count_LE is not None, "a pass with places of experts counts"
        return ExpertState(places=self.places, load_LE=self.load_LE + count_LE)


def n_routed(arch: Arch) -> tuple[int, int]:
    """(layers that have experts, experts of each of them)."""
    counts = [layer.ffn.E for layer in arch.layers if isinstance(layer.ffn, Moe)]
    assert len(set(counts)) == 1, "layers with as many experts each"
    return len(counts), counts[0]


def state_shapes(arch: Arch, spare: int) -> Any:
    """The abstract ``ExpertState`` with ``spare`` slots more than experts, which one of them may have all."""
    L, E = n_routed(arch)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return ExpertState(
        places=Placement(slot_ER=ints(L, E, 1 + spare), n_E=ints(L, E)), load_LE=ints(L, E)
    )


def slots_of(
    expert_TX: jax.Array,
    pos_T: jax.Array,
    E: int,
    n_slots: int,
    axis: MeshAxis,
    places: Placement | None,
) -> jax.Array:
    """int32[T, X]: this device's slot of each assignment; ``n_slots`` where another device computes it, or nobody.

    Args:
        expert_TX: int32; ``E`` is nowhere.
        pos_T: int32, positions of the tokens.
        n_slots: slots of this device.
        axis: that experts are split over; None: this device has all.
        places: None: an expert has the slot of its number.
    """
    if places is None and axis is None:
        return expert_TX
    slot_TX = expert_TX if places is None else _chosen(places, expert_TX, pos_T, E)
    if axis is not None:
        slot_TX = slot_TX - shard_index(axis) * n_slots
    here_TX = (expert_TX < E) & (slot_TX >= 0) & (slot_TX < n_slots)
    return jnp.where(here_TX, slot_TX, n_slots)


def _chosen(places: Placement, expert_TX: jax.Array, pos_T: jax.Array, E: int) -> jax.Array:
    """One of the slots of each assignment's expert."""
    e_TX = jnp.minimum(expert_TX, E - 1)
    spread_T = (pos_T.astype(jnp.uint32) * jnp.uint32(_SPREAD)) >> 16
    turn_TX = spread_T.astype(jnp.int32)[:, None] % places.n_E[e_TX]
    return places.slot_ER[e_TX, turn_TX]


def copied(
    leaves: Sequence[jax.Array], from_M: jax.Array, to_M: jax.Array, slots: int, axis: MeshAxis
) -> list[jax.Array]:
    """This device's parameters of a layer's experts after slots ``to_M`` got what ``from_M`` had before, bit for bit.

    Args:
        leaves: of ``slots`` experts, as many rows for each.
        from_M: int32, numbers among the slots of all devices.
        to_M: int32; one that no device has is written nowhere.
        axis: that experts are split over.
    """
    first = 0 if axis is None else shard_index(axis) * slots
    mine_M = from_M - first
    have_M = (mine_M >= 0) & (mine_M < slots)
    at_M = jnp.where((to_M >= first) & (to_M < first + slots), to_M - first, slots)

    def one(leaf: jax.Array) -> jax.Array:
        w = leaf.reshape(slots, -1, *leaf.shape[1:])
        bits = lax.bitcast_convert_type(w[jnp.clip(mine_M, 0, slots - 1)], _BITS[w.dtype.itemsize])
        own = jnp.where(have_M.reshape(-1, *(1,) * (bits.ndim - 1)), bits, 0)
        got = lax.bitcast_convert_type(reduce(own, axis), w.dtype)
        return w.at[at_M].set(got, mode="drop").reshape(leaf.shape)

    return [one(leaf) for leaf in leaves]


def tokens_of_each(expert: jax.Array, E: int) -> jax.Array:
    """int32[E]: how often each expert occurs in ``expert``."""
    return jnp.sum(expert.reshape(-1, 1) == jnp.arange(E), axis=0, dtype=jnp.int32)
