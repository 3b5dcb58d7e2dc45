"""Quantised weights: one type for all formats, and its product with activations.

It owns what the stored numbers mean. A matrix [N, D] has integers (or e4m3) ``q``, a float32 scale per row and group
of G inputs, and a zero or a shift beside it where a format is not symmetric::

    w[n, order[d]] = (q[n, d] - zero[n, d // G]) * scale[n, d // G]      or  q * scale - shift

    int8  int8[N, D]       int4  uint8[N, D / 2], -8 to 7         e4m3  float8_e4m3fn[N, D]
                           byte j of 32 inputs: low  input j, plus 8
                                                high input 16 + j, plus 8
                           uint4  alike, 0 to 15, as they are
                           e2m1   alike, of 4-bit floats: q is twice the float, a whole number

Loaders (``jserve.weights.quant``) bring every format into this form, ``dot`` multiplies it, and nothing else knows of
it: a ``QTensor`` has the shape of the matrix that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

KINDS = {
    "int8": jnp.int8,
    "int4": jnp.uint8,
    "uint4": jnp.uint8,
    "e2m1": jnp.uint8,
    "e4m3": jnp.float8_e4m3fn,
}
"""Kind of ``q`` -> its dtype."""
WIDE = "wide"
"""Of a form that no kind holds: the matrix is served in the type of the model."""
HALF_BYTES = ("int4", "uint4", "e2m1")
"""Kinds with two numbers in a byte."""
LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0}
"""The number that a symmetric scale makes of the largest weight of a group."""
PACKED = 32
"""Inputs that share 16 bytes of ``HALF_BYTES``."""
BLOCK_ROWS = 16
"""Rows up to which a 16-bit product over groups adds scaled sums instead of widening the matrix."""
MIN_ROWS = {"int8": 8, "e4m3": 2}
"""Rows below which XLA:CPU has no fast product of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The kind of numbers of a quantised matrix, and of its product."""

    kind: str
    """int8, int4, uint4, e2m1, e4m3, or ``WIDE``."""
    group: int = 0
    """Inputs that share a scale; 0: all of a row."""
    zeros: bool = False
    shifts: bool = False
    ordered: bool = False
    """Inputs are in an order of the matrix: those of a group lie together."""
    rounded: bool = False
    """Activations are rounded, too, with a scale per token (and group): to int8 for integers, to e4m3 for e4m3."""
    static: bool = False
    """The scale of rounded activations is the checkpoint's, one number for all tokens."""
    bound: float = 0.0
    """The largest activation that a scale of a token holds, larger ones are clipped; 0: all are held."""
    dtype: str = "bfloat16"
    """Of the model: products of a form that does not round activations are computed in it."""
    method: str = ""
    """The way of a matrix in the type of the model into this form (``weights.quant.rounding``); empty: its checkpoint
    has it so."""
    made_as: Form | None = None
    """The form in which ``method`` chooses numbers and scales, where devices that share the inputs of a matrix have
    another one of the same values."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS or self.kind == WIDE, self.kind
        assert not (self.rounded and self.kind in HALF_BYTES), (
            "activations of 4 bits are not rounded"
        )
        assert not (self.zeros and self.shifts), "zeros or shifts"
        assert self.rounded or not (self.static or self.bound), "scales of rounded activations"

    @property
    def name(self) -> str:
        """Of ``--quantization``, as far as that has this form; a gate file names forms so."""
        kind = "fp8" if self.kind == "e4m3" else self.kind
        if self.static:
            return f"{kind}-static"
        return kind if self.rounded or kind in (*HALF_BYTES, WIDE) else f"{kind}-weight-only"

    def groups(self, D: int) -> int:
        """Scales of a row of ``D`` inputs."""
        return D // self.group if self.group else 1

    def stored(self, D: int) -> int:
        """Numbers of ``q`` in a row of ``D`` inputs."""
        return D // 2 if self.kind in HALF_BYTES else D


@register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A quantised matrix; leading dimensions as those of the matrix."""

    q: Any
    scale: Any
    """float32[..., groups]."""
    zero: Any
    """int8[..., groups]; None: 0."""
    form: Form = jax.tree.static()
    shift: Any = None
    """float32[..., groups]; None: 0."""
    order: Any = None
    """int32[parts, D], the same for each tensor that is part of the matrix: the input of each column of ``q``; None: as
    they are."""
    input_scale: Any = None
    """float32[parts]: activations are multiples of the largest, where the form is static."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        *rows, n = self.q.shape
        return (*rows, 2 * n if self.form.kind in HALF_BYTES else n)

    @property
    def dtype(self) -> Any:
        """Of the model."""
        return jnp.dtype(self.form.dtype)

    def reshape(self, *shape: int) -> QTensor:
        """With other leading dimensions; the last one stays."""
        rows = shape[:-1]
        assert shape[-1] in (-1, self.shape[-1]), "the inputs of a quantised matrix stay together"
        return self.mapped(lambda x: x.reshape(*rows, x.shape[-1]))

    def mapped(self, change: Callable[[jax.Array], jax.Array]) -> QTensor:
        """With ``change`` made to all that lies by rows: numbers, scales, zeros and shifts."""
        by_rows = {k: x for k, x in self.arrays().items() if k in ("q", "scale", "zero", "shift")}
        return replace(self, **{name: change(x) for name, x in by_rows.items()})

    def arrays(self) -> dict[str, Any]:
        """All that it consists of, by field."""
        names = ("q", "scale", "zero", "shift", "order", "input_scale")
        return {name: x for name in names if (x := getattr(self, name)) is not None}


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


def bytes_by_form(tree: Any, dtype: Any) -> dict[str, int]:
    """Name of a form -> bytes of the matrices that have it, in a tree of parameters or of their specs; the dtype of
    what has none. ``dtype``: of specs that state none."""
    found: dict[str, int] = {}
    for leaf in quantised_leaves(tree):
        name, parts = name_of(leaf, dtype), jax.tree.leaves(leaf)
        n = sum(math.prod(x.shape) * jnp.dtype(x.dtype or dtype).itemsize for x in parts)
        found[name] = found.get(name, 0) + n
    return dict(sorted(found.items()))


def name_of(leaf: Any, dtype: Any) -> str:
    """The name of a leaf's form, or of its type where it has none; ``dtype`` of a spec that states none."""
    return leaf.form.name if isinstance(leaf, QTensor) else str(jnp.dtype(leaf.dtype or dtype))


