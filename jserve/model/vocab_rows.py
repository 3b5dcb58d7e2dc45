"""Token counts and biases over the vocabulary, for the sequences that have penalties or biases.

A row of V counts and V biases in every slot would be a gigabyte at 1,024 slots and 128k tokens, and most
sequences read neither. So there are U vocab rows; the scheduler leases one to each sequence that needs
it, and the slot holds its number::

    slot        0   1   2   3           vocab row   0         1
    row_C       1   U   0   U           counts      [ V ]     [ V ]
                                        biases      [ V ]     [ V ]

A slot whose sequence needs none may hold any number: rows of the step that use neither read nothing and
count nothing. A count is the number of times a token was put out, plus ``IN_PROMPT`` where the prompt
holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

IN_PROMPT = 1 << 30


@register_dataclass
@dataclass(frozen=True)
class VocabState:
    """U vocab rows, and which of them each of C slots has; replicated over the mesh."""

    row_C: jax.Array
    """int32: U for none."""
    counts_UV: jax.Array
    """int32."""
    bias_UV: jax.Array
    """float32, added to the logits; -inf forbids."""

    def counts(self, slot_E: jax.Array) -> jax.Array:
        """int32[E, V]; meaningless for a slot without penalties."""
        return self.counts_UV[self.row_C[slot_E]]

    def biases(self, slot_E: jax.Array) -> jax.Array:
        """float32[E, V]; meaningless for a slot without biases."""
        return self.bias_UV[self.row_C[slot_E]]


def shapes(C: int, V: int, U: int) -> Any:
    """The abstract state: a ``VocabState`` of ``ShapeDtypeStruct``."""
    shape: Any = jax.ShapeDtypeStruct
    return VocabState(
        row_C=shape((C,), jnp.int32),
        counts_UV=shape((U, V), jnp.int32),
        bias_UV=shape((U, V), jnp.float32),
    )


def leased_to_none(state: VocabState) -> VocabState:
    """``state`` with no row at any slot."""
    row_C = jnp.full(state.row_C.shape, state.counts_UV.shape[0], jnp.int32)
    return replace(state, row_C=row_C)


def count(
    state: VocabState, slot_R: jax.Array, penalised_R: jax.Array, token_RJ: jax.Array
) -> VocabState:
    """``state`` after the rows of a step drew ``token_RJ`` (V: none). Only ``penalised_R`` rows count, and
    none of slot C."""
    U, C = state.counts_UV.shape[0], state.row_C.shape[0]
    row_R = state.row_C[jnp.minimum(slot_R, C - 1)]
    row_R = jnp.where(penalised_R & (slot_R < C), row_R, U)
    counts_UV = jax.lax.cond(
        jnp.any(penalised_R),
        lambda c: c.at[row_R[:, None], token_RJ].add(1, mode="drop"),
        lambda c: c,
        state.counts_UV,
    )
    return replace(state, counts_UV=counts_UV)


def load(
    state: VocabState,
    slot: jax.Array,
    row: jax.Array,
    fill: jax.Array,
    reset: jax.Array,
    pairs: jax.Array,
) -> VocabState:
    """``state`` with ``row`` (below 0: none) given to ``slot`` and its pairs set.

    Args:
        fill: float32, the bias of every id of a row that is reset.
        reset: bool, empty the row first.
        pairs: int32[4, n]: ids and counts, ids and the bits of their biases; an id of V is none.
    """
    row = jnp.where(row < 0, state.counts_UV.shape[0], row)
    counts_V = jnp.where(reset, 0, state.counts_UV[row]).at[pairs[0]].set(pairs[1], mode="drop")
    bias_V = jnp.where(reset, fill, state.bias_UV[row])
    bias_n = jax.lax.bitcast_convert_type(pairs[3], jnp.float32)
    bias_V = bias_V.at[pairs[2]].set(bias_n, mode="drop")
    return VocabState(
        row_C=state.row_C.at[slot].set(row),
        counts_UV=state.counts_UV.at[row].set(counts_V, mode="drop"),
        bias_UV=state.bias_UV.at[row].set(bias_V, mode="drop"),
    )
