"""Attention sinks (StreamingLLM): supported models and the queries that attend to them.

A token that looks back at a sink does so as if the cache held the sinks and the window alone, so no distance
exceeds what a model whose layers all have windows was trained on. Keys are stored turned to their true positions;
only the query is turned once more::

    position   0 1 2 ...                       n-W+1 ... n
    cache      sinks |          nothing        | window   |
    distance   n -> window: true     n -> sink: as from place sinks + W - 1

Idea: Xiao and others, arXiv 2309.17453.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.attention import AttentionBackend, Sinks
from jserve.model.ctx import Ctx
from jserve.model.rope import rotate


def with_sinks(arch: Arch, attention: AttentionBackend, n: int) -> Arch:
    """``arch`` with ``n`` attention sinks.

    Raises:
        ConfigError: they cannot hold for this model or backend; ``field`` is the option.
    """
    fault = ""
    if n and not all(layer.attn.window for layer in arch.layers):
        fault = "needs a model in which every layer has a sliding window"
    elif n and not attention.has_sinks:
        fault = f"is not served by attention_backend {attention.name!r}"
    elif n and any(rope.scaling and rope.scaling.kind == "dynamic" for rope in arch.ropes):
        fault = "does not go with dynamic rope scaling, whose angles depend on the true position"
    if fault:
        raise ConfigError(f"attention_sinks {fault}", field="attention_sinks")
    return dataclasses.replace(arch, sinks=n)


def sinks_of(ctx: Ctx, q_TNH: jax.Array) -> Sinks | None:
    """The sinks of the layer, with queries ``q_TNH`` that are not yet turned."""
    arch, rope = ctx.arch, ctx.spec.attn.rope
    if not arch.sinks or not ctx.window:
        return None
    if rope is None:
        return Sinks(n=arch.sinks, q_TNH=q_TNH)
    place_T = jnp.minimum(ctx.view.pos_T, arch.sinks + ctx.window - 1)
    tables = ctx.tables_at(rope, place_T)
    return Sinks(n=arch.sinks, q_TNH=rotate(q_TNH, *tables, pairs=rope.pairs))
