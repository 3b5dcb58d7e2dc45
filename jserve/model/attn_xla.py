"""Paged attention in plain XLA: the CPU backend, and the fallback where no kernel exists.

It owns a KV layout, and reads it for the loops of ``attn_blocks``. A layer's keys are [P, K, Z, H], so that a kv
head's share of a page is one contiguous run. Bfloat16 and e4m3 are stored as their bits (uint16, uint8), because
scattering them on XLA:CPU converts the whole pool.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import attn_latent
from jserve.model.attention import AttendArgs, AttentionBackend, LayerKV, Places
from jserve.model.attn_blocks import KVBlocks, Layer, Queries, decode_rows, finite, prefill_rows
from jserve.model.kv_bytes import BYTES, widened
from jserve.model.kv_quant import E4M3, stored
from jserve.model.view import StepView


def kv_shape(K: int, H: int, n_pages: int, page_size: int) -> tuple[int, ...]:
    return (n_pages, K, page_size, H)


def kv_dtype(dtype: Any) -> Any:
    """The type that values of ``dtype`` are stored as: bfloat16 and e4m3 as their bits."""
    bits = {jnp.dtype(jnp.bfloat16): jnp.uint16, E4M3: jnp.uint8}
    return jnp.dtype(bits.get(jnp.dtype(dtype), dtype))


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """Scatter each token's key and value to its page and offset."""
    keys, values = (
        pool.at[view.write_page_T, :, view.write_off_T].set(
            stored(x_TKH, pool.dtype, pool.shape[-1])
        )
        for pool, x_TKH in zip(kv, (k_TKH, v_TKH), strict=True)
    )
    return keys, values


def attend(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    """float32[T, N, H]; zero for padding tokens."""
    parts = [_decode_part(args, kv, view)] if view.D else []
    parts += [_prefill_part(args, kv, view)] if view.P else []
    N = args.q_TNH.shape[1]
    return jnp.concatenate([x.reshape(-1, N, x.shape[-1]) for x in parts])


def _decode_part(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    queries = _scaled(args, kv[0].shape[1])
    return decode_rows(queries.part(slice(0, view.D * view.J)), _layer(args, kv), view)


def _prefill_part(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    queries = _scaled(args, kv[0].shape[1])
    return prefill_rows(queries.part(slice(view.D * view.J, None)), _layer(args, kv), view)


def _scaled(args: AttendArgs, K: int) -> Queries:
    (T, N, H), sinks = args.q_TNH.shape, args.sinks

    def scaled(x_TNH: jax.Array) -> jax.Array:
        return (x_TNH.astype(jnp.float32) * args.scale).reshape(T, K, N // K, H)

    return Queries(scaled(args.q_TNH), None if sinks is None else scaled(sinks.q_TNH))


def _layer(args: AttendArgs, kv: LayerKV) -> Layer:
    (_, K, Z, _), H = kv[0].shape, args.q_TNH.shape[-1]
    return Layer(
        read=partial(_read, kv, H),
        Z=Z,
        V=H,
        span=args.span,
        sinks=0 if args.sinks is None else args.sinks.n,
        soft_cap=args.soft_cap,
        sink_logits_KG=args.sink_logits(K),
    )


def _read(kv: LayerKV, H: int, pages_WB: jax.Array) -> KVBlocks:
    """The blocks in pages [W, B]. What is not finite reads as NaN among keys, so that it stays
    visible in the scores of its own row, and as zero among values, so that it cannot leave it
    with a weight of zero."""
    P, K, Z, width = kv[0].shape
    W, B = pages_WB.shape
    at_A = (pages_WB[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]).reshape(-1)

    def read(pool: jax.Array, instead: float) -> jax.Array:
        x_AY = pool.reshape(P * K, Z * width).at[at_A].get(mode="promise_in_bounds")
        x = widened(x_AY.reshape(-1, Z, width), H) if pool.dtype == BYTES else x_AY
        return finite(x, instead).reshape(W, K, B * Z, H)

    return KVBlocks(read(kv[0], np.nan), read(kv[1], 0.0))


def move(kv: LayerKV, old: Places, new: Places) -> LayerKV:
    """Copy entries to other places."""
    keys, values = (pool.at[new[0], :, new[1]].set(pool[old[0], :, old[1]]) for pool in kv)
    return keys, values


XLA = AttentionBackend(
    name="xla",
    kv_axis=1,
    kv_shape=kv_shape,
    kv_dtype=kv_dtype,
    write_kv=write_kv,
    attend=attend,
    attend_latent=attn_latent.attend,
    move=move,
)
