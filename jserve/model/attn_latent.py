"""Attention over latents in plain XLA, in two forms that give the same but for rounding.

Absorbed, a query takes each head's matrix with it and meets what is kept as it is: one kv head of A + Y numbers, whose
first A are its value too. Expanded, a block's keys and values are made for every head, inside the loop over blocks, so
never those of a whole context::

    absorbed   (q k_up) . c + q_Y . k_Y     then (p c) v_up      cheap a key, dear a query: decode rows, short chunks
    expanded   q . (k_up c) + q_Y . k_Y     then p (v_up c)      from about 171 tokens of a chunk on

In 16 bits chunks of ``EXPANDED`` tokens and more expand, whatever else is in the step. In float32 everything is
absorbed, since results there do not depend on how a text is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jserve.model.attention import LatentArgs
from jserve.model.attn_blocks import (
    Q_PREFILL,
    KVBlocks,
    Layer,
    Queries,
    decode_rows,
    finite,
    prefill_rows,
    product,
)
from jserve.model.dot import heads_dot
from jserve.model.view import StepView

EXPANDED = 256
"""Tokens of a chunk from which keys are expanded for it, in 16 bits."""
Q_EXPANDED = 512
"""Tokens of a chunk that share what a block is expanded to."""
ROWS = 4096
"""Queries of all heads that are compared with a block at once."""


def attend(args: LatentArgs, pool_PZC: jax.Array, view: StepView) -> jax.Array:
    """float32[T, N, V]; zero for padding tokens."""
    n, parts = view.D * view.J, []
    if view.D:
        queries = absorbed(args, slice(0, n))
        o_TKNA = decode_rows(Queries(queries[:, None], None), _layer(args, pool_PZC), view)
        parts.append(with_values(args, o_TKNA[:, 0]))
    if view.P:
        parts.append(_chunks(args, pool_PZC, view))
    return jnp.concatenate(parts)


def _chunks(args: LatentArgs, pool_PZC: jax.Array, view: StepView) -> jax.Array:
    """float32[P, N, V] of the prefill rows: a loop over short ones and, where there is room for such, one over long
    ones, each of as many tiles as its rows have."""
    if view.P < EXPANDED or args.k_up_NHA.dtype.itemsize != 2:
        return _absorbed(args, pool_PZC, view)
    long_R = view.count_R >= EXPANDED
    short, long = (_only(view, rows_R) for rows_R in (~long_R, long_R))
    return _absorbed(args, pool_PZC, short) + _expanded(args, pool_PZC, long)


def _only(view: StepView, rows_R: jax.Array) -> StepView:
    """The view without the tokens of other rows, whose results are then zero."""
    return replace(view, count_R=jnp.where(rows_R, view.count_R, 0))


def absorbed(args: LatentArgs, at: slice) -> jax.Array:
    """float32[T, N, A + Y]: scaled queries of these tokens, as they meet what is kept."""
    q_TNA = heads_dot(args.q_TNH[at], args.k_up_NHA, inner=1)
    return jnp.concatenate([q_TNA, args.q_TNY[at]], axis=-1) * args.scale


def with_values(args: LatentArgs, o_TNA: jax.Array) -> jax.Array:
    """float32[T, N, V]: sums of latents as the values of each head."""
    return heads_dot(o_TNA, args.v_up_NVA, inner=2)


def _absorbed(args: LatentArgs, pool_PZC: jax.Array, view: StepView) -> jax.Array:
    queries = absorbed(args, slice(view.D * view.J, None))[:, None]
    tokens = max(16, min(Q_PREFILL, ROWS // queries.shape[2]))
    layer = _layer(args, pool_PZC)
    o_PKNA = prefill_rows(Queries(queries, None), layer, view, tokens)
    return with_values(args, o_PKNA[:, 0])


def _expanded(args: LatentArgs, pool_PZC: jax.Array, view: StepView) -> jax.Array:
    at, (N, V, _) = slice(view.D * view.J, None), args.v_up_NVA.shape
    q_PNX = jnp.concatenate([args.q_TNH[at], args.q_TNY[at]], axis=-1) * args.scale
    read = partial(_expand, args, _layer(args, pool_PZC).read)
    layer = Layer(read=read, Z=pool_PZC.shape[1], V=V)
    queries = Queries(q_PNX[:, :, None], None)
    return prefill_rows(queries, layer, view, Q_EXPANDED).reshape(-1, N, V)


def _layer(args: LatentArgs, pool_PZC: jax.Array) -> Layer:
    A = args.k_up_NHA.shape[2]
    return Layer(read=partial(_read, pool_PZC, A), Z=pool_PZC.shape[1], V=A)


def _read(pool_PZC: jax.Array, A: int, pages_WB: jax.Array) -> KVBlocks:
    """The blocks in pages, of one head; what is not finite reads as in ``attn_xla``."""
    P, Z, C = pool_PZC.shape
    W, B = pages_WB.shape
    x_AY = pool_PZC.reshape(P, Z * C).at[pages_WB.reshape(-1)].get(mode="promise_in_bounds")
    k_WKSC, v_WKSC = (finite(x_AY, x).reshape(W, 1, B * Z, C) for x in (jnp.nan, 0.0))
    return KVBlocks(k_WKSC, v_WKSC[..., :A])


def _expand(
    args: LatentArgs, read: Callable[[jax.Array], KVBlocks], pages_WB: jax.Array
) -> KVBlocks:
    """The keys and values of every head in these pages, in the type of the weights."""
    kept, (N, _, A), dtype = read(pages_WB), args.k_up_NHA.shape, args.k_up_NHA.dtype
    k_WSC, c_WSA = kept.k_WKSH[:, 0], kept.v_WKSV[:, 0]
    own_WNSH = product("wsa,nha->wnsh", k_WSC[..., :A], args.k_up_NHA)
    W, S, _ = k_WSC.shape
    shared = jnp.broadcast_to(k_WSC[:, None, :, A:], (W, N, S, k_WSC.shape[2] - A))
    keys = jnp.concatenate([own_WNSH.astype(dtype), shared.astype(dtype)], axis=-1)
    return KVBlocks(keys, product("wsa,nva->wnsv", c_WSA, args.v_up_NVA).astype(dtype))
