"""``ragged_prefill``: what it takes, what it refuses, and the packing around the Hopper kernel.

It owns shapes and tuning.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.flash import LOG2E
from pallas_kernels.ragged_prefill import hopper
from pallas_kernels.ragged_prefill.hopper import ROWS_OF_TILE, Tile
from pallas_kernels.ragged_prefill.ref import row_of_token
from pallas_kernels.served import check_heads, check_page, multiplied, of_dtype, tuning
from pallas_kernels.spec import AttentionSpec, Chunks, Pages

Array = jax.Array


def ragged_prefill(
    q_PNH: Array,
    pages: Pages,
    chunks: Chunks,
    spec: AttentionSpec,
    *,
    sinks_N: Array | None = None,
    scales_2K: Array | None = None,
) -> Array:
    """Causal attention of chunks of F sequences, whose own keys are in their pages already.

    Args:
        q_PNH: queries of P tokens; cast to the dtype that is multiplied: the pool's, or float16
            where that is float8_e4m3fn, bfloat16 where it is int8.
        spec: its ``tune`` may have ``block``, ``stages``, ``raw_stages``, ``ping_pong``, ``ahead`` (in place of
            ``ping_pong``) and ``register_p``.
        sinks_N, scales_2K: as of ``paged_attention``.

    Returns:
        [P, N, H] in the dtype that is multiplied, float32 with ``scales_2K``; zero for tokens of
        no sequence.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    tile = tile_of(q_PNH, pages.keys_PKZH, chunks.count_F.shape[0], spec)
    work = hopper.plan(chunks.count_F, tile)
    if scales_2K is not None:
        q_PNH = q_PNH * jnp.repeat(scales_2K[0], tile.G)[:, None]
    o_KYH = hopper.attend(
        _by_tile(q_PNH.astype(multiplied(pages.keys_PKZH.dtype)), chunks.first_F, work, tile),
        pages,
        chunks,
        None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(tile.K, tile.G) * LOG2E,
        work,
        tile,
        spec.interpret,
    )
    o_PNH = _by_token(o_KYH, chunks, work.base_F, tile)
    return o_PNH if scales_2K is None else o_PNH * jnp.repeat(scales_2K[1], tile.G)[:, None]


def _by_tile(q_PNH: Array, first_F: Array, work: hopper.Work, tile: Tile) -> Array:
    """[K, Y, H]: the queries gathered into tiles; rows of no token repeat some token."""
    u_Y = (work.skip_I[:, None] + jnp.arange(ROWS_OF_TILE, dtype=jnp.int32)).reshape(-1)
    token_Y = jnp.repeat(first_F[work.row_I], ROWS_OF_TILE) + u_Y // tile.G
    token_Y = jnp.clip(token_Y, 0, tile.P - 1)
    q_PKGH = q_PNH.reshape(tile.P, tile.K, tile.G, tile.H)
    q_YKH = q_PKGH.at[token_Y, :, u_Y % tile.G].get(mode="promise_in_bounds")
    return q_YKH.swapaxes(0, 1)


def _by_token(o_KYH: Array, chunks: Chunks, base_F: Array, tile: Tile) -> Array:
    """[P, N, H]: rows gathered from the tiles; zero for tokens of no sequence."""
    first_F, _, count_F = chunks
    row_P = row_of_token(first_F, count_F, tile.P)
    row = jnp.maximum(row_P, 0)
    token_P = jnp.arange(tile.P, dtype=jnp.int32) - first_F[row]
    y_P = jnp.where(row_P >= 0, base_F[row] + token_P * tile.G, 0)
    y_PG = y_P[:, None] + jnp.arange(tile.G, dtype=jnp.int32)
    o_KPGH = o_KYH.at[:, y_PG].get(mode="promise_in_bounds")
    o_PKGH = jnp.where((row_P >= 0)[:, None, None, None], o_KPGH.swapaxes(0, 1), 0)
    return o_PKGH.reshape(tile.P, tile.K * tile.G, tile.H)


def tile_of(q_PNH: Any, keys_PKZH: Any, F: int, spec: AttentionSpec) -> Tile:
    """The static description of a call; only shapes and dtypes of the arrays are read.

    Raises:
        ValueError: as ``ragged_prefill``.
    """
    P, N, H = q_PNH.shape
    _, K, Z, _ = keys_PKZH.shape
    check_heads(N, H, keys_PKZH)
    table = tuning("pallas_kernels.ragged_prefill")
    chosen = {**of_dtype(table, H, keys_PKZH.dtype), **(spec.tune or {})}
    block = chosen["block"]
    check_page(Z, block, keys_PKZH.dtype)
    return Tile(
        P=P,
        F=F,
        G=N // K,
        K=K,
        H=H,
        Z=Z,
        block=block,
        stages=chosen["stages"],
        ping_pong=chosen["ping_pong"] and not chosen.get("ahead", False),
        ahead=bool(chosen.get("ahead", False)),
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        raw_stages=chosen.get("raw_stages", 0),
        scaled=keys_PKZH.dtype == jnp.int8,
        register_p=bool(chosen.get("register_p", spec.interpret is None)),
    )
