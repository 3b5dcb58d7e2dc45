"""Paged attention and writes of KV that are one native kernel call each per layer; what the kernels do not take is that
of ``xla``.

It owns no layout: pools and moves are those of ``attn_xla``. Drafts in a chain are tokens like others. Trees of
drafts, capped scores, chunks, sink logits, latents, pages and groups of query heads that the kernel does not take, and
steps traced without kernels, stay on XLA.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model import native
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
    G = args.q_TNH.shape[1] // kv[0].shape[1]
    other = args.soft_cap or args.chunk or args.sink_logits_N is not None
    if view.tree is not None or other or not native.attends(kv[0], G):
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


def check(H: int, stored: KVStored, tree: TreeShape) -> None:
    dtype = stored.dtype
    if dtype != jnp.uint16 or H % native.HEAD_MULTIPLE or H > native.MOST_HEAD:
        raise ConfigError(
            f"attention_backend native serves KV in bfloat16 with heads of {native.HEAD_MULTIPLE} to"
            f" {native.MOST_HEAD}, not heads of {H} stored as {jnp.dtype(dtype)}",
            field="attention_backend",
        )


NATIVE = dataclasses.replace(XLA, name="native", write_kv=write_kv, attend=attend, check=check)
