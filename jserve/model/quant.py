"""Quantised weights: one type for all formats, and its product with activations.

It owns what the stored numbers mean. A matrix [N, D] has integers (or e4m3) ``q``, a float32 scale per row and group
of G inputs, and a zero beside it where a format is not symmetric::

    w[n, d] = (q[n, d] - zero[n, d // G]) * scale[n, d // G]

    int8  int8[N, D]       int4  uint8[N, D / 2], -8 to 7         e4m3  float8_e4m3fn[N, D]
                           byte j of 32 inputs: low  input j, plus 8
                                                high input 16 + j, plus 8

Loaders (``jserve.weights.quant``) bring every format into this form, ``dot`` multiplies it, and nothing else knows of
it: a ``QTensor`` has the shape of the matrix that it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

KINDS = {"int8": jnp.int8, "int4": jnp.uint8, "e4m3": jnp.float8_e4m3fn}
"""Kind of ``q`` -> its dtype."""
LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0}
"""The number that a symmetric scale makes of the largest weight of a group."""
PACKED = 32
"""Inputs that share 16 bytes of int4."""
BLOCK_ROWS = 16
"""Rows up to which a 16-bit product over groups adds scaled sums instead of widening the matrix."""
MIN_ROWS = {"int8": 8, "e4m3": 2}
"""Rows below which XLA:CPU has no fast product of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The kind of numbers of a quantised matrix, and of its product."""

    kind: str
    """int8, int4 or e4m3."""
    group: int = 0
    """Inputs that share a scale; 0: all of a row."""
    zeros: bool = False
    rounded: bool = False
    """Activations are rounded, too, with a scale per token (and group): to int8 for integers, to e4m3 for e4m3."""
    dtype: str = "bfloat16"
    """Of the model: products of a form that does not round activations are computed in it."""
    method: str = ""
    """The way of a matrix in the type of the model into this form (``weights.quant.rounding``); empty: its checkpoint
    has it so."""
    made_as: Form | None = None
    """The form in which ``method`` chooses numbers and scales, where devices that share the inputs of a matrix have
    another one of the same values."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert not (self.rounded and self.kind == "int4"), "activations of int4 are not rounded"

    def groups(self, D: int) -> int:
        """Scales of a row of ``D`` inputs."""
        return D // self.group if self.group else 1

    def stored(self, D: int) -> int:
        """Numbers of ``q`` in a row of ``D`` inputs."""
        return D // 2 if self.kind == "int4" else D


@flax.struct.dataclass
class QTensor:
    """A quantised matrix; leading dimensions as those of the matrix."""

    q: Any
    scale: Any
    """float32[..., groups]."""
    zero: Any
    """int8[..., groups]; None: 0."""
    form: Form = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        *rows, n = self.q.shape
        return (*rows, 2 * n if self.form.kind == "int4" else n)

    @property
    def dtype(self) -> Any:
        """Of the model."""
        return jnp.dtype(self.form.dtype)

    def reshape(self, *shape: int) -> QTensor:
        """With other leading dimensions; the last one stays."""
        rows = shape[:-1]
        assert shape[-1] in (-1, self.shape[-1]), "the inputs of a quantised matrix stay together"
        leaves = (self.q, self.scale, self.zero)
        q, scale, zero = (x if x is None else x.reshape(*rows, x.shape[-1]) for x in leaves)
        return QTensor(q=q, scale=scale, zero=zero, form=self.form)


