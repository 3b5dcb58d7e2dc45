"""Verifies drafts against the tokens that the target draws at their positions.

Every position draws its own token with its own counter-based key, exactly as it would one step at a time, and
drafts are accepted while they equal what was drawn. So the output with drafts is the output without them, greedy
and seeded alike, and a bad draft costs time only.

Row of J = 4 with three drafts; ``drawn[j]`` follows ``token[j]``::

    token   last   d1    d2    d3
    drawn    d1    d2    x     y        two drafts accepted, and x after them: n_ok = 3

In a tree the walk goes from the root to the child that equals the draw, as far as there is one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jserve.model.draft_tree import DraftMask, parent_of


def accept(token_RJ: jax.Array, drawn_RJ: jax.Array, count_R: jax.Array) -> jax.Array:
    """int32[R]: accepted tokens of ``drawn_RJ``, 1 to ``count_R``.

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
    token_RJ: jax.Array, drawn_RJ: jax.Array, count_R: jax.Array, mask: DraftMask
) -> tuple[jax.Array, jax.Array]:
    """(int32[R] tokens drawn along the accepted path, int32[R, J] the path's nodes).

    Arguments as of ``accept``, with the nodes of the trees of ``mask`` for columns. Beyond its end a
    path holds column numbers. Of equal children the first one counts.
    """
    R, J = token_RJ.shape
    node_J, root_J = jnp.arange(J, dtype=jnp.int32), jnp.arange(J) == 0
    parent_RJ = jnp.broadcast_to(parent_of(mask), (R, J))
    right_RJ = token_RJ == jnp.take_along_axis(drawn_RJ, parent_RJ, axis=1)
    right_RJ = root_J | (right_RJ & (node_J < count_R[:, None]))
    before_JJ = (node_J < node_J[:, None]) & ~root_J
    sibling_RJJ = (parent_RJ[:, :, None] == parent_RJ[:, None]) & before_JJ
    right_RJ &= ~jnp.any(sibling_RJJ & right_RJ[:, None], axis=2)
    stands_RJ = jnp.all(~jnp.asarray(mask.sees_DJX) | right_RJ[:, None], axis=2)
    n_ok_R = jnp.sum(stands_RJ, axis=1, dtype=jnp.int32)
    here_RPJ = stands_RJ[:, None] & (mask.depth_DX[:, None] == node_J[:, None])
    path_RJ = jnp.sum(jnp.where(here_RPJ, node_J, 0), axis=2)
    return n_ok_R, jnp.where(node_J < n_ok_R[:, None], path_RJ, node_J)
