"""``quant_matmul``: what it takes, what it refuses, and the padding around the Hopper kernel.

It owns shapes and tuning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul import bits, hopper
from pallas_kernels.quant_matmul.bits import KINDS
from pallas_kernels.quant_matmul.hopper import M, Tile
from pallas_kernels.quant_matmul.values import Weights
from pallas_kernels.served import tuning

Array = jax.Array
MAX_ROWS = 64
DEPTHS = (256, 128, 64)
"""Inputs that may be read at once; a row has a multiple of them."""
LEAST_GROUP = 16
MOST_GROUPS = 4
"""Of a step, twice as many of 4 bits: the compiler reads all scales of one early, and has no registers for more."""
ROOM = 200 * 1024
"""Bytes of shared memory for copies in flight."""


def quant_matmul(
    x_TD: Array,
    w: Weights,
    kind: str,
    *,
    x_scale_TB: Array | None = None,
    tune: dict[str, Any] | None = None,
    interpret: Any = None,
) -> Array:
    """``x @ ((q - zero) * scale).T`` for few rows: each weight is read once, as it is stored.

    Args:
        x_TD: 1 to 64 rows; bfloat16, or cast to it.
        w: [N, D] of N >= 64; a scale for each 16 inputs or a multiple of them, up to the whole row.
        kind: of its numbers, of ``KINDS``.
        x_scale_TB: float32, what the inputs of a group of x are multiplied by, after the sum; None: 1.
        tune: ``warpgroups``, ``depth``, ``stages``, ``splits``, ``register_w`` instead of those of
            tune.json.
        interpret: ``plgpu.InterpretGPUParams()`` runs on a CPU.

    Returns:
        float32[T, N], products of bfloat16 with exact weights, summed in float32 and then scaled.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    tile = tile_of(x_TD, w, kind, x_scale_TB, tune, interpret)
    spare = (0, tile.M - x_TD.shape[0])
    x_MD = jnp.pad(bits.in_order(x_TD.astype(jnp.bfloat16)), (spare, (0, 0)))
    x_scale_BM = None if x_scale_TB is None else jnp.pad(x_scale_TB.T, ((0, 0), spare))
    y_SNM = hopper.multiply(x_MD, w, x_scale_BM, tile, interpret)
    return y_SNM.sum(0).T[: x_TD.shape[0]]


def serves(N: int, D: int, group: int) -> bool:
    """True if a matrix [N, D] with a scale for each ``group`` inputs can be served."""
    return N >= M and group >= LEAST_GROUP and bool(_depth(D, group, DEPTHS[0]))


def _depth(D: int, group: int, most: int) -> int:
    """Inputs to read at once, at most ``most``: whole groups of a row, or parts of one. 0: there is no such number."""
    fits = (d for d in DEPTHS if d <= most and not D % d and not (d % group and group % d))
    return next(fits, 0) if group % LEAST_GROUP == 0 and D % group == 0 else 0


def tile_of(
    x_TD: Any,
    w: Weights,
    kind: str,
    x_scale_TB: Any = None,
    tune: dict[str, Any] | None = None,
    interpret: Any = None,
) -> Tile:
    """The static description of a call; only shapes and dtypes of the arrays are read.

    Raises:
        ValueError: as ``quant_matmul``.
    """
    _check(x_TD, w, kind, x_scale_TB)
    (T, D), (N, B) = x_TD.shape, w.scale_NB.shape
    chosen = {**tuned(T), **(tune or {})}
    warpgroups = min(chosen["warpgroups"], N // M)
    tile = Tile(
        kind=kind,
        M=-(-T // 8) * 8,
        N=N,
        D=D,
        group=D // B,
        depth=_depth(D, D // B, min(chosen["depth"], MOST_GROUPS * bits.per_byte(kind) * D // B)),
        warpgroups=warpgroups,
        stages=chosen["stages"],
        splits=chosen.get("splits", 1),
        register_w=bool(chosen.get("register_w", interpret is None)),
    )
    # As many bytes in flight whatever the depth is; numbers of 8 bits take twice the room that the table is made for.
    stages = min(chosen["stages"] * chosen["depth"] // tile.depth, ROOM // tile.stage_bytes)
    tile = dataclasses.replace(tile, stages=stages)
    if "splits" in chosen:
        return tile
    # The interpreter has no multiprocessors to fill, and every block of the grid costs it time.
    few = 2 if interpret is not None else max(chosen["sms"] // tile.blocks, 1)
    return tile.split(few)


def _check(x_TD: Any, w: Weights, kind: str, x_scale_TB: Any) -> None:
    (T, D), (N, B) = x_TD.shape, w.scale_NB.shape
    if not 1 <= T <= MAX_ROWS:
        raise ValueError(f"{T} rows, but 1 to {MAX_ROWS} are served")
    if kind not in KINDS:
        raise ValueError(f"numbers of kind {kind!r}: only {', '.join(KINDS)} are served")
    wanted = {
        "q": (w.q, KINDS[kind], (N, D // bits.per_byte(kind))),
        "scale": (w.scale_NB, jnp.float32, (N, B)),
        "zero": (w.zero_NB, jnp.int8, (N, B)),
        "scale of x": (x_scale_TB, jnp.float32, (T, B)),
    }
    for name, (array, dtype, shape) in wanted.items():
        if array is not None and (array.dtype != dtype or array.shape != shape):
            named = f"{jnp.dtype(dtype)}{list(shape)}"
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {named}")
    if D % B or not serves(N, D, D // B):
        raise ValueError(
            f"weights [{N}, {D}] in {B} groups: at least {M} rows of whole {DEPTHS[-1]} inputs are served, in groups of"
            f" {LEAST_GROUP}, 32 or {DEPTHS[-1]} inputs or multiples of these"
        )


def tuned(rows: int) -> dict[str, Any]:
    """The tuning for so many rows of x: ``warpgroups``, ``depth``, ``stages`` and ``sms``."""
    table = tuning("pallas_kernels.quant_matmul")
    return {"sms": table["sms"], **table["16" if rows <= 16 else str(M)]}
