"""Attention kernels in a step that XLA's partitioner cuts (``sharding.mode: auto``).

It owns the ``shard_map`` around writes and reads of KV: a kernel is opaque to the partitioner, which would gather its
operands. Each device runs it on its own heads; all between the kernels stays the partitioner's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jserve.model.attention import OVER_HEADS, AttendArgs, AttentionBackend, LatentArgs, LayerKV
from jserve.model.mesh import MeshAxis
from jserve.model.view import StepView

WHOLE = PartitionSpec()


def over_heads(backend: AttentionBackend, mesh: Mesh, axis: MeshAxis) -> AttentionBackend:
    """``backend`` for whole arrays of KV that lie over ``axis`` of ``mesh`` by kv heads, and queries of all heads.

    Attention without kernels stays the partitioner's. Mixtures of experts, and what lies between the products of a
    decode layer, have no kernels then.
    """
    backend = replace(backend, decode=None, experts=None)
    if backend.name not in OVER_HEADS:
        return backend
    heads, pool = PartitionSpec(None, axis), PartitionSpec(*(None,) * backend.kv_axis, axis)

    def run(each: Callable[..., Any], specs: tuple[Any, ...], out: Any, *given: Any) -> Any:
        cut = jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return cut(*given)

    def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
        specs = (pool, heads, heads, WHOLE)
        return run(backend.write_kv, specs, pool, kv, k_TKH, v_TKH, view)

    def attend(args: AttendArgs, kv: LayerKV, view: StepView) -> jax.Array:
        far_TNH = None if args.sinks is None else args.sinks.q_TNH
        each = partial(_attend, backend, args)
        specs = (heads, heads, PartitionSpec(axis), pool, WHOLE)
        return run(each, specs, heads, args.q_TNH, far_TNH, args.sink_logits_N, kv, view)

    def attend_latent(args: LatentArgs, pool_PZC: jax.Array, view: StepView) -> jax.Array:
        each = partial(_attend_latent, backend, args.scale)
        by_head = PartitionSpec(axis)
        specs = (heads, heads, by_head, by_head, WHOLE, WHOLE)
        queries, matrices = (args.q_TNH, args.q_TNY), (args.k_up_NHA, args.v_up_NVA)
        return run(each, specs, heads, *queries, *matrices, pool_PZC, view)

    return replace(backend, write_kv=write_kv, attend=attend, attend_latent=attend_latent)


def _attend(
    backend: AttentionBackend,
    args: AttendArgs,
    q_TNH: jax.Array,
    far_TNH: jax.Array | None,
    sink_logits_N: jax.Array | None,
    kv: LayerKV,
    view: StepView,
) -> jax.Array:
    """Of the heads of one device."""
    sinks = args.sinks and replace(args.sinks, q_TNH=far_TNH)
    own = replace(args, q_TNH=q_TNH, sinks=sinks, sink_logits_N=sink_logits_N)
    return backend.attend(own, kv, view)


def _attend_latent(
    backend: AttentionBackend,
    scale: float,
    q_TNH: jax.Array,
    q_TNY: jax.Array,
    k_up_NHA: jax.Array,
    v_up_NVA: jax.Array,
    pool_PZC: jax.Array,
    view: StepView,
) -> jax.Array:
    """Of the heads of one device, over latents that each device holds."""
    assert backend.attend_latent is not None, "checked at start"
    own = LatentArgs(q_TNH=q_TNH, q_TNY=q_TNY, k_up_NHA=k_up_NHA, v_up_NVA=v_up_NVA, scale=scale)
    return backend.attend_latent(own, pool_PZC, view)
