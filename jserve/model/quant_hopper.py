"""The products of few rows with quantised weights by the Pallas kernel for Hopper, and which it takes.

It owns the way from a ``QTensor`` to the kernel's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jserve.model import native
from jserve.model.quant import HALF_BYTES, Form, QTensor, blocks, of_offsets, rounded


def reads(form: Form) -> bool:
    """True if the kernel has products with matrices in this form. 8 bits with one scale a row are XLA's, which reads
    them once."""
    grouped = bool(form.group) or form.kind in HALF_BYTES
    return grouped and jnp.dtype(form.dtype) == jnp.bfloat16


def takes(form: Form, level: str, n: int, shape: Sequence[int]) -> bool:
    """True if the kernels of ``level`` (empty: none) multiply ``n`` rows with a matrix of ``shape`` in this form."""
    if level != native.HOPPER or not reads(form):
        return False
    from pallas_kernels.quant_matmul import MAX_ROWS, serves  # CPUs do without the kernels

    *rows, D = shape
    return n <= MAX_ROWS and serves(math.prod(rows), D, form.group or D)


def product(x_TD: jax.Array, w_ND: QTensor, **options: Any) -> jax.Array:
    """``quant.product`` as float32[T, N]; ``options``: ``tune`` and ``interpret`` of the kernel."""
    from pallas_kernels import quant_matmul as kernel

    form, scale_TB = w_ND.form, None
    if w_ND.order is not None:
        x_TD = jnp.take(x_TD, w_ND.order[0], axis=1)
    x_TBG = blocks(x_TD if form.rounded else x_TD.astype(w_ND.dtype), form)
    if form.rounded:
        x_TBG, scale_TB = rounded(x_TBG, form, w_ND.input_scale)
    weights = kernel.Weights(w_ND.q, w_ND.scale, w_ND.zero)
    y_TN = kernel.quant_matmul(
        x_TBG.reshape(x_TD.shape), weights, form.kind, x_scale_TB=scale_TB, **options
    )
    if w_ND.shift is None:
        return y_TN
    if scale_TB is not None:
        x_TBG = x_TBG.astype(jnp.float32) * scale_TB[..., None]
    return y_TN - of_offsets(x_TBG, w_ND)
