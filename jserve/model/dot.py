"""The products of every layer, and the one place that chooses who computes them.

On a CPU the native kernels take products of few rows with bfloat16 and with quantised weights (``native.takes``,
``native_quant.takes``), on Hopper a kernel those of few rows with groups of weights (``quant_hopper.takes``); other
quantised ones are in ``quant``; everything else is XLA's. XLA:CPU multiplies bfloat16 at
full speed only if all of these hold (GPUs do not care), so no other file has to think of them:

* weights are stored ``[out, in]`` and contracted over the last dimension of both operands;
* the result is float32 (``preferred_element_type``), as all activations here are;
* there are at least two rows: one row alone takes 13 times longer than two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model import native, native_quant, quant, quant_hopper
from jserve.model.arch import Clamped

Weight = jax.Array | quant.QTensor
MIN_ROWS = 2
Products = list[tuple[jax.Array, Weight]]
_WATCHERS: list[Products] = []


@contextmanager
def watched() -> Iterator[Products]:
    """The (activations, weight) of every product that is traced inside, in order: for calibration and checks of single
    matrices. Not for functions that other traces share."""
    found: Products = []
    _WATCHERS.append(found)
    try:
        yield found
    finally:
        _WATCHERS.remove(found)


def _noted(x_TD: jax.Array, w_ND: Weight) -> None:
    for found in _WATCHERS:
        found.append((x_TD, w_ND))


def dot(x_TD: jax.Array, w_ND: Weight) -> jax.Array:
    """``x_TD @ w_ND.T`` as float32[T, N], computed in the type of the weight.

    ``w_ND`` may have more dimensions: all but the last are flattened to N (a free reshape).
    """
    _noted(x_TD, w_ND)
    return product_as(x_TD, w_ND, jnp.float32)


def stacked_dot(x_TD: jax.Array, w_SND: Weight) -> jax.Array:
    """``dot`` as float32[T, S, N]. XLA's partitioner gathers the whole of a matrix that is split over N where S and N
    are flattened first."""
    if isinstance(w_SND, quant.QTensor):
        return dot(x_TD, w_SND).reshape(x_TD.shape[0], *w_SND.shape[:2])
    _noted(x_TD, w_SND)
    dims = (((1,), (2,)), ((), ()))
    x_TD = x_TD.astype(w_SND.dtype)
    return lax.dot_general(x_TD, w_SND, dims, preferred_element_type=jnp.float32)


def narrow_dot(x_TD: jax.Array, w_ND: Weight) -> jax.Array:
    """``dot`` for a result of many columns that is rounded soon: on GPUs one that is written in the type of the
    weight, half the bytes of a large batch. A product whose sums are split is not rounded there either."""
    if isinstance(w_ND, quant.QTensor):
        return dot(x_TD, w_ND)
    _noted(x_TD, w_ND)
    return lax.platform_dependent(
        x_TD,
        w_ND,
        cpu=lambda x, w: product_as(x, w, jnp.float32),
        default=lambda x, w: product_as(x, w, w.dtype).astype(jnp.float32),
    )


NATIVE, HOPPER = "native", "quant_matmul"
"""The paths of the kernels for CPUs and for Hopper; those of XLA are the ways of ``quant.product``."""
EXPERTS = "expert_"
"""The beginning of the names of matrices that ``moe`` multiplies."""
PRODUCTS = {NATIVE: native_quant.product, HOPPER: quant_hopper.product}


def path_of(form: quant.Form, level: str, n: int, shape: Sequence[int]) -> str:
    """The path of ``n`` rows with a matrix of ``shape`` in this form: the kernels of ``level`` (empty: there are
    none), or a way of ``quant.product``."""
    if native_quant.takes(form, level, n):
        return NATIVE
    if quant_hopper.takes(form, level, n, shape):
        return HOPPER
    return quant.way_of(form, n)


def forms_for_hopper(tree: Any) -> tuple[quant.Form, ...]:
    """The forms in a tree of parameters, or of their specs, whose products of few rows the kernel for Hopper takes."""
    forms = (leaf.form for leaf, experts in _matrices(tree) if not experts)
    return tuple(dict.fromkeys(filter(quant_hopper.reads, forms)))


def paths(tree: Any, level: str, rows: Iterable[int]) -> dict[str, dict[str, list[int]]]:
    """Name of a form -> path of its products -> the least and the most of ``rows`` that take it, for the matrices of a
    tree of parameters or of their specs. Several paths where forms of one name differ, or shapes."""
    cases = {(leaf.form, leaf.shape, experts) for leaf, experts in _matrices(tree)}
    found: dict[str, dict[str, list[int]]] = {}
    for (form, shape, experts), n in itertools.product(sorted(cases, key=repr), sorted(rows)):
        path = path_of(form, "" if experts and level == native.HOPPER else level, n, shape)
        of_form = found.setdefault(form.name, {})
        least, most = of_form.get(path, (n, n))
        of_form[path] = [min(least, n), max(most, n)]
    return dict(sorted(found.items()))


def _matrices(tree: Any) -> Iterator[tuple[quant.QTensor, bool]]:
    """Each quantised matrix, and whether it is of experts."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, quant.QTensor))
    for path, leaf in leaves:
        if isinstance(leaf, quant.QTensor):
            yield leaf, any(str(getattr(key, "key", "")).startswith(EXPERTS) for key in path)


