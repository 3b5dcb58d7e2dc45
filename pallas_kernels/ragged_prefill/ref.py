"""Computes ``ragged_prefill`` in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.ref import gather, softmax, visible
from pallas_kernels.spec import AttentionSpec, Chunks, Pages

Array = jax.Array


def ragged_prefill(
    q_PNH: Array,
    pages: Pages,
    chunks: Chunks,
    spec: AttentionSpec,
    *,
    sinks_N: Array | None = None,
    scales_2K: Array | None = None,
) -> Array:
    """float32[P, N, H]; arguments as of ``api.ragged_prefill``."""
    first_F, start_F, count_F = chunks
    P, N, H = q_PNH.shape
    K = pages.keys_PKZH.shape[1]
    row_P = row_of_token(first_F, count_F, P)
    real_P = row_P >= 0
    row_P = jnp.maximum(row_P, 0)
    pos_P = start_F[row_P] + jnp.arange(P, dtype=jnp.int32) - first_F[row_P]
    len_P = jnp.where(real_P, pos_P + 1, 0)
    k_PSKH, v_PSKH = (x[row_P] for x in gather(pages, scales_2K))
    seen_P1S = visible(pos_P[:, None], len_P, k_PSKH.shape[1], spec.window)
    seen_PS11 = seen_P1S[:, 0, :, None, None]
    q_PKGH = q_PNH.astype(jnp.float32).reshape(P, K, N // K, H)
    x = jnp.einsum("pkgh,pskh->pkgs", q_PKGH, jnp.where(seen_PS11, k_PSKH, 0.0))
    sinks = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, N // K, 1)
    p = softmax(x * spec.scale, seen_P1S[:, None], spec.soft_cap, sinks)
    o = jnp.einsum("pkgs,pskh->pkgh", p, jnp.where(seen_PS11, v_PSKH, 0.0))
    return jnp.where(real_P[:, None, None], o.reshape(P, N, H), 0.0)


def row_of_token(first_F: Array, count_F: Array, P: int) -> Array:
    """int32[P]: the row of each token, -1 for padding."""
    t_P1 = jnp.arange(P, dtype=jnp.int32)[:, None]
    mine_PF = (t_P1 >= first_F) & (t_P1 < first_F + count_F)
    return jnp.where(mine_PF.any(1), jnp.argmax(mine_PF, 1).astype(jnp.int32), -1)
