"""Weights of 4 and 8 bits as bfloat16, exactly, within the registers that the matrix unit reads.

It owns the bits. A thread reads a word of four bytes of a row; a mask takes two numbers 16 bits apart out of it, which
become a pair of bfloat16. So neighbours in a register are not neighbours in the row, which costs nothing: a product is
a sum over inputs in any order, and x is brought into the same one (``in_order``)::

    word q of 16 bytes     | byte 4q | 4q + 1 | 4q + 2 | 4q + 3 |      a byte: an input, or halves of two 16 apart
    pair a                   (4q, 4q + 2)   (4q + 1, 4q + 3)           numbers 2q and 2q + 1 of column block a

The words and the pairs are computed as any values are. Only seeing the bytes of a register as a word, and a word as a
pair, has no name in Pallas: ``words`` and ``pairs`` say it to Mosaic, and to the interpreter in jnp.

Idea of the masks: FasterTransformer's and Marlin's conversion of 4 bits (arXiv 2408.11743).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir

from pallas_kernels.flash import WGMMA

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

KINDS: dict[str, Any] = {
    "int4": jnp.uint8,
    "uint4": jnp.uint8,
    "e2m1": jnp.uint8,
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
}
"""Kind of the numbers -> the dtype in which they lie. int4: -8 to 7, plus 8. uint4: 0 to 15. e2m1: codes of 4-bit
floats, each of which counts double, a whole number."""
HALF_BYTES = ("int4", "uint4", "e2m1")
CHUNK = 16
"""Inputs within which ``in_order`` moves them."""
LINE = 16
"""Bytes of a row that four threads read as a word each."""
BYTES = plgpu.Layout.WGMMA_8BIT
WORDS = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
"""``BYTES`` with four of them as one number."""
EXACT = 0x4300
"""bfloat16 of 128: its lowest bits count ones."""
SIGN_BELOW = {0x01C0: 6, 0x07F0: 4}
"""Bits of a small float within a bfloat16 -> how far the bit above them is from its sign."""


def per_byte(kind: str) -> int:
    """Numbers in a byte."""
    return 2 if kind in HALF_BYTES else 1


def in_order(x_TD: jax.Array) -> jax.Array:
    """x with the inputs of each chunk in the order in which ``wide`` gives those of a row."""
    T, D = x_TD.shape
    return x_TD.reshape(T, D // CHUNK, 4, 2, 2).transpose(0, 1, 4, 2, 3).reshape(T, D)


def wide(bytes_: jax.Array, kind: str, interpret: Any) -> jax.Array:
    """bfloat16[64, n] of uint8[64, n or n / 2]: the numbers, ``offset(kind)`` more than they are."""
    w = words(bytes_, interpret)
    if kind == "e2m1":
        return _floats(w, (6, -2, 2, -6), 0x01C0, 0x3F80, 2.0, interpret)
    if kind == "e4m3":
        return _floats(w, (4, -4), 0x07F0, 0x3C00, 2.0**-6, interpret)
    if kind in HALF_BYTES:
        low = [_both(_moved(w, -n), 0x000F) | _twice(EXACT) for n in (0, 8, 4, 12)]
        return pairs(low, jnp.bfloat16, interpret)
    # Seven bits count from 128; the eighth is the lowest bit of the exponent, and 256 - 128 is what it takes off.
    found = [_both(_moved(w, -n), 0x00FF) | _twice(EXACT) for n in (0, 8)]
    low, high = ([_both(x, mask) for x in found] for mask in (0xFF7F, 0xFF80))
    return pairs(low, jnp.bfloat16, interpret) - pairs(high, jnp.bfloat16, interpret)


def offset(kind: str) -> float:
    """The amount by which the numbers of ``wide`` are too large."""
    return {"int4": 136.0, "uint4": 128.0}.get(kind, 0.0)


def _floats(
    w: Any, lefts: tuple[int, ...], mask: int, bias: int, normal: float, interpret: Any
) -> jax.Array:
    """Small floats as bfloat16.

    Args:
        lefts: for each part of ``pairs``, how far its bits lie from those of a bfloat16's exponent and fraction.
        mask: these bits, without the sign.
        bias: added to them, for the exponent.
        normal: the least number whose first bit is not written down; for those below ``2 x - normal`` is the number
            that the bits stand for, for all others it is more than they are.
    """
    sign = SIGN_BELOW[mask]
    sizes = [_both(_moved(w, n), mask) + _twice(bias) for n in lefts]
    signs = [_both(_moved(w, n + sign), 0x8000) for n in lefts]
    x = pairs(sizes, jnp.bfloat16, interpret)
    x = jnp.minimum(x, x + x - jnp.bfloat16(normal))
    bits = lax.bitcast_convert_type(x, jnp.uint16) ^ pairs(signs, jnp.uint16, interpret)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _moved(w: Any, left: int) -> Any:
    if left < 0:
        return w >> jnp.uint32(-left)
    return w << jnp.uint32(left) if left else w


def _both(w: Any, mask: int) -> Any:
    return w & _twice(mask)


def _twice(bits: int) -> Any:
    return jnp.uint32(bits << 16 | bits)


def words(bytes_: jax.Array, interpret: Any) -> jax.Array:
    """uint32[64, n / 4] of uint8[64, n]."""
    rows, n = bytes_.shape
    if interpret is not None:
        return lax.bitcast_convert_type(bytes_.reshape(rows, n // 4, 4), jnp.uint32)

    @plgpu.inline_mgpu(
        arg_types=(BYTES,),
        return_type=plgpu.ShapeDtypeStruct((rows, n // 4), jnp.uint32, WORDS),
    )
    def seen(_: Any, found: Any) -> Any:
        return _seen_as(found.registers, jnp.uint32, WORDS)

    return seen(bytes_)


def pairs(parts: Sequence[jax.Array], dtype: Any, interpret: Any) -> jax.Array:
    """``dtype``[64, 2 * parts * n], of 16 bits, of words [64, n]: of each four words eight columns a part."""
    rows, n = parts[0].shape
    columns = 2 * len(parts) * n
    if interpret is not None:
        halves = [lax.bitcast_convert_type(x, dtype).reshape(rows, -1, 8) for x in parts]
        return jnp.stack(halves, axis=2).reshape(rows, columns)

    @plgpu.inline_mgpu(
        arg_types=(WORDS,) * len(parts),
        return_type=plgpu.ShapeDtypeStruct((rows, columns), dtype, WGMMA),
    )
    def seen(_: Any, *found: Any) -> Any:
        return _seen_as(arranged([x.registers for x in found]), dtype, WGMMA)

    return seen(*parts)


def arranged(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The registers of ``pairs``, of those of its parts [1, lines, ...]."""
    blocks = np.stack(parts, axis=2)
    return blocks.reshape(1, -1, *blocks.shape[3:])


def _seen_as(registers: np.ndarray, dtype: Any, layout: Any) -> Any:
    """The same 32 bits in each register as numbers of ``dtype``."""
    found = np.empty_like(registers)
    whole = jnp.issubdtype(dtype, jnp.integer)
    kind = mgpu.utils.dtype_to_ir_type(dtype)
    vector = ir.VectorType.get((4 // jnp.dtype(dtype).itemsize,), kind)
    for at, register in np.ndenumerate(registers):
        found[at] = mgpu.utils.bitcast(register, vector)
    signed = False if whole else None
    return mgpu.FragmentedArray(_registers=found, _layout=layout.to_mgpu(), _is_signed=signed)
