"""``quant_matmul``: what it takes, what it refuses, and the padding around the Hopper kernel.

It owns shapes and tuning.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bench.candidates.quant_matmul import hopper
from bench.candidates.quant_matmul.hopper import M, Tile
from pallas_kernels.served import tuning

Array = jax.Array
MAX_ROWS = 64
BLOCKS = (64, 128)
"""Weights along D that may share a scale."""


def quant_matmul(
    x_MD: Array,
    w_ND: Array,
    scales_BN: Array,
    *,
    tune: dict[str, Any] | None = None,
    interpret: Any = None,
) -> Array:
    """``x @ (w * scales).T`` for few rows: each weight is read once, as 4 bits.

    Args:
        x_MD: 1 to 64 rows; bfloat16, or cast to it.
        w_ND: int4, -8 to 7.
        scales_BN: float32; the weights of output n from d = b * D / B on are multiplied by
            ``scales[b, n]``. D / B is 64 or 128.
        tune: ``warpgroups``, ``blocks``, ``stages``, ``splits``, ``register_w`` instead of those of
            tune.json.
        interpret: ``plgpu.InterpretGPUParams()`` runs on a CPU.

    Returns:
        float32[M, N], products summed in float32.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    tile = tile_of(x_MD, w_ND, scales_BN, tune, interpret)
    rows = x_MD.shape[0]
    x_MD = jnp.pad(x_MD.astype(jnp.bfloat16), ((0, tile.M - rows), (0, 0)))
    y_SNM = hopper.multiply(x_MD, w_ND, scales_BN, tile, interpret)
    return y_SNM.sum(0).T[:rows]


def tile_of(
    x_MD: Any, w_ND: Any, scales_BN: Any, tune: dict[str, Any] | None = None, interpret: Any = None
) -> Tile:
    """The static description of a call; only shapes and dtypes of the arrays are read.

    Raises:
        ValueError: as ``quant_matmul``.
    """
    (rows, D), N = x_MD.shape, w_ND.shape[0]
    B = scales_BN.shape[0]
    _check(rows, D, w_ND, scales_BN)
    chosen = {**tuned(rows), **(tune or {})}
    tile = Tile(
        M=-(-rows // 8) * 8,
        N=N,
        D=D,
        block=D // B,
        blocks=chosen["blocks"],
        warpgroups=chosen["warpgroups"],
        stages=chosen["stages"],
        splits=chosen.get("splits", 1),
        register_w=bool(chosen.get("register_w", interpret is None)),
    )
    if N % tile.width or B % tile.blocks:
        sizes = f"[{N}, {D}] in blocks of {tile.block}"
        raise ValueError(f"weights {sizes}: not whole tiles of {tile.width} x {tile.depth}")
    if "splits" in chosen:
        return tile
    few = 2 if interpret is not None else max(chosen["sms"] // (N // tile.width), 1)
    return tile.split(few)


def _check(rows: int, D: int, w_ND: Any, scales_BN: Any) -> None:
    N, B = w_ND.shape[0], scales_BN.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows, but 1 to {MAX_ROWS} are served")
    if w_ND.dtype != jnp.int4 or scales_BN.dtype != jnp.float32:
        raise ValueError(f"weights are {w_ND.dtype} and scales {scales_BN.dtype}: int4, float32")
    if w_ND.shape[1] != D or scales_BN.shape[1] != N:
        raise ValueError(f"x [{rows}, {D}], weights {w_ND.shape} and scales {scales_BN.shape}")
    if D % B or D // B not in BLOCKS:
        raise ValueError(f"{B} scales for {D} weights: blocks must be of {BLOCKS}")


def tuned(rows: int) -> dict[str, Any]:
    """The tuning for so many rows of x: ``warpgroups``, ``blocks``, ``stages`` and ``sms``."""
    table = tuning("bench.candidates.quant_matmul")
    return {"sms": table["sms"], **table["16" if rows <= 16 else str(M)]}
