"""Computes ``paged_attention`` in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.tree import Tree
from pallas_kernels.spec import AttentionSpec, Pages, Rows

Array = jax.Array


def paged_attention(
    q_DJNH: Array,
    pages: Pages,
    rows: Rows,
    spec: AttentionSpec,
    *,
    sinks_N: Array | None = None,
    tree: Tree | None = None,
    scales_2K: Array | None = None,
) -> Array:
    """float32[D, J, N, H]; arguments as of ``api.paged_attention``."""
    start_D, len_D = rows
    D, J, N, H = q_DJNH.shape
    K = pages.keys_PKZH.shape[1]
    place_J = jnp.arange(J, dtype=jnp.int32)
    tree = tree or Tree.of(tuple(range(-1, J - 1)))
    k_DSKH, v_DSKH = gather(pages, scales_2K)
    S = k_DSKH.shape[1]
    seen_DJS = visible(start_D[:, None] + place_J, len_D, S, 0)
    seen_DJS &= on_path(tree, start_D, S, spec.window)
    row_sees_DS = seen_DJS.any(1)[..., None, None]
    q_DJKGH = q_DJNH.astype(jnp.float32).reshape(D, J, K, N // K, H)
    x = jnp.einsum("djkgh,dskh->djkgs", q_DJKGH, jnp.where(row_sees_DS, k_DSKH, 0.0))
    p = softmax(x * spec.scale, seen_DJS[:, :, None, None], spec.soft_cap, _sinks(sinks_N, K))
    o = jnp.einsum("djkgs,dskh->djkgh", p, jnp.where(row_sees_DS, v_DSKH, 0.0))
    return o.reshape(D, J, N, H)


def on_path(tree: Tree, start_D: Array, S: int, window: int) -> Array:
    """bool[D, J, S]: keys before the tree, and those of its places that token j sees, each within
    the window of its position."""
    base_D = start_D - tree.n_before
    i_DS = jnp.arange(S, dtype=jnp.int32) - base_D[:, None]
    at_DS = jnp.clip(i_DS, 0, len(tree.depth) - 1)
    own_DJS = jnp.asarray(np.array(tree.sees))[:, at_DS].swapaxes(0, 1)
    seen_DJS = jnp.where((i_DS < 0)[:, None], True, own_DJS)
    if window:
        depth_X = jnp.asarray(tree.depth, jnp.int32)
        key_DS = jnp.where(i_DS < 0, i_DS, depth_X[at_DS])
        seen_DJS &= key_DS[:, None] > depth_X[tree.n_before :, None] - window
    return seen_DJS


def gather(pages: Pages, scales_2K: Array | None) -> tuple[Array, Array]:
    """Keys and values, float32[R, M * Z, K, H]: each row's pages one after another, times their scales."""

    def dense(pool_PKZH: Array, scales_PKZ: Array | None, which: int) -> Array:
        found = pool_PKZH[pages.table_RM].astype(jnp.float32)
        if scales_PKZ is not None:
            found = found * scales_PKZ[pages.table_RM][..., None]
        R, M, K, Z, H = found.shape
        found = found.swapaxes(2, 3).reshape(R, M * Z, K, H)
        return found if scales_2K is None else found * scales_2K[which][:, None]

    return (
        dense(pages.keys_PKZH, pages.k_scales_PKZ, 0),
        dense(pages.values_PKZH, pages.v_scales_PKZ, 1),
    )


def visible(pos_RQ: Array, len_R: Array, S: int, window: int) -> Array:
    """bool[R, Q, S]: keys at or before the query's position, in the row and in its window."""
    s_S = jnp.arange(S, dtype=jnp.int32)
    seen = (s_S <= pos_RQ[..., None]) & (s_S < len_R[:, None, None])
    return seen & (s_S > pos_RQ[..., None] - window) if window else seen


def softmax(x: Array, seen: Array, soft_cap: float, sinks_KG1: Array | None) -> Array:
    """Weights over the last dimension, zero where nothing is seen; a sink takes its share."""
    if soft_cap:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(seen, x, -jnp.inf)
    top = jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    sunk = jnp.zeros_like(top)
    if sinks_KG1 is not None:
        top = jnp.maximum(top, sinks_KG1)
        sunk = jnp.exp(sinks_KG1 - top)
    p = jnp.exp(x - top)
    return p / jnp.maximum(p.sum(-1, keepdims=True) + sunk, jnp.finfo(jnp.float32).tiny)


def _sinks(sinks_N: Array | None, K: int) -> Array | None:
    return None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, -1, 1)
