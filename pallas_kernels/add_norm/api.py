"""``add_norm``: what it takes and what it refuses.

It owns shapes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.add_norm import hopper
from pallas_kernels.add_norm.hopper import COLUMNS, Tile

Array = jax.Array


def add_norm(
    y_STD: Array, x_TD: Array, weight_D: Array, eps: float, dtype: Any, interpret: Any = None
) -> tuple[Array, Array]:
    """Add S partial sums of a product to the residual stream, and norm the result.

    Args:
        y_STD: float32 partial sums.
        x_TD: float32 residual stream.
        weight_D: of the root mean square norm, of any float type.
        dtype: what the next product multiplies.
        interpret: ``plgpu.InterpretGPUParams()`` runs on a CPU.

    Returns:
        (float32[T, D] the new residual stream, ``dtype``[T, D] its norm).

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    S, T, D = y_STD.shape
    for name, x, shape in (("residual", x_TD, (T, D)), ("weight", weight_D, (D,))):
        if x.shape != shape:
            raise ValueError(f"{name} of shape {x.shape}, not {shape}")
    for name, x in (("partial sums", y_STD), ("residual", x_TD)):
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} are {x.dtype}, not float32")
    if not serves(D):
        raise ValueError(f"rows of {D}: the kernel takes multiples of {COLUMNS}")
    tile = Tile(S=S, T=T, D=D, eps=eps, dtype=jnp.dtype(dtype))
    return hopper.add_norm(y_STD, x_TD, weight_D, tile, interpret)


def serves(D: int) -> bool:
    """True if rows of D can be served."""
    return D % COLUMNS == 0
