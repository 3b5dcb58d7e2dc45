"""The projection of every layer, and the XLA:CPU behaviour that determines its form.

XLA:CPU multiplies bfloat16 at full speed only if all of these hold (GPUs do not care), so no other file has to
think of them:

* weights are stored ``[out, in]`` and contracted over the last dimension of both operands;
* the result is float32 (``preferred_element_type``), as all activations here are;
* there are at least two rows: one row alone takes 13 times longer than two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MIN_ROWS = 2


def dot(x_TD: jax.Array, w_ND: jax.Array) -> jax.Array:
    """``x_TD @ w_ND.T`` as float32[T, N], computed in the type of the weight.

    ``w_ND`` may have more dimensions: all but the last are flattened to N (a free reshape).
    """
    return product_as(x_TD, w_ND, jnp.float32)


def narrow_dot(x_TD: jax.Array, w_ND: jax.Array) -> jax.Array:
    """``dot`` for a result of many columns that is rounded soon: on GPUs one that is written in the type of the
    weight, half the bytes of a large batch. A product whose sums are split is not rounded there either."""
    return lax.platform_dependent(
        x_TD,
        w_ND,
        cpu=lambda x, w: product_as(x, w, jnp.float32),
        default=lambda x, w: product_as(x, w, w.dtype).astype(jnp.float32),
    )


def product_as(x_TD: jax.Array, w_ND: jax.Array, dtype: Any) -> jax.Array:
    """``dot`` with a result of ``dtype``."""
    w_ND = w_ND.reshape(-1, w_ND.shape[-1])
    T = x_TD.shape[0]
    x_TD = x_TD.astype(w_ND.dtype)
    if T < MIN_ROWS and w_ND.dtype != jnp.float32:
        x_TD = jnp.pad(x_TD, ((0, MIN_ROWS - T), (0, 0)))
    y_TN = lax.dot_general(x_TD, w_ND, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return y_TN[:T]
