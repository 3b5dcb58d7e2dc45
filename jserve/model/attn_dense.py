"""Paged attention by gathering: a handful of kernels on any GPU, the fallback where ``hopper`` cannot serve.

A tile is up to Q tokens of one row: a decode row's J tokens, or 128 of a chunk. The pages that a tile may see are
gathered, and three operations do the rest::

    pages of a tile  --gather-->  keys [I, K, S, H]   scores = q k   one softmax   out = p v   --gather-- values

S is a rung: static, 1,024 tokens and its doubles up to the context. A ``lax.switch`` in the program takes the
smallest one that holds the longest row, so there is one program a bucket, not one a bucket and rung, and short
contexts do not pay for long ones. A layer with a window gathers from the window's first page on, so its rungs
end there. All rows are gathered to the same S: this costs what the longest row does, times the rows.

Tiles whose keys, values and scores exceed ``GATHERED`` bytes together go one group after another, in a loop;
up to there, which is 64 rows of 2,048 tokens of an 8B model, there is none. The last bits of a result may
depend on the rung, and so on the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jserve.kv_layout import Span
from jserve.model.attention import AttendArgs, AttentionBackend, LatentArgs, LayerKV, capped
from jserve.model.attn_latent import absorbed, with_values
from jserve.model.draft_tree import DraftMask, seen_in_tree
from jserve.model.kv_bytes import widened
from jserve.model.kv_pool import kv_shape, move, write_kv
from jserve.model.view import StepView

SHORTEST = 1024
"""Tokens of the first rung."""
GATHERED = 5 << 27
"""Bytes that keys, values and scores of tiles computed together may take on one device."""
TILE, SMALLEST_TILE = 128, 16
"""Tokens of a chunk that are computed together, and as few as they become where a rung is long."""
MASKED = float(np.finfo(np.float32).min)


def attend(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    """float32[T, N, H]; zero for padding tokens."""
    (T, N, H), K = args.q_TNH.shape, kv[0].shape[1]
    far = None if args.sinks is None else args.sinks.q_TNH
    queries = [x.astype(jnp.float32) * args.scale for x in (args.q_TNH, far) if x is not None]
    step = _LayerAttention(
        queries=[x.reshape(T, K, N // K, H) for x in queries],
        kv=kv,
        V=H,
        view=view,
        span=args.span,
        sink_logits_KG=args.sink_logits(K),
        n_sinks=0 if args.sinks is None else args.sinks.n,
        soft_cap=args.soft_cap,
    )
    return _attended(step)


def attend_latent(args: LatentArgs, pool_PZC: jax.Array, view: StepView) -> jax.Array:
    """float32[T, N, V]; zero for padding tokens. Absorbed (``attn_latent``), whatever the step."""
    step = _LayerAttention(
        queries=[absorbed(args, slice(None))[:, None]],
        kv=(pool_PZC[:, None],),
        V=args.k_up_NHA.shape[2],
        view=view,
    )
    return with_values(args, _attended(step))


def _attended(step: _LayerAttention) -> jax.Array:
    """float32[T, N, V] of all rows."""
    view, (T, K, G, _) = step.view, step.queries[0].shape
    out = jnp.zeros((T, K, G, step.V), jnp.float32)
    if view.D:
        out = step.add(out, _decode_tiles, view.J, view.kv_len_R[: view.D], view.tree)
    if view.P:
        tokens = min(TILE, view.P)
        out = step.add(out, _prefill_tiles, tokens, view.kv_len_R[view.D :], None)
    out = jnp.where((view.pos_T >= 0)[:, None, None, None], out, 0.0)
    return out.reshape(T, K * G, step.V)


class _Tiles(NamedTuple):
    """Tokens of one row each, and what they may see."""

    at_IQ: jax.Array
    """Index of each token in T; T: none."""
    pos_IQ: jax.Array
    """-1: none."""
    row_I: jax.Array
    start_I: jax.Array
    """Place of the first token."""
    len_I: jax.Array
    """Places of the row that hold KV; 0: the tile is of no row."""


def _decode_tiles(view: StepView, J: int) -> _Tiles:
    D = view.D
    at_IQ = jnp.arange(D * J, dtype=jnp.int32).reshape(D, J)
    row_I = jnp.arange(D, dtype=jnp.int32)
    pos_IQ = view.pos_T[: D * J].reshape(D, J)
    return _Tiles(at_IQ, pos_IQ, row_I, view.start_R[:D], view.kv_len_R[:D])


def _prefill_tiles(view: StepView, Q: int) -> _Tiles:
    """Each row's tokens cut every Q; the tiles beyond the last are of no token."""
    D, F, T = view.D, view.F, view.pos_T.shape[0]
    n_F = -(-view.count_R[D:] // Q)
    end_F = jnp.cumsum(n_F)
    i_I = jnp.arange((view.P + F * (Q - 1)) // Q, dtype=jnp.int32)
    f_I = jnp.minimum((end_F <= i_I[:, None]).sum(1), F - 1)
    skip_I = (i_I - (end_F - n_F)[f_I]) * Q
    n_I = jnp.clip(view.count_R[D + f_I] - skip_I, 0, Q)
    nth_Q = jnp.arange(Q, dtype=jnp.int32)
    real_IQ = nth_Q < n_I[:, None]
    start_I = view.start_R[D + f_I] + skip_I
    first_I = view.first_R[D + f_I] + skip_I
    return _Tiles(
        at_IQ=jnp.where(real_IQ, first_I[:, None] + nth_Q, T),
        pos_IQ=jnp.where(real_IQ, start_I[:, None] + nth_Q, -1),
        row_I=D + f_I,
        start_I=start_I,
        len_I=jnp.where(n_I > 0, start_I + n_I, 0),
    )


class _LayerAttention(NamedTuple):
    """One layer's attention of a step."""

    queries: list[jax.Array]
    """[T, K, G, H] each: those of what lies within the window, and those that meet sinks behind it."""
    kv: LayerKV
    """Keys and values [P, K, Z, H]; keys alone hold their values in their first ``V`` numbers."""
    V: int
    """Numbers of a value."""
    view: StepView
    span: Span = Span()
    sink_logits_KG: jax.Array | None = None
    n_sinks: int = 0
    soft_cap: float = 0.0

    def add(
        self,
        out_TKGV: jax.Array,
        tiles_of: Callable[[StepView, int], _Tiles],
        Q: int,
        len_R: jax.Array,
        tree: DraftMask | None,
    ) -> jax.Array:
        """``out_TKGV`` with the outputs of tiles of Q tokens, of rows with that many tokens each."""
        rungs = self._rungs(Q + (0 if tree is None else tree.n_before))
        branches = [lambda out, B=B: self._in_rung(out, tiles_of, Q, B, tree) for B in rungs]
        tokens = np.array(rungs[:-1], np.int32) * self.kv[0].shape[2]
        return lax.switch((tokens < len_R.max()).sum(), branches, out_TKGV)

    def _rungs(self, n_own: int) -> list[int]:
        """Pages of each rung, for tiles whose tokens lie within ``n_own`` places."""
        Z, M = self.kv[0].shape[2], self.view.page_table_RM.shape[1]
        most = min(M, -(-(self.span.most + n_own + Z - 2) // Z)) if self.span else M
        found, pages = [], max(SHORTEST // Z, 1)
        while pages < most:
            found.append(pages)
            pages *= 2
        return [*found, most]

    def _in_rung(
        self,
        out_TKGV: jax.Array,
        tiles_of: Callable[[StepView, int], _Tiles],
        Q: int,
        B: int,
        tree: DraftMask | None,
    ) -> jax.Array:
        while Q > SMALLEST_TILE and self._tile_bytes(Q, B) > GATHERED:
            Q //= 2
        tiles = tiles_of(self.view, Q)
        n = tiles.row_I.shape[0]
        W = max(1, GATHERED // self._tile_bytes(Q, B))
        W = -(-n // -(-n // W))  # as many groups, of one size
        if n <= W:
            return out_TKGV.at[tiles.at_IQ].set(self._tiles(tiles, B, tree), mode="drop")
        nobody = (out_TKGV.shape[0], -1, 0, 0, 0)
        tiles = _Tiles(*(_padded(x, -n % W, value) for x, value in zip(tiles, nobody, strict=True)))

        def group(i: jax.Array, out: jax.Array) -> jax.Array:
            part = _Tiles(*(lax.dynamic_slice_in_dim(x, i * W, W) for x in tiles))
            return out.at[part.at_IQ].set(self._tiles(part, B, tree), mode="drop")

        used = (tiles.len_I > 0) * jnp.arange(1, tiles.len_I.size + 1, dtype=jnp.int32)
        return lax.fori_loop(0, -(-used.max() // W), group, out_TKGV)

    def _tile_bytes(self, Q: int, B: int) -> int:
        """Of a tile: keys and values as they are multiplied, scores twice in float32 and once as weights."""
        (_, K, Z, _), H = self.kv[0].shape, self.queries[0].shape[-1]
        itemsize = _multiplied(self.kv[0].dtype).itemsize
        G = self.queries[0].shape[2]
        return B * Z * K * (2 * H * itemsize + Q * G * (8 + itemsize))

    def _tiles(self, tiles: _Tiles, B: int, tree: DraftMask | None) -> jax.Array:
        """float32[I, Q, K, G, V]: what the tokens see of ``B`` pages each."""
        Z = self.kv[0].shape[2]
        base_I = self.span.lowest(tiles.start_I - (0 if tree is None else tree.n_before)) // Z
        page_IB = base_I[:, None] + jnp.arange(B, dtype=jnp.int32)
        pos_IS = base_I[:, None] * Z + jnp.arange(B * Z, dtype=jnp.int32)
        seen_IQS = self._seen(tiles, pos_IS, tree)
        parts = [self._scored(self.queries[0], tiles, page_IB, seen_IQS)]
        if self.n_sinks:
            page_IB = jnp.tile(jnp.arange(-(-self.n_sinks // Z), dtype=jnp.int32), (len(base_I), 1))
            pos_S = jnp.arange(page_IB.shape[1] * Z, dtype=jnp.int32)
            far_IQS = (pos_S < self.n_sinks) & (pos_S < self.span.lowest(tiles.pos_IQ)[..., None])
            parts.append(self._scored(self.queries[1], tiles, page_IB, far_IQS))
        score = jnp.concatenate([x for x, _ in parts], axis=-1)
        values = jnp.concatenate([x for _, x in parts], axis=2)
        top, total = score.max(-1, keepdims=True), 0.0
        if self.sink_logits_KG is not None:
            sink_KC1 = jnp.tile(self.sink_logits_KG, (1, tiles.at_IQ.shape[1]))[..., None]
            top = jnp.maximum(top, sink_KC1)
            total = jnp.exp(sink_KC1 - top)
        p = jnp.exp(score - top)
        total = total + p.sum(-1, keepdims=True)
        o_IKCV = jnp.einsum(
            "ikcs,iksv->ikcv", p.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        n, Q = tiles.at_IQ.shape
        _, K, G, _ = self.queries[0].shape
        return (o_IKCV / total).reshape(n, K, Q, G, self.V).swapaxes(1, 2)

    def _seen(self, tiles: _Tiles, pos_IS: jax.Array, tree: DraftMask | None) -> jax.Array:
        held_I1S = (pos_IS < tiles.len_I[:, None])[:, None]
        if tree is not None:
            return held_I1S & seen_in_tree(tree, tiles.start_I, pos_IS, self.span)
        pos_IQ1, pos_I1S = tiles.pos_IQ[..., None], pos_IS[:, None]
        seen_IQS = held_I1S & (pos_I1S <= pos_IQ1)
        return seen_IQS & (pos_I1S >= self.span.lowest(pos_IQ1)) if self.span else seen_IQS

    def _scored(
        self, q_TKGH: jax.Array, tiles: _Tiles, page_IB: jax.Array, seen_IQS: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(scores [I, K, Q*G, S], values [I, K, S, V]) of pages, counted from each row's first.

        What is not finite stays visible among keys, in the scores of who sees it, and is zero among
        values: a weight of zero would not stop it.
        """
        n, Q = tiles.at_IQ.shape
        _, K, G, H = q_TKGH.shape
        table_RM = self.view.page_table_RM
        page_IB = table_RM[tiles.row_I[:, None], jnp.minimum(page_IB, table_RM.shape[1] - 1)]
        keys, *rest = (_gathered(x, page_IB, H) for x in self.kv)
        values = rest[0] if rest else keys[..., : self.V]
        q_IQKGH = q_TKGH.at[tiles.at_IQ].get(mode="fill", fill_value=0.0).astype(keys.dtype)
        q_IKCH = q_IQKGH.swapaxes(1, 2).reshape(n, K, Q * G, H)
        score = jnp.einsum("ikch,iksh->ikcs", q_IKCH, keys, preferred_element_type=jnp.float32)
        score = capped(score, self.soft_cap)
        seen_I1C = jnp.repeat(seen_IQS, G, axis=1)[:, None]
        return jnp.where(seen_I1C, score, MASKED), jnp.where(jnp.isfinite(values), values, 0)


def _padded(x: jax.Array, n: int, value: Any) -> jax.Array:
    """``x`` with ``n`` more entries of ``value``."""
    return jnp.pad(x, ((0, n), *((0, 0),) * (x.ndim - 1)), constant_values=value)


def _multiplied(dtype: Any) -> Any:
    """The type that KV stored as ``dtype`` is multiplied in: each e4m3 has an exact bfloat16; numbers of 8 and 4 bits
    with a scale are rounded to it."""
    return jnp.dtype(jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype)


def _gathered(pool_PKZY: jax.Array, page_IB: jax.Array, H: int) -> jax.Array:
    """[I, K, B*Z, H]: a kv head's share of each page is one run, so heads come out first."""
    P, K, Z, width = pool_PKZY.shape
    n, B = page_IB.shape
    at_IKB = page_IB[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]
    x = pool_PKZY.reshape(P * K, Z, width).at[at_IKB].get(mode="promise_in_bounds")
    return widened(x, H).reshape(n, K, B * Z, H).astype(_multiplied(pool_PKZY.dtype))


DENSE = AttentionBackend(
    name="dense",
    kv_axis=1,
    kv_shape=kv_shape,
    write_kv=write_kv,
    attend=attend,
    attend_latent=attend_latent,
    move=move,
)
