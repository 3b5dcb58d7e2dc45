"""Selects the accepted path of a draft tree and compacts its KV, so that the row becomes a chain.

It owns the step between drawing at every node and everything after it, which knows chains only: the KV of the
path's nodes is copied to the row's first places, and what is indexed by token or by draw is put in the order of the
path::

    nodes    0  1  2  3  4  5        path 0 2 5, three tokens accepted
    KV       k0 k2 k5 .  .  .        k2 and k5 moved to places 1 and 2; the rest is never read
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jserve.model.attention import AttentionBackend, LayerKV
from jserve.model.view import StepView
from jserve.speculation.device.verify import accept_tree


def accepted(view: StepView, drawn_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int32[D] accepted tokens, int32[D, J] the nodes they are drawn after)."""
    assert view.tree is not None
    D, J = view.D, view.J
    token_DJ, drawn_DJ = (x[: D * J].reshape(D, J) for x in (view.tok_T, drawn_E))
    return accept_tree(token_DJ, drawn_DJ, view.count_R[:D], view.tree)


def straightened(
    attn: AttentionBackend, view: StepView, kv: list[LayerKV], path_DJ: jax.Array
) -> list[LayerKV]:
    """The KV with the entries of each row's path at the row's first places."""
    new = (view.write_page_T[: view.D * view.J], view.write_off_T[: view.D * view.J])
    old = along(view, path_DJ, new)
    return [attn.moved(layer, old, new) for layer in kv]


def along(view: StepView, path_DJ: jax.Array, tree: Any) -> Any:
    """Arrays by token or by draw, those of decode rows in the order of their paths."""
    first_D1 = jnp.arange(view.D, dtype=jnp.int32)[:, None] * view.J
    at_n = (first_D1 + path_DJ).reshape(-1)

    def one(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[at_n], x[at_n.shape[0] :]])

    return jax.tree.map(one, tree)


def as_chain(view: StepView, path_DJ: jax.Array) -> StepView:
    """The view whose decode rows ran their paths as chains."""
    n = view.D * view.J
    place_T = jnp.concatenate(
        [(view.start_R[: view.D, None] + jnp.arange(view.J)).reshape(-1), view.pos_T[n:]]
    )
    return replace(
        view,
        tok_T=along(view, path_DJ, view.tok_T),
        pos_T=jnp.where(view.row_T < view.D + view.F, place_T, -1),
        tree=None,
    )
