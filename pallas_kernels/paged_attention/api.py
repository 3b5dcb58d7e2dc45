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
from pallas_kernels.spec import AttentionSpec, Pages, Rows

Array = jax.Array
MAX_TOKENS = 16
SMALL_PAGE = 16
"""Pages of fewer tokens are so many copies a block that the warpgroup that loads needs more registers."""


def paged_attention(
    q_DJNH: Array,
    pages: Pages,
    rows: Rows,
    spec: AttentionSpec,
    *,
    sinks_N: Array | None = None,
    tree: Tree | None = None,
    scales_2K: Array | None = None,
    dtype: Any = jnp.float32,
) -> Array:
    """Causal attention of D rows of J query tokens over their pages.

    Args:
        q_DJNH: queries of tokens start .. start + J - 1 of each row; cast to the dtype that is
            multiplied: the pool's, or float16 where that is float8_e4m3fn, bfloat16 where it is int8.
        sinks_N: logit per head that takes part in the softmax with a value of zero.
        tree: what the J tokens see of the newest keys, where they are a tree of drafts or a level of
            one; None: a chain.
        scales_2K: float32, what the stored keys and values of each kv head are multiplied by, beside the scales that
            ``pages`` may have of each; None: 1.
        dtype: of the result: what the caller multiplies next, so that nothing has to be cast.
        spec: its ``tune`` may have ``block``, ``stages``, ``teams``, ``split_blocks`` and ``register_p``.

    Returns:
        ``dtype``[D, J, N, H]; zero for rows of length 0; finite but meaningless for tokens at or
        beyond the length.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    tile = tile_of(q_DJNH, pages.keys_PKZH, spec, tree)
    D, J, _, H = q_DJNH.shape
    K, used = tile.K, tile.J * tile.G
    q_DKQH = q_DJNH.reshape(D, J, K, tile.G, H).swapaxes(1, 2).reshape(D, K, used, H)
    if scales_2K is not None:
        q_DKQH = q_DKQH * scales_2K[0, :, None, None]
    q_DKQH = jnp.pad(q_DKQH, ((0, 0), (0, 0), (0, tile.q_rows - used), (0, 0)))
    q_DKQH = q_DKQH.astype(multiplied(pages.keys_PKZH.dtype))
    sink_N = None if sinks_N is None else sinks_N.astype(jnp.float32) * LOG2E
    as_summed = dtype if scales_2K is None else jnp.float32
    o_DJNH = _attend(q_DKQH, pages, rows, tile, sink_N, as_summed, spec.interpret)
    if scales_2K is not None:
        o_DJNH = (o_DJNH * jnp.repeat(scales_2K[1], tile.G)[:, None]).astype(dtype)
    return o_DJNH


def paged_attention_of_heads(
    q_DKQH: Array, G: int, pages: Pages, rows: Rows, spec: AttentionSpec, dtype: Any = jnp.float32
) -> Array:
    """``paged_attention`` of one token a row, whose queries lie as the kernel reads them: nothing packs them.

    Args:
        q_DKQH: the G queries of each kv head in the dtype that is multiplied, then so many rows of anything
            that they are ``q_rows_of(G)``.

    Returns:
        ``dtype``[D, K * G, H].

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    D, K, Q, H = q_DKQH.shape
    shape = jax.ShapeDtypeStruct((D, 1, K * G, H), q_DKQH.dtype)
    tile = tile_of(shape, pages.keys_PKZH, spec)
    if tile.q_rows != Q:
        raise ValueError(f"{Q} rows of queries a kv head, not {tile.q_rows}")
    if q_DKQH.dtype != multiplied(pages.keys_PKZH.dtype):
        raise ValueError(f"queries are {q_DKQH.dtype}, keys {pages.keys_PKZH.dtype}")
    return _attend(q_DKQH, pages, rows, tile, None, dtype, spec.interpret)[:, 0]


def q_rows_of(G: int) -> int:
    """Rows of queries a kv head that the kernel reads of one token with G queries a kv head."""
    return hopper.padded_rows(G)


def _attend(
    q_DKQH: Array,
    pages: Pages,
    rows: Rows,
    tile: Tile,
    sink_N: Array | None,
    dtype: Any,
    interpret: Any,
) -> Array:
    """[D, J, N, H]: both kernels."""
    work = hopper.plan(rows, tile)
    sums = hopper.attend(q_DKQH, pages, rows, work, tile, interpret)
    o_DYH = combine(*sums, sink_N, work, tile, dtype, interpret)
    return o_DYH.reshape(q_DKQH.shape[0], tile.J, tile.heads, tile.H)


def tile_of(q_DJNH: Any, keys_PKZH: Any, spec: AttentionSpec, tree: Tree | None = None) -> Tile:
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
    few = {} if spec.interpret is None else {"sms": 4}
    widens = keys_PKZH.dtype.itemsize == 1
    short = (tree is not None and spec.window > 0) or (widens and Z < SMALL_PAGE)
    chosen = {**tuned(H, keys_PKZH.dtype, short=short), **few, **(spec.tune or {})}
    block, teams = chosen["block"], chosen["teams"]
    check_page(Z, block, keys_PKZH.dtype)
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
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        tree=tree,
        widens=widens,
        scaled=keys_PKZH.dtype == jnp.int8,
        register_p=bool(chosen.get("register_p", spec.interpret is None)),
    )
    return dataclasses.replace(tile, splits=_splits(tile, chosen["sms"]))


def _splits(tile: Tile, sms: int) -> int:
    """As many as keep every multiprocessor busy with one block of the grid."""
    if tile.team_heads:
        return max(sms // (tile.K // tile.teams * tile.tiles), 1)
    return max(sms // (tile.K * tile.tiles), 1) * tile.teams


def tuned(H: int, dtype: Any, *, short: bool = False) -> dict[str, Any]:
    """The tuning of one head dimension: ``block``, ``stages``, ``teams``, ``split_blocks`` and ``sms``.
    ``short``: registers are, for the masks of a tree under a window or the copies of small pages of 8 bits."""
    table = tuning("pallas_kernels.paged_attention")
    found = of_dtype(table, H, dtype)
    if short:
        bits = table if jnp.dtype(dtype).itemsize == 2 else table["8 bits"]
        found = bits["short of registers"].get(str(H), found)
    return {"sms": table["sms"], "split_blocks": table["split_blocks"], **found}
