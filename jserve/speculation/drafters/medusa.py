"""Medusa heads: each head predicts one token further ahead from the same hidden state.

No KV: the heads read the target's hidden state after its final norm at the last token p, and head d drafts token p
+ 2 + d (the target itself draws p + 1)::

    x = hidden state at p;  x = x + silu(linear(x)) for each block;  draft p + 2 + d ~ unembed(x)

Source: Medusa (arXiv 2401.10774).
"""

from __future__ import annotations

from typing import Any

import jax

from jserve.model import decoder
from jserve.model.arch import Arch
from jserve.model.attention import LayerKV
from jserve.model.dot import dot
from jserve.model.layers import unembed
from jserve.model.shard import Axes
from jserve.speculation.drafters.drafter import Drafter, Seen, Target


def medusa(
    target: Arch,
    *,
    n_heads: int,
    n_blocks: int = 1,
    own_unembed: bool = True,
    bias: bool = True,
    prefix: str = "",
) -> Drafter:
    """``n_heads`` heads of ``n_blocks`` residual blocks as the drafter of ``target``.

    Args:
        own_unembed: each head has an lm_head; else the target's is used.
        bias: each block has one.
        prefix: before the names of the tensors.
    """

    def specs(tp: int) -> dict[str, Any]:
        return {
            "heads": [
                _head(f"{prefix}{i}", target, n_blocks, own_unembed, bias) for i in range(n_heads)
            ]
        }

    def logits(of: Target, params: Any, x_ED: jax.Array, depth: int, axes: Axes) -> jax.Array:
        head = params["heads"][depth]
        for block in head["blocks"]:
            y_ED = dot(x_ED, block["linear"])
            x_ED = x_ED + jax.nn.silu(y_ED + block["bias"] if bias else y_ED)
        return unembed(head["unembed"], x_ED, axes, target.V) if own_unembed else of.logits(x_ED)

    return Drafter(
        name="medusa",
        arch=target,
        n_max=n_heads,
        reads_next=True,
        specs=specs,
        observe=_observe,
        advance=None,
        logits=logits,
    )


def _observe(
    of: Target, params: Any, seen: Seen, kv: list[LayerKV], axes: Axes
) -> tuple[jax.Array, list[LayerKV]]:
    return seen.x_TD[seen.last_R], kv


def _head(name: str, target: Arch, n_blocks: int, own_unembed: bool, bias: bool) -> dict[str, Any]:
    D, V = target.D, target.V
    head: dict[str, Any] = {"blocks": [_block(f"{name}.{b}", D, bias) for b in range(n_blocks)]}
    if own_unembed:
        head["unembed"] = decoder.matrix(f"{name}.{n_blocks}", (V, D), ("vocab", "embed"))
    return head


def _block(name: str, D: int, bias: bool) -> dict[str, Any]:
    block = {"linear": decoder.matrix(f"{name}.linear", (D, D), (None, None))}
    if bias:
        block["bias"] = decoder.bias(f"{name}.linear", D)
    return block
