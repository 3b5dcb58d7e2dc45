"""The native kernels for quantised weights as JAX functions, and which products they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import native
from jserve.model.quant import HALF_BYTES, Form, QTensor, rounded
from jserve.native.library import KINDS

FOUR_BIT_ROWS = 64
"""Rows of a product with numbers of four bits up to which any level beats XLA, which unpacks the matrix in memory."""


def takes(form: Form, level: str, n: int) -> bool:
    """True if the kernels of ``level`` (empty: none) multiply ``n`` rows with a matrix in this form."""
    if level == native.HOPPER:
        return False
    few = native.takes_rows(level, n)
    few = few or (form.kind in HALF_BYTES and bool(level) and n <= FOUR_BIT_ROWS)
    return _reads(form) and few and jnp.dtype(form.dtype) == jnp.bfloat16


def takes_experts(form: Form, level: str, A: int, E: int) -> bool:
    """True if the kernels of ``level`` (empty: none) multiply ``A`` assignments to ``E`` experts in this form, which
    have few rows each on average."""
    few = A <= native.MOST_ASSIGNMENTS and takes(form, level, -(-A // E))
    return few and _kernel_rounds(form) and not form.ordered


def _reads(form: Form) -> bool:
    """True if there are kernels for a form. Of activations that are rounded they take one scale a token."""
    if form.kind not in KINDS or form.static or form.bound:
        return False
    return not form.rounded or not (form.group or form.zeros or form.shifts or form.ordered)


def _kernel_rounds(form: Form) -> bool:
    """True if a form rounds no activations, or the kernels do it."""
    return not (form.rounded and form.kind == "e4m3")


def fuses(w: QTensor) -> bool:
    """True if ``gate_up`` takes these."""
    return _kernel_rounds(w.form)


def product(x_TD: jax.Array, w_ND: QTensor) -> jax.Array:
    """``quant.product`` as float32[T, N]. Rows of x that are all zeros cost nothing."""
    if fuses(w_ND):
        return _call("jserve.quantised_product.v2", _ordered(x_TD, w_ND), w_ND, w_ND.shape[0])
    # Numbers of e4m3 are bfloat16, too.
    x_T1D, scale_T1 = rounded(x_TD[:, None], w_ND.form)
    y_TN = _call("jserve.quantised_product.v2", x_T1D[:, 0], w_ND, w_ND.shape[0])
    return y_TN * scale_T1


def gate_up(x_TD: jax.Array, w_2FD: QTensor) -> jax.Array:
    """``silu`` of the product with gate, times that with up, as float32[T, F]."""
    w_ND = w_2FD.reshape(-1, w_2FD.shape[-1])
    x_TD = _ordered(x_TD, w_2FD)
    return _call("jserve.quantised_gate_up.v2", x_TD, w_ND, w_2FD.shape[1])


def expert_product(x_RD: jax.Array, w_END: QTensor, expert_A: jax.Array) -> jax.Array:
    """As ``native.expert_product``."""
    name = "jserve.quantised_expert_product.v1"
    return _call(name, x_RD, w_END, w_END.shape[1], expert_A)


def expert_gate_up(x_RD: jax.Array, w_ZFD: QTensor, expert_A: jax.Array) -> jax.Array:
    """As ``native.expert_gate_up``."""
    name = "jserve.quantised_expert_gate_up.v1"
    return _call(name, x_RD, w_ZFD, w_ZFD.shape[1], expert_A)


def _ordered(x_TD: jax.Array, w: QTensor) -> jax.Array:
    """``x_TD`` with the columns of ``w.q``."""
    return x_TD if w.order is None else jnp.take(x_TD, w.order[0], axis=1)


def _call(
    name: str, x: jax.Array, w: QTensor, columns: int, expert_A: jax.Array | None = None
) -> jax.Array:
    rows = len(x) if expert_A is None else expert_A.size
    off = [x for x in (w.zero, w.shift) if x is not None]
    integers = w.form.rounded and w.form.kind == "int8"
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((rows, columns), jnp.float32))(
        x.astype(jnp.float32),
        w.q,
        w.scale,
        *off,
        *([] if expert_A is None else [expert_A]),
        level=native.level_number(),
        kind=np.int64(KINDS.index("rounded" if integers else w.form.kind)),
    )