def form_name(tree: Any) -> str:
    """The names of the forms in a tree of parameters with a plus between them; none: it is not quantised."""
    forms = {leaf.form.name for leaf in quantised_leaves(tree) if isinstance(leaf, QTensor)}
    return "+".join(sorted(forms)) or "none"


def integers(w: QTensor) -> jax.Array:
    """``q`` with a number per input: int8[..., D], or e4m3."""
    if w.form.kind not in HALF_BYTES:
        return w.q
    *rows, n = w.q.shape
    bytes_ = w.q.reshape(*rows, n // (PACKED // 2), PACKED // 2)
    halves = jnp.stack([bytes_ & 15, bytes_ >> 4], axis=-2).astype(jnp.int8)
    numbers = {"int4": lambda x: x - 8, "uint4": lambda x: x, "e2m1": _doubled}[w.form.kind](halves)
    return numbers.reshape(*rows, 2 * n)


def _doubled(code: jax.Array) -> jax.Array:
    """Twice the 4-bit floats of these codes: 0 1 2 3 4 6 8 12, and with bit 3 their negatives."""
    low = code & 7
    size = jnp.where(low < 4, low, jnp.where(low < 6, 2 * low - 4, 4 * low - 16))
    return jnp.where(code < 8, size, -size)


def widened(w: QTensor) -> jax.Array:
    """The matrix in the type of the model; computed in float32."""
    wide = _widened(w)
    return wide if w.order is None else jnp.take(wide, jnp.argsort(w.order[0]), axis=-1)


def _widened(w: QTensor) -> jax.Array:
    """``widened``, with the columns of ``q``."""
    q = grouped(integers(w), w.form)
    if w.zero is not None:
        q = q - w.zero.astype(jnp.float32)[..., None]
    q = q * w.scale[..., None]
    if w.shift is not None:
        q = q - w.shift[..., None]
    return q.reshape(w.shape).astype(w.dtype)


def grouped(q: jax.Array, form: Form) -> jax.Array:
    """float32[..., groups, G]."""
    *rows, D = q.shape
    return q.astype(jnp.float32).reshape(*rows, form.groups(D), -1)


WHOLE, BLOCKS, WIDENED = "xla", "xla-blocks", "xla-widened"
"""The ways of ``product``: one product with the numbers as they are, scaled after; one for each group, whose scaled
sums are added; one with the matrix in the type of the model."""


def way_of(form: Form, n: int) -> str:
    """The way of ``product`` with ``n`` rows."""
    if not form.group:
        return WHOLE
    wide = not form.rounded and (jnp.dtype(form.dtype) == jnp.float32 or n > BLOCK_ROWS)
    return WIDENED if wide else BLOCKS


def product(x_TD: jax.Array, w_ND: QTensor) -> jax.Array:
    """``x_TD @ w_ND.T`` as float32[T, N].

    In float32 the matrix of a form with groups is widened whatever T is, so that a result does not depend on it; in 16
    bits few rows add scaled sums of groups.
    """
    form = w_ND.form
    if w_ND.order is not None:
        x_TD = jnp.take(x_TD, w_ND.order[0], axis=1)
    if form.rounded:
        return _rounded_product(x_TD, w_ND)
    if way_of(form, x_TD.shape[0]) == WIDENED:
        return _multiply(x_TD.astype(w_ND.dtype), _widened(w_ND))
    x_TD = x_TD.astype(w_ND.dtype)
    x_TBG, q_NBG = blocks(x_TD, form), blocks(integers(w_ND), form)
    y_TN = _scaled(_block_sums(x_TBG, q_NBG.astype(w_ND.dtype)), w_ND.scale)
    return y_TN - of_offsets(x_TBG, w_ND)


def _rounded_product(x_TD: jax.Array, w_ND: QTensor) -> jax.Array:
    form, T = w_ND.form, x_TD.shape[0]
    x_TBG, scale_TB = rounded(blocks(x_TD, form), form, w_ND.input_scale)
    spare = max(0, MIN_ROWS[form.kind] - T)
    padded_TBG = jnp.pad(x_TBG, ((0, spare), (0, 0), (0, 0)))
    sums_BTN = _block_sums(padded_TBG, blocks(integers(w_ND), form))[:, :T]
    y_TN = _scaled(sums_BTN * scale_TB.T[..., None], w_ND.scale)
    return y_TN - of_offsets(x_TBG.astype(jnp.float32) * scale_TB[..., None], w_ND)


def rounded(
    x_TBG: jax.Array, form: Form, input_scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Activations as int8 or e4m3, and their scales float32[T, B]: what they are multiplied by. A token's numbers
    depend on no other token."""
    x_TBG, top = x_TBG.astype(jnp.float32), LARGEST[form.kind]
    # What is not finite stays so in the scale, and with it in the result. XLA:CPU's largest may pass over a NaN, and a
    # reduction of its own would be a kernel more on a GPU.
    most_TB = jnp.max(jnp.where(jnp.isfinite(x_TBG), jnp.abs(x_TBG), jnp.inf), axis=-1)
    finite_TB = jnp.isfinite(most_TB)
    if form.static:
        assert input_scale is not None, "a static form has scales of activations"
        scale_TB = jnp.where(finite_TB, jnp.max(input_scale), jnp.nan)
    else:
        # XLA divides by a constant like this anyway; the native kernels do as it says here.
        held_TB = jnp.minimum(most_TB, form.bound) if form.bound else most_TB
        scale_TB = jnp.where(
            most_TB == 0, 1.0, jnp.where(finite_TB, held_TB, jnp.nan)
        ) * np.float32(1 / top)
    x_TBG = x_TBG / scale_TB[..., None]
    if form.static or form.bound:  # other scales hold their largest
        x_TBG = jnp.clip(x_TBG, -128.0 if form.kind == "int8" else -top, top)
    return (jnp.round(x_TBG) if form.kind == "int8" else x_TBG).astype(KINDS[form.kind]), scale_TB


def blocks(x: jax.Array, form: Form) -> jax.Array:
    """[..., groups, G]: the inputs of each scale."""
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


def of_offsets(x_TBG: jax.Array, w_ND: QTensor) -> jax.Array | float:
    """The part of a product that zeros or shifts take off."""
    if w_ND.zero is None and w_ND.shift is None:
        return 0.0
    sums_TB = jnp.sum(x_TBG.astype(jnp.float32), axis=-1)
    offset_NB = w_ND.shift if w_ND.zero is None else w_ND.zero.astype(jnp.float32) * w_ND.scale
    return _multiply(sums_TB, offset_NB, precision=lax.Precision.HIGHEST)


def _multiply(x: jax.Array, w: jax.Array, **how: Any) -> jax.Array:
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32, **how)