def product_as(x_TD: jax.Array, w_ND: Weight, dtype: Any) -> jax.Array:
    """``dot`` with a result of ``dtype``."""
    w_ND = w_ND.reshape(-1, w_ND.shape[-1])
    if isinstance(w_ND, quant.QTensor):
        path = path_of(w_ND.form, native.kernels.value, x_TD.shape[0], w_ND.shape)
        return PRODUCTS.get(path, quant.product)(x_TD, w_ND).astype(dtype)
    if dtype == jnp.float32 and native.takes(x_TD, w_ND):
        return native.product(x_TD, w_ND)
    T = x_TD.shape[0]
    x_TD = x_TD.astype(w_ND.dtype)
    if T < MIN_ROWS and w_ND.dtype != jnp.float32:
        x_TD = jnp.pad(x_TD, ((0, MIN_ROWS - T), (0, 0)))
    y_TN = lax.dot_general(x_TD, w_ND, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return y_TN[:T]


def heads_dot(x_TNI: jax.Array, w: jax.Array, *, inner: int) -> jax.Array:
    """float32[T, N, O]: each head's rows times its own matrix, computed in the type of ``w``.

    Heads lead in both operands, since XLA:CPU has no product of bfloat16 for some other orders; at least two rows, so
    that a row has the same bits beside any others.

    Args:
        w: [N, O, I], or [N, I, O] with ``inner`` 1.
        inner: its axis that is summed over, 2 or 1.
    """
    T = x_TNI.shape[0]
    if T < MIN_ROWS:
        x_TNI = jnp.pad(x_TNI, ((0, MIN_ROWS - T), (0, 0), (0, 0)))
    x_NTI = x_TNI.swapaxes(0, 1).astype(w.dtype)
    dims = (((2,), (inner,)), ((0,), (0,)))
    y_NTO = lax.dot_general(x_NTI, w, dims, preferred_element_type=jnp.float32)
    return y_NTO.swapaxes(0, 1)[:T]


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gate_up(
    x_TD: jax.Array,
    w_2FD: Weight,
    bias_2F: jax.Array | None = None,
    activation: str | Clamped = "silu",
) -> jax.Array:
    """``activated`` of gate and up as float32[T, F]; these are ``dot(x_TD, w_2FD) + bias_2F``."""
    if bias_2F is None and activation == "silu":
        if isinstance(w_2FD, quant.QTensor):
            path = path_of(w_2FD.form, native.kernels.value, x_TD.shape[0], w_2FD.shape)
            if path == NATIVE and native_quant.fuses(w_2FD):
                return native_quant.gate_up(x_TD, w_2FD)
        elif native.takes(x_TD, w_2FD):
            return native.gate_up(x_TD, w_2FD)
    y_T2F = narrow_dot(x_TD, w_2FD).reshape(x_TD.shape[0], 2, -1)
    if bias_2F is not None:
        y_T2F = y_T2F + bias_2F
    return activated(activation, y_T2F[:, 0], y_T2F[:, 1])


def activated(activation: str | Clamped, gate: jax.Array, up: jax.Array) -> jax.Array:
    """``activation(gate) * up``, or what a ``Clamped`` makes of both."""
    if isinstance(activation, str):
        return ACTIVATIONS[activation](gate) * up
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(activation.alpha * gate)


def skip_unread(x_TD: jax.Array, read_T: jax.Array) -> jax.Array:
    """``x_TD`` with zeros in the rows that nobody reads, where the products in use skip such rows."""
    skips = native.kernels.value not in ("", native.HOPPER)
    return jnp.where(read_T[:, None], x_TD, 0.0) if skips else x_TD