def quantised_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of parameters, a QTensor as one."""
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QTensor))


def n_bytes(tree: Any) -> tuple[int, int]:
    """Bytes of a tree of parameters: of its quantised matrices, and of all else."""
    leaves = quantised_leaves(tree)
    found = [[x.nbytes for x in jax.tree.leaves(leaf)] for leaf in leaves]
    stored = sum(
        sum(sizes) for sizes, leaf in zip(found, leaves, strict=True) if isinstance(leaf, QTensor)
    )
    return stored, sum(map(sum, found)) - stored


def integers(w: QTensor) -> jax.Array:
    """``q`` with a number per input: int8[..., D], or e4m3."""
    if w.form.kind != "int4":
        return w.q
    *rows, n = w.q.shape
    bytes_ = w.q.reshape(*rows, n // (PACKED // 2), PACKED // 2)
    halves = jnp.stack([bytes_ & 15, bytes_ >> 4], axis=-2).astype(jnp.int8) - 8
    return halves.reshape(*rows, 2 * n)


def widened(w: QTensor) -> jax.Array:
    """The matrix in the type of the model; computed in float32."""
    q = grouped(integers(w), w.form)
    if w.zero is not None:
        q = q - w.zero.astype(jnp.float32)[..., None]
    return (q * w.scale[..., None]).reshape(w.shape).astype(w.dtype)


def grouped(q: jax.Array, form: Form) -> jax.Array:
    """float32[..., groups, G]."""
    *rows, D = q.shape
    return q.astype(jnp.float32).reshape(*rows, form.groups(D), -1)


def product(x_TD: jax.Array, w_ND: QTensor) -> jax.Array:
    """``x_TD @ w_ND.T`` as float32[T, N].

    In float32 the matrix of a form with groups is widened whatever T is, so that a result does not depend on it; in 16
    bits few rows add scaled sums of groups.
    """
    form = w_ND.form
    if form.rounded:
        return _rounded_product(x_TD, w_ND)
    if form.group and (w_ND.dtype == jnp.float32 or x_TD.shape[0] > BLOCK_ROWS):
        return _multiply(x_TD.astype(w_ND.dtype), widened(w_ND))
    x_TD = x_TD.astype(w_ND.dtype)
    x_TBG, q_NBG = _blocks(x_TD, form), _blocks(integers(w_ND), form)
    y_TN = _scaled(_block_sums(x_TBG, q_NBG.astype(w_ND.dtype)), w_ND.scale)
    return y_TN - _of_zeros(x_TBG, w_ND)


def _rounded_product(x_TD: jax.Array, w_ND: QTensor) -> jax.Array:
    form, T = w_ND.form, x_TD.shape[0]
    x_TBG, scale_TB = rounded(_blocks(x_TD, form), form.kind)
    spare = max(0, MIN_ROWS[form.kind] - T)
    padded_TBG = jnp.pad(x_TBG, ((0, spare), (0, 0), (0, 0)))
    sums_BTN = _block_sums(padded_TBG, _blocks(integers(w_ND), form))[:, :T]
    y_TN = _scaled(sums_BTN * scale_TB.T[..., None], w_ND.scale)
    return y_TN - _of_zeros(x_TBG.astype(jnp.float32) * scale_TB[..., None], w_ND)


def rounded(x_TBG: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Activations as int8 or e4m3, and their scales float32[T, B]: what they are multiplied by. A token's numbers
    depend on no other token."""
    x_TBG = x_TBG.astype(jnp.float32)
    most_TB = jnp.max(jnp.abs(x_TBG), axis=-1)
    # What is not finite stays so in the scale, and with it in the result; XLA:CPU's largest may pass over a NaN.
    most_TB = jnp.where(jnp.all(jnp.isfinite(x_TBG), axis=-1), most_TB, jnp.nan)
    scale_TB = jnp.where(most_TB == 0, 1.0, most_TB) / LARGEST[kind]
    x_TBG = x_TBG / scale_TB[..., None]
    return (jnp.round(x_TBG) if kind == "int8" else x_TBG).astype(KINDS[kind]), scale_TB


def _blocks(x: jax.Array, form: Form) -> jax.Array:
    *rows, D = x.shape
    return x.reshape(*rows, form.groups(D), -1)


def _block_sums(x_TBG: jax.Array, q_NBG: jax.Array) -> jax.Array:
    """float32[B, T, N]; sums of integers are exact."""
    whole = jnp.issubdtype(q_NBG.dtype, jnp.integer)
    wide = jnp.int32 if whole else jnp.float32
    if x_TBG.shape[1] == 1:
        dims, x, q = (((1,), (1,)), ((), ())), x_TBG[:, 0], q_NBG[:, 0]
        return lax.dot_general(x, q, dims, preferred_element_type=wide)[None].astype(jnp.float32)
    dims = (((2,), (2,)), ((1,), (1,)))
    return lax.dot_general(x_TBG, q_NBG, dims, preferred_element_type=wide).astype(jnp.float32)


def _scaled(sums_BTN: jax.Array, scale_NB: jax.Array) -> jax.Array:
    return jnp.sum(sums_BTN * scale_NB.T[:, None], axis=0)


def _of_zeros(x_TBG: jax.Array, w_ND: QTensor) -> jax.Array | float:
    """The part of a product that the zeros take off."""
    if w_ND.zero is None:
        return 0.0
    sums_TB = jnp.sum(x_TBG.astype(jnp.float32), axis=-1)
    offset_NB = w_ND.zero.astype(jnp.float32) * w_ND.scale
    return _multiply(sums_TB, offset_NB, precision=lax.Precision.HIGHEST)


def _multiply(x: jax.Array, w: jax.Array, **how: Any) -> jax.Array:
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32, **how)
