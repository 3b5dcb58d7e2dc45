"""GPTQ: numbers column by column, each column's error taken up by the columns that are not yet rounded.

It owns the order of the columns and the solve. Scales are chosen before, for the matrix as it is, so a group has one
whatever the order (LLM Compressor's ``actorder: static``).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.quant import KINDS, Form
from jserve.weights.quant.rounding import to_grid

DAMP = 0.01
"""Of the mean of the Hessian's diagonal, added to it."""
BLOCK = 128
"""Columns whose errors are spread over the rest of the matrix at once."""


def gptq_numbers(
    w_ND: np.ndarray, scale_NB: np.ndarray, form: Form, hessian_DD: np.ndarray
) -> np.ndarray:
    """int8[N, D] or e4m3: numbers under these scales that leave a small error of the outputs.

    Args:
        w_ND: float32.
        scale_NB: float32[N, groups].
        hessian_DD: float64, the sum of ``x x'`` over calibration tokens.
    """
    D = w_ND.shape[1]
    order_D, spread_DD = _solved(hessian_DD)
    scale_ND = np.repeat(scale_NB, D // scale_NB.shape[1], axis=1)[:, order_D]
    left_ND = jnp.asarray(w_ND[:, order_D], jnp.float32)
    found = []
    for first in range(0, D, BLOCK):
        cut = slice(first, first + BLOCK)
        part, rest = left_ND[:, :BLOCK], left_ND[:, BLOCK:]
        spread = jnp.asarray(spread_DD[cut, first:], jnp.float32)
        q_NX, error_NX = _block(part, jnp.asarray(scale_ND[:, cut]), spread, form.kind)
        left_ND = rest - jnp.matmul(
            error_NX, spread[:, part.shape[1] :], precision=jax.lax.Precision.HIGHEST
        )
        found.append(np.asarray(q_NX))
    numbers_ND = np.empty(w_ND.shape, np.float32)
    numbers_ND[:, order_D] = np.concatenate(found, axis=1)
    return numbers_ND.astype(KINDS[form.kind] if form.kind == "e4m3" else np.int8)


def _solved(hessian_DD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns, those with the largest activations first, and the upper factor of the inverse, in that order."""
    diagonal = np.diag(hessian_DD).copy()
    order_D = np.argsort(-diagonal, kind="stable")
    ordered = hessian_DD[order_D][:, order_D].copy()
    mean = diagonal.mean()
    ordered[np.diag_indices_from(ordered)] += DAMP * mean if mean > 0 else 1.0
    inverse = np.linalg.inv(ordered)
    return order_D, np.linalg.cholesky((inverse + inverse.T) / 2).T


@partial(jax.jit, static_argnums=3)
def _block(
    w_NX: jax.Array, scale_NX: jax.Array, spread_XY: jax.Array, kind: str
) -> tuple[jax.Array, jax.Array]:
    """(numbers, errors to be spread) of neighbouring columns, both float32[N, X]."""
    X = w_NX.shape[1]

    def column(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        w_NX, q_NX, error_NX = carry
        q_N = to_grid(w_NX[:, i] / scale_NX[:, i], kind)
        error_N = (w_NX[:, i] - q_N * scale_NX[:, i]) / spread_XY[i, i]
        w_NX = w_NX - error_N[:, None] * spread_XY[i, :X]
        return w_NX, q_NX.at[:, i].set(q_N), error_NX.at[:, i].set(error_N)

    zeros = jnp.zeros_like(w_NX)
    return jax.lax.fori_loop(0, X, column, (w_NX, zeros, zeros))[1:]
