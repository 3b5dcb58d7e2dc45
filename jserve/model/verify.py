"""How many tokens of a row stand: drafts against what the target draws at their places.

Owns acceptance. Every position draws its own token with its own counter-based key, exactly as it
would one step at a time, and drafts stand while they equal what was drawn. So the output with
drafts is the output without them, greedy and seeded alike, and a bad draft costs time only. Must
not know who drafted.

Row of J = 4 with three drafts; ``drawn[j]`` follows ``token[j]``::

    token   last   d1    d2    d3
    drawn    d1    d2    x     y        two drafts stand, and x after them: n_ok = 3

In a tree the walk goes from the root to the child that equals the draw, as far as there is one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jserve.model.tree import Parents, depths


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


def accept_tree(
    token_RJ: jax.Array, drawn_RJ: jax.Array, count_R: jax.Array, parents: Parents
) -> tuple[jax.Array, jax.Array]:
    """(int32[R] tokens drawn along the path that stands, int32[R, J] the path's nodes).

    Arguments as of ``accept``, with the nodes of the tree for columns. Beyond its end a path holds
    column numbers. Of equal children the first one counts.
    """
    R, J = token_RJ.shape
    stands: list[jax.Array] = [jnp.ones(R, bool)]
    for child, parent in enumerate(parents, 1):
        here_R = stands[parent] & (token_RJ[:, child] == drawn_RJ[:, parent]) & (child < count_R)
        for other in range(1, child):
            if parents[other - 1] == parent:
                here_R &= ~stands[other]
        stands.append(here_R)
    path = [jnp.full(R, i, jnp.int32) for i in range(J)]
    for node, depth in enumerate(depths(parents)):
        path[depth] = jnp.where(stands[node], node, path[depth])
    n_ok_R = jnp.sum(jnp.stack(stands), axis=0, dtype=jnp.int32)
    return n_ok_R, jnp.stack(path, axis=1)
