"""Wraps a small model with the target's vocabulary as a drafter.

Entry p of its KV is that of token p, and a pass over the newest token comes before the first draft.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.attention import LayerKV
from jserve.model.ctx import Ctx
from jserve.model.family import Family
from jserve.model.shard import Axes
from jserve.model.view import StepView
from jserve.speculation.drafters.drafter import Drafter, Seen, Target


def draft_model(family: Family, arch: Arch, target: Arch) -> Drafter:
    """``family`` of ``arch`` as the drafter of ``target``.

    Raises:
        ConfigError: it has another vocabulary than the target.
    """
    if arch.V != target.V:
        raise ConfigError(
            f"speculative.model: vocab_size is {arch.V}, the target's is {target.V}",
            field="speculative.model",
        )

    def observe(
        of: Target, params: Any, seen: Seen, kv: list[LayerKV], axes: Axes
    ) -> tuple[jax.Array, list[LayerKV]]:
        _, kv = family.forward(Ctx.of(arch, seen.view, of.attn, axes), params, kv)
        # Nothing is carried: the next pass reads all it needs from the KV.
        return jnp.zeros((seen.last_R.shape[0], arch.D)), kv

    def advance(
        of: Target,
        params: Any,
        carry_EX: jax.Array,
        view: StepView,
        kv: list[LayerKV],
        axes: Axes,
    ) -> tuple[jax.Array, list[LayerKV]]:
        return family.forward(Ctx.of(arch, view, of.attn, axes), params, kv)

    def logits(of: Target, params: Any, x_ED: jax.Array, depth: int, axes: Axes) -> jax.Array:
        return family.logits(arch, params, x_ED, axes)

    return Drafter(
        name="draft",
        arch=arch,
        n_max=15,
        reads_next=False,
        specs=lambda tp: family.specs(arch, tp),
        observe=observe,
        advance=advance,
        logits=logits,
    )
