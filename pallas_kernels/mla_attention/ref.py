"""Computes ``mla_attention`` and ``mla_chunks`` in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.mla_attention.values import LatentPages, LatentSpec
from pallas_kernels.paged_attention.ref import softmax, visible
from pallas_kernels.ragged_prefill.ref import row_of_token
from pallas_kernels.spec import Chunks, Rows

Array = jax.Array


def mla_attention(q_DJNC: Array, pages: LatentPages, rows: Rows, spec: LatentSpec) -> Array:
    """float32[D, J, N, A]; arguments as of ``api.mla_attention``."""
    J = q_DJNC.shape[1]
    kept_DSC = _gather(pages)
    pos_DJ = rows.start_D[:, None] + jnp.arange(J, dtype=jnp.int32)
    seen_DJS = visible(pos_DJ, rows.len_D, kept_DSC.shape[1], 0)
    return _attend(q_DJNC, kept_DSC, seen_DJS, spec)


def mla_chunks(q_PNC: Array, pages: LatentPages, chunks: Chunks, spec: LatentSpec) -> Array:
    """float32[P, N, A], zero for tokens of no sequence; arguments as of ``api.mla_chunks``."""
    first_F, start_F, count_F = chunks
    P = q_PNC.shape[0]
    row_P = row_of_token(first_F, count_F, P)
    real_P, row_P = row_P >= 0, jnp.maximum(row_P, 0)
    pos_P = start_F[row_P] + jnp.arange(P, dtype=jnp.int32) - first_F[row_P]
    len_P = jnp.where(real_P, pos_P + 1, 0)
    kept_PSC = _gather(pages)[row_P]
    seen_P1S = visible(pos_P[:, None], len_P, kept_PSC.shape[1], 0)
    o_PNA = _attend(q_PNC[:, None], kept_PSC, seen_P1S, spec)[:, 0]
    return jnp.where(real_P[:, None, None], o_PNA, 0.0)


def _gather(pages: LatentPages) -> Array:
    """float32[R, M * Z, C]: each row's pages one after another."""
    (_, Z, C), (R, M) = pages.pool_PZC.shape, pages.table_RM.shape
    return pages.pool_PZC[pages.table_RM].astype(jnp.float32).reshape(R, M * Z, C)


def _attend(q_RQNC: Array, kept_RSC: Array, seen_RQS: Array, spec: LatentSpec) -> Array:
    """float32[R, Q, N, A]. What no query of a row sees counts as zero: a weight of zero would not stop NaN."""
    kept_RSC = jnp.where(seen_RQS.any(1)[..., None], kept_RSC, 0.0)
    x = jnp.einsum("rqnc,rsc->rqns", q_RQNC.astype(jnp.float32), kept_RSC) * spec.scale
    p = softmax(x, seen_RQS[:, :, None], 0.0, None)
    return jnp.einsum("rqns,rsa->rqna", p, kept_RSC[..., : spec.rank])
