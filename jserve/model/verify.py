"""How many tokens of a row stand: drafts against what the target draws at their places.

Owns acceptance. Every position draws its own token with its own counter-based key, exactly as it
would one step at a time, and drafts stand while they equal what was drawn. So the output with
drafts is the output without them, greedy and seeded alike, and a bad draft costs time only. Must
not know who drafted.

Row of J = 4 with three drafts; ``drawn[j]`` follows ``token[j]``::

    token   last   d1    d2    d3
    drawn    d1    d2    x     y        two drafts stand, and x after them: n_ok = 3
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def accept(token_RJ: jax.Array, drawn_RJ: jax.Array, count_R: jax.Array) -> jax.Array:
    """int32[R]: tokens of ``drawn_RJ`` that stand, 1 to ``count_R``.

    Args:
        token_RJ: int32, what each row ran on: its last known token, then ``count_R - 1`` drafts.
        drawn_RJ: int32, the token the target draws after each of them.
        count_R: int32, at least 1.
    """
    J = token_RJ.shape[1]
    place = jnp.arange(1, J, dtype=jnp.int32)
    stands = (token_RJ[:, 1:] == drawn_RJ[:, :-1]) & (place < count_R[:, None])
    return 1 + jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
