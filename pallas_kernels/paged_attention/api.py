"""``paged_attention``: what it takes, what it refuses, and the packing around the Hopper kernels.

It owns shapes and tuning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.flash import LOG2E
from pallas_kernels.paged_attention import hopper
from pallas_kernels.paged_attention.combine import combine
from pallas_kernels.paged_attention.hopper import Tile
from pallas_kernels.paged_attention.tree import Tree
from pallas_kernels.served import (
    check_heads,
    check_page,
    check_tree,
    multiplied,
    of_dtype,
    tuning,
)

Array = jax.Array
MAX_TOKENS = 16


def paged_attention(
    q_DJNH: Array,
    keys_PKZH: Array,
    values_PKZH: Array,
    table_DM: Array,
    start_D: Array,
    len_D: Array,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_N: Array | None = None,
    tree: Tree | None = None,
    scales_2K: Array | None = None,
    dtype: Any = jnp.float32,
    tune: dict[str, Any] | None = None,
    interpret: Any = None,
) -> Array:
    """Causal attention of D rows of J query tokens over their pages.

    Args:
        q_DJNH: queries of tokens start .. start + J - 1 of each row; cast to the dtype that is
            multiplied: the pool's, or float16 where that is float8_e4m3fn.
        keys_PKZH, values_PKZH: pool of pages, bfloat16, float16 or float8_e4m3fn. What lies beyond
            a row's length or outside its window may be anything, also NaN.
        table_DM: int32 page ids; entries beyond the length are not read.
        start_D: int32 position of the first token.
        len_D: int32 keys of the row, its own tokens included; 0 for a row without any.
        scale: of the scores.
        window: keys each token sees, itself included; 0 for all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
        sinks_N: logit per head that takes part in the softmax with a value of zero.
        tree: what the J tokens see of the newest keys, where they are a tree of drafts or a level of
            one; None: a chain.
        scales_2K: float32, what the stored keys and values of each kv head are multiplied by;
            None: 1.
        dtype: of the result: what the caller multiplies next, so that nothing has to be cast.
        tune: ``block``, ``stages``, ``raw_stages``, ``teams``, ``split_blocks``, ``register_p`` instead of
            those of tune.json.
        interpret: ``plgpu.InterpretGPUParams()`` runs on a CPU.

    Returns:
        ``dtype``[D, J, N, H]; zero for rows of length 0; finite but meaningless for tokens at or
        beyond the length.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    tile = tile_of(q_DJNH, keys_PKZH, scale, window, soft_cap, tree, tune, interpret)
    D, J, N, H = q_DJNH.shape
    K, rows = tile.K, tile.J * tile.G
    q_DKQH = q_DJNH.reshape(D, J, K, tile.G, H).swapaxes(1, 2).reshape(D, K, rows, H)
    if scales_2K is not None:
        q_DKQH = q_DKQH * scales_2K[0, :, None, None]
    q_DKQH = jnp.pad(q_DKQH, ((0, 0), (0, 0), (0, tile.q_rows - rows), (0, 0)))
    work = hopper.plan(start_D, len_D, tile)
    sums = hopper.attend(
        q_DKQH.astype(multiplied(keys_PKZH.dtype)),
        keys_PKZH,
        values_PKZH,
        table_DM,
        start_D,
        len_D,
        work,
        tile,
        interpret,
    )
    sink_N = None if sinks_N is None else sinks_N.astype(jnp.float32) * LOG2E
    as_summed = dtype if scales_2K is None else jnp.float32
    o_DYH = combine(*sums, sink_N, work, tile, as_summed, interpret)
    o_DJNH = o_DYH.reshape(D, J, N, H)
    if scales_2K is not None:
        o_DJNH = (o_DJNH * jnp.repeat(scales_2K[1], tile.G)[:, None]).astype(dtype)
    return o_DJNH


def tile_of(
    q_DJNH: Any,
    keys_PKZH: Any,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    tree: Tree | None = None,
    tune: dict[str, Any] | None = None,
    interpret: Any = None,
) -> Tile:
    """The static description of a call; only shapes and dtypes of the arrays are read.

    Raises:
        ValueError: as ``paged_attention``.
    """
    _, J, N, H = q_DJNH.shape
    _, K, Z, _ = keys_PKZH.shape
    check_heads(N, H, keys_PKZH)
    if not 1 <= J <= MAX_TOKENS:
        raise ValueError(f"{J} tokens a row, but 1 to {MAX_TOKENS} are served")
    check_tree(tree, J, H)
    # The interpreter has no multiprocessors to fill, and every block of the grid costs it time.
    few = {} if interpret is None else {"sms": 4}
    narrow = tree is not None and window > 0
    chosen = {**tuned(H, keys_PKZH.dtype, narrow=narrow), **few, **(tune or {})}
    block, teams = chosen["block"], chosen["teams"]
    check_page(Z, block)
    tile = Tile(
        J=J,
        G=N // K,
        K=K,
        H=H,
        Z=Z,
        block=block,
        stages=chosen["stages"],
        splits=teams,
        split_blocks=chosen["split_blocks"],
        teams=teams,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        tree=tree,
        raw_stages=chosen.get("raw_stages", 0),
        register_p=bool(chosen.get("register_p", interpret is None)),
    )
    return dataclasses.replace(tile, splits=_splits(tile, chosen["sms"]))


def _splits(tile: Tile, sms: int) -> int:
    """As many as keep every multiprocessor busy with one block of the grid."""
    if tile.team_heads:
        return max(sms // (tile.K // tile.teams * tile.tiles), 1)
    return max(sms // (tile.K * tile.tiles), 1) * tile.teams


def tuned(H: int, dtype: Any, *, narrow: bool = False) -> dict[str, Any]:
    """The tuning of one head dimension: ``block``, ``stages``, ``teams``, ``split_blocks`` and ``sms``; with
    KV of 8 bits also ``raw_stages``. ``narrow``: a tree under a window, whose masks need registers."""
    table = tuning("pallas_kernels.paged_attention")
    found = of_dtype(table, H, dtype)
    if narrow and jnp.dtype(dtype).itemsize == 2:
        found = table["tree and window"].get(str(H), found)
    return {"sms": table["sms"], "split_blocks": table["split_blocks"], **found}
