"""The native kernels for quantised weights as JAX functions, and which products they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import native
from jserve.model.quant import Form, QTensor, rounded

KINDS = ("int8", "int4", "e4m3")
"""The numbers that they read."""
INT4_ROWS = 64
"""Rows of a product with int4 up to which any level beats XLA, which unpacks the matrix in memory."""


def takes(form: Form, level: str, n: int) -> bool:
    """True if the kernels of ``level`` (empty: none) multiply ``n`` rows with a matrix in this form."""
    if level == native.HOPPER:
        return False
    few = native.takes_rows(level, n) or (form.kind == "int4" and bool(level) and n <= INT4_ROWS)
    return _reads(form) and few and jnp.dtype(form.dtype) == jnp.bfloat16


def _reads(form: Form) -> bool:
    """True if there are kernels for a form. Of activations that are rounded they take one scale a token."""
    if form.kind not in KINDS or form.shifts or form.ordered or form.static or form.bound:
        return False
    return not form.rounded or not (form.group or form.zeros)


def fuses(w: QTensor) -> bool:
    """True if ``gate_up`` takes these."""
    return not (w.form.rounded and w.form.kind == "e4m3")


def product(x_TD: jax.Array, w_ND: QTensor) -> jax.Array:
    """``quant.product`` as float32[T, N]. Rows of x that are all zeros cost nothing."""
    if fuses(w_ND):
        return _call("jserve.quantised_product.v1", x_TD, w_ND, w_ND.shape[0])
    # Numbers of e4m3 are bfloat16, too.
    x_T1D, scale_T1 = rounded(x_TD[:, None], w_ND.form)
    y_TN = _call("jserve.quantised_product.v1", x_T1D[:, 0], w_ND, w_ND.shape[0])
    return y_TN * scale_T1


def gate_up(x_TD: jax.Array, w_2FD: QTensor) -> jax.Array:
    """``silu`` of the product with gate, times that with up, as float32[T, F]."""
    w_ND = w_2FD.reshape(-1, w_2FD.shape[-1])
    return _call("jserve.quantised_gate_up.v1", x_TD, w_ND, w_2FD.shape[1])


def _call(name: str, x_TD: jax.Array, w_ND: QTensor, columns: int) -> jax.Array:
    shape = jax.ShapeDtypeStruct((len(x_TD), columns), jnp.float32)
    zero = [] if w_ND.zero is None else [w_ND.zero]
    integers = w_ND.form.rounded and w_ND.form.kind == "int8"
    return jax.ffi.ffi_call(name, shape)(
        x_TD.astype(jnp.float32),
        w_ND.q,
        w_ND.scale,
        *zero,
        level=native.level_number(),
        rounded=np.int64(integers),
    )
