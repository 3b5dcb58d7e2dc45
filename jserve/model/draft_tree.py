"""Draft trees: their shapes and the masks that follow from them.

Node 0 is the row's last known token, nodes 1, 2 ... are drafts; ``parents[c - 1]`` is the parent of node c and
smaller than c, so the first n nodes of a tree are a tree. The KV of node c lies at place ``base + c`` until the
step knows which path is accepted; its position counts depth::

    parents (0, 0, 1, 1, 2)      place     0  1  2  3  4  5
                                 depth     0  1  1  2  2  2
          0                      sees 3    x  x  .  x  .  .
         / \\
        1   2                    path taken 0 -> 2 -> 5: KV of 2 goes to place 1, of 5 to place 2
       / \\   \\
      3   4   5

What a row's tokens see of one another is a mask, from which parents and paths follow. All rows have the same:
D of ``sees_DJX`` and ``depth_DX`` is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.kv_layout import Span

Parents = tuple[int, ...]
TreeShape = Parents
"""Of the drafts of a row; (): a chain."""


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class DraftMask:
    """The visibility of X places that begin at a base, for the J tokens of a row; all see everything before it.

    The tokens are the last J of the X places. Hashable: a static part of a view.
    """

    sees: tuple[tuple[bool, ...], ...]
    """[J][X]"""
    depth: tuple[int, ...]
    """[X]: position of each place, counted from the base."""

    @property
    def n_before(self) -> int:
        """Places from the base to the first of the J tokens."""
        return len(self.depth) - len(self.sees)

    @property
    def sees_DJX(self) -> np.ndarray:
        return np.array(self.sees)[None]

    @property
    def depth_DX(self) -> np.ndarray:
        return np.array(self.depth, np.int32)[None]

    def sees_at(self, at_WS: jax.Array) -> jax.Array:
        """bool[W, S, J]: whether the tokens see these places."""
        return jnp.asarray(self.sees_DJX[0].T)[at_WS]

    def depth_at(self, at_WS: jax.Array) -> jax.Array:
        """int32[W, S]"""
        return jnp.asarray(self.depth_DX[0])[at_WS]


def chain(n: int) -> Parents:
    """The tree that is a chain of ``n`` drafts."""
    return tuple(range(n))


def check(parents: Parents, field: str = "speculative.tree") -> None:
    """Refuse what is not a tree in the order of this module.

    Raises:
        ConfigError: a parent that does not come before its child.
    """
    for child, parent in enumerate(parents, 1):
        if not 0 <= parent < child:
            raise ConfigError(f"{field}: node {child} cannot have parent {parent}", field=field)


@lru_cache
def depths(parents: Parents) -> tuple[int, ...]:
    """Depth of every node, the root's 0 first."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return tuple(found)


@lru_cache
def paths(parents: Parents) -> tuple[tuple[int, ...], ...]:
    """For every node the nodes from depth 1 down to itself; () for the root."""
    found: list[tuple[int, ...]] = [()]
    for child, parent in enumerate(parents, 1):
        found.append((*found[parent], child))
    return tuple(found)


@lru_cache
def mask_of(parents: Parents) -> DraftMask:
    """The mask under which all nodes run at once: each sees itself and its ancestors."""
    n = 1 + len(parents)
    sees = [tuple(x in (0, *path) for x in range(n)) for path in paths(parents)]
    return DraftMask(tuple(sees), depths(parents))


def children(parents: Parents, node: int) -> list[int]:
    """Likeliest first."""
    return [child for child, parent in enumerate(parents, 1) if parent == node]


def parent_of(mask: DraftMask) -> jax.Array:
    """int32[D, J]: the parent of each node, of a mask over all nodes; 0 for the root."""
    return ancestors(mask, mask.depth_DX - 1)


def path_to(mask: DraftMask) -> jax.Array:
    """int32[D, J, J - 1]: the nodes of depth 1, 2 ... above each node and itself; 0 beyond it."""
    J = mask.depth_DX.shape[1]
    return jnp.stack([ancestors(mask, jnp.full((1, 1), d)) for d in range(1, J)], axis=2)


def ancestors(mask: DraftMask, depth_DJ: Any) -> jax.Array:
    """int32[D, J]: which node of that depth each node sees; 0 where it sees none."""
    at_DJX = mask.sees_DJX & (mask.depth_DX[:, None] == depth_DJ[..., None])
    return jnp.sum(jnp.where(at_DJX, jnp.arange(at_DJX.shape[2], dtype=jnp.int32), 0), axis=2)


def seen_in_tree(tree: DraftMask, start_W: jax.Array, pos_WS: jax.Array, span: Span) -> jax.Array:
    """bool[W, J, S]: which of the places ``pos_WS`` each of a row's J tokens sees.

    Args:
        start_W: int32, place of each row's first token.
        span: how far a token sees back from its own position.
    """
    X = tree.depth_DX.shape[1]
    base_W1 = (start_W - tree.n_before)[:, None]
    nth_WS = pos_WS - base_W1
    drafted_WS = (nth_WS >= 0) & (nth_WS < X)
    at_WS = jnp.clip(nth_WS, 0, X - 1)
    seen_WSJ = jnp.where(drafted_WS[..., None], tree.sees_at(at_WS), (nth_WS < 0)[..., None])
    if span:
        key_WS = jnp.where(drafted_WS, base_W1 + tree.depth_at(at_WS), pos_WS)
        query_WJ = base_W1 + tree.depth_DX[:, tree.n_before :]
        seen_WSJ &= key_WS[..., None] >= span.lowest(query_WJ)[:, None]
    return seen_WSJ.swapaxes(1, 2)
