"""Computes what concerns each row of a step alone for the rows in use, some at a time.

XLA:CPU computes all rows of a bucket, so that sampling over the vocabulary for eight sequences would take as long as
for sixty-four; and what a few rows need of scratch memory stays in the processor's caches. ::

    live_E    1 1 1 0 0 0 0 0 0 0 | 1 1 0 0       two decode rows and three prompts are padding
    places    0 1 2 10 11 E E E                   one round of ``ROWS``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 8
"""Of a round: few enough that one sequence alone does not wait for padding, enough for the threads of a CPU."""


def over_live(of: Callable[[Any], Any], live_E: jax.Array, rows: Any) -> Any:
    """``of`` of the rows in use, zeros for the others.

    Args:
        of: a pytree of arrays [rows, ...] -> another one of as many rows; what it gives for a row depends on
            nothing else.
        live_E: bool[E].
        rows: the pytree, of E rows.
    """
    E = live_E.shape[0]
    if E <= ROWS:
        return of(rows)
    at_X = jnp.nonzero(live_E, size=E + -E % ROWS, fill_value=E)[0].astype(jnp.int32)

    def some(i: Any) -> tuple[jax.Array, Any]:
        at_B = jax.lax.dynamic_slice(at_X, (i * ROWS,), (ROWS,))
        in_range_B = jnp.minimum(at_B, E - 1)
        return at_B, of(jax.tree.map(lambda x: x[in_range_B], rows))

    def put(i: jax.Array, found: Any) -> Any:
        at_B, new = some(i)
        return jax.tree.map(lambda x, y: x.at[at_B].set(y, mode="drop"), found, new)

    made = jax.eval_shape(some, 0)[1]
    empty = jax.tree.map(lambda x: jnp.zeros((E, *x.shape[1:]), x.dtype), made)
    n = jnp.sum(live_E, dtype=jnp.int32)
    return jax.lax.fori_loop(0, (n + ROWS - 1) // ROWS, put, empty)
