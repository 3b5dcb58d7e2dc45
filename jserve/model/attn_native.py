"""Paged attention and writes of KV that are one native kernel call each per layer.

It owns no layout: pools and moves are those of ``attn_xla``. Drafts in a chain are tokens like others. A model with a
layer that the kernel does not take is refused, since its steps would still count on padding that costs nothing. Steps
that verify trees of drafts, and steps traced without kernels, are XLA's.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model import native
from jserve.model.arch import Attention
from jserve.model.attention import AttendArgs, KVStored, LayerKV
from jserve.model.attn_xla import XLA
from jserve.model.draft_tree import TreeShape
from jserve.model.view import StepView


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """The tokens' keys and values go to their pages and offsets."""
    if not native.attends(kv[0], 1):
        return XLA.write_kv(kv, k_TKH, v_TKH, view)
    return native.write_kv((kv[0], kv[1]), k_TKH, v_TKH, view.write_page_T, view.write_off_T)


def attend(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
    """float32[T, N, H]; zero for padding tokens."""
    if view.tree is not None or not native.attends(kv[0], args.q_TNH.shape[1] // kv[0].shape[1]):
        return XLA.attend(args, kv, view)
    return native.attention(
        args.q_TNH,
        (kv[0], kv[1]),
        native.Rows(view.page_table_RM, view.start_R, view.count_R, view.first_R),
        scale=args.scale,
        window=args.window,
        far_TNH=None if args.sinks is None else args.sinks.q_TNH,
        n_sinks=0 if args.sinks is None else args.sinks.n,
    )


def check(layer: Attention, stored: KVStored, tree: TreeShape) -> None:
    """Refuse what the kernel does not do. Trees it leaves to ``xla``, in the steps that verify some."""
    name, H, G = "attention_backend native", layer.H, layer.N // layer.K
    reason, field = "", "attention_backend"
    if stored.dtype != jnp.uint16 or stored.form:
        kept = stored.form or jnp.dtype(stored.dtype).name
        reason, field = f"{name} serves KV in bfloat16, not in {kept}", "kv_cache_dtype"
    elif H % native.HEAD_MULTIPLE or H > native.MOST_HEAD:
        multiple = f"multiples of {native.HEAD_MULTIPLE} up to {native.MOST_HEAD}"
        reason = f"{name} serves heads of {multiple}, not of {H}"
    elif G > native.MOST_GROUP:
        reason = f"{name} serves up to {native.MOST_GROUP} query heads a kv head, not {G}"
    elif layer.soft_cap:
        reason = f"{name} serves no capped scores"
    elif layer.sink_logits:
        reason = f"{name} serves no sink logits"
    elif stored.page_size % native.PAGE_MULTIPLE:
        multiple = f"pages of a multiple of {native.PAGE_MULTIPLE} tokens"
        reason, field = f"{name} serves {multiple}, not of {stored.page_size}", "page_size"
    if reason:
        raise ConfigError(f"{reason}; xla does", field=field)


NATIVE = dataclasses.replace(
    XLA,
    name="native",
    write_kv=write_kv,
    attend=attend,
    attend_latent=None,
    has_chunks=False,
    check=check,
)
