"""``mla_attention`` and ``mla_chunks``: what they take, what they refuse, and the packing around the Hopper kernels.

It owns shapes and tuning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.flash import M
from pallas_kernels.mla_attention import chunks as chunk_kernel, rows as row_kernel
from pallas_kernels.mla_attention.hopper import ROW_GROUP, SMEM, TEAM, Tile
from pallas_kernels.mla_attention.values import LatentPages, LatentSpec
from pallas_kernels.paged_attention.combine import combine
from pallas_kernels.paged_attention.hopper import Tile as Line, padded_rows, plan
from pallas_kernels.served import check_page, tuning
from pallas_kernels.spec import Chunks, Rows

Array = jax.Array
MAX_TOKENS = 16
MOST_VALUES = 512
"""Numbers of a value: half of them are the sums of a warpgroup, 128 registers a thread."""
DTYPES = (jnp.bfloat16, jnp.float16)


def mla_attention(
    q_DJNC: Array, pages: LatentPages, rows: Rows, spec: LatentSpec, *, dtype: Any = jnp.float32
) -> Array:
    """Causal attention of D rows of J query tokens over the latents of their pages, which all N heads share.

    Args:
        q_DJNC: queries of tokens start .. start + J - 1 of each row, as they meet latents; cast to the pool's dtype.
        dtype: of the result.
        spec: its ``tune`` may have ``block``, ``stages``, ``sms``, ``split_blocks`` and ``register_p``.

    Returns:
        ``dtype``[D, J, N, A]: sums of latents; zero for rows of length 0; finite but meaningless for tokens at or
        beyond the length.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    tile, line = tiles_of(q_DJNC, pages.pool_PZC, spec)
    D, J, N, C = q_DJNC.shape
    q_DQC = q_DJNC.reshape(D, J * N, C)
    q_DQC = jnp.pad(q_DQC, ((0, 0), (0, line.q_rows - J * N), (0, 0)))
    work = plan(rows, line)
    sums = row_kernel.attend(
        q_DQC.astype(pages.pool_PZC.dtype), *pages, rows, work, tile, line, spec.interpret
    )
    o_DYA = combine(*sums, None, work, line, dtype, spec.interpret)
    return o_DYA.reshape(D, J, N, tile.A)


def mla_chunks(q_PNC: Array, pages: LatentPages, chunks: Chunks, spec: LatentSpec) -> Array:
    """Causal attention of chunks of prompts over the latents of their pages, their own included.

    Args:
        q_PNC: queries of all chunks' tokens, as they meet latents; cast to the pool's dtype.
        spec: its ``tune`` may have ``block``, ``stages`` and ``register_p``.

    Returns:
        [P, N, A] in the pool's dtype: sums of latents; anything for tokens of no sequence.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    (P, N, _), F = q_PNC.shape, chunks.count_F.shape[0]
    tile = tile_of(q_PNC, pages.pool_PZC, spec)
    n_rows = P * tile.N
    # A tile that begins at the last token reads 64 rows; whole groups of rows are written.
    ahead = -(-M // tile.N)
    q_PNC = jnp.pad(q_PNC, ((0, ahead), (0, tile.N - N), (0, 0))).astype(pages.pool_PZC.dtype)
    work = chunk_kernel.plan(chunks.count_F, tile.N, chunk_kernel.most_tiles(P, F, tile.N))
    o_YA = chunk_kernel.attend(
        q_PNC.reshape(-1, tile.C), *pages, chunks, work, tile, n_rows, spec.interpret
    )
    return o_YA.reshape(P, tile.N, tile.A)[:, :N]


def unserved(A: int, C: int, dtype: Any) -> str:
    """The reason why the kernels take no latents of C numbers, the first A of which are values; empty: they do."""
    if dtype not in DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in DTYPES)
        return f"latents are {jnp.dtype(dtype).name}, only {names} are served"
    if A % (TEAM * M) or not 0 < A <= MOST_VALUES:
        return f"values of {A} numbers are no multiple of {TEAM * M} up to {MOST_VALUES}"
    if C % M or C <= A:
        return f"latents of {C} numbers are no multiple of {M} above the {A} of their values"
    return ""


def tile_of(q: Any, pool_PZC: Any, spec: LatentSpec, *, out_dtype: Any = None) -> Tile:
    """The static description of a call over chunks; only shapes and dtypes of the arrays are read. ``out_dtype``: of
    what leaves through shared memory; None: the pool's.

    Raises:
        ValueError: as ``mla_chunks``.
    """
    *_, N, C_q = q.shape
    _, Z, C = pool_PZC.shape
    if C_q != C:
        raise ValueError(f"queries of {C_q} numbers do not meet latents of {C}")
    if reason := unserved(spec.rank, C, pool_PZC.dtype):
        raise ValueError(reason)
    chosen = {**tuning("pallas_kernels.mla_attention"), **(spec.tune or {})}
    check_page(Z, chosen["block"], pool_PZC.dtype)
    tile = Tile(
        N=-(-N // ROW_GROUP) * ROW_GROUP,
        A=spec.rank,
        C=C,
        Z=Z,
        block=chosen["block"],
        stages=chosen["stages"],
        scale=spec.scale,
        register_p=bool(chosen.get("register_p", spec.interpret is None)),
    )
    need = tile.smem_bytes(pool_PZC.dtype, out_dtype or pool_PZC.dtype)
    if need > SMEM and spec.interpret is None:
        raise ValueError(f"{tile.stages} blocks of {C} numbers take {need} bytes of {SMEM} shared")
    return tile


def tiles_of(q_DJNC: Any, pool_PZC: Any, spec: LatentSpec) -> tuple[Tile, Line]:
    """The static description of a call over rows, and that of the line of their blocks.

    Raises:
        ValueError: as ``mla_attention``.
    """
    _, J, N, _ = q_DJNC.shape
    if not 1 <= J <= MAX_TOKENS:
        raise ValueError(f"{J} tokens a row, but 1 to {MAX_TOKENS} are served")
    tile = tile_of(q_DJNC, pool_PZC, spec, out_dtype=jnp.float32)
    tile = dataclasses.replace(tile, N=N)
    # The interpreter has no multiprocessors to fill, and every block of the grid costs it time.
    few = {} if spec.interpret is None else {"sms": 4}
    chosen = {**tuning("pallas_kernels.mla_attention"), **few, **(spec.tune or {})}
    line = Line(
        J=J,
        G=N,
        K=1,
        H=tile.A,
        Z=tile.Z,
        block=tile.block,
        stages=tile.stages,
        splits=max(chosen["sms"] // -(-padded_rows(J * N) // M), 1),
        split_blocks=chosen["split_blocks"],
        teams=1,
        scale=spec.scale,
    )
    return tile, line
