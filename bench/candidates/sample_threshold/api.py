"""``sample_threshold``: what it takes, what it refuses, and the padding around the Hopper kernel.

It owns shapes and tuning.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bench.candidates.sample_threshold import hopper
from bench.candidates.sample_threshold.hopper import LINE, Tile
from pallas_kernels.served import tuning

Array = jax.Array


def sample_threshold(
    logits_RV: Array,
    temperature_R: Array,
    top_k_R: Array,
    top_p_R: Array,
    min_p_R: Array,
    *,
    tune: dict[str, Any] | None = None,
    interpret: Any = None,
) -> Array:
    """Of each row the number t so that ``logits >= t`` are the tokens that a draw may give.

    min_p acts first, then top_k on what is left, then top_p on what that leaves. Equal logits at
    the bound stay together. The set is exact for min_p and top_k; masses for top_p are float32
    sums, so that a token whose cumulative mass is within some 1e-6 of top_p may fall either way.

    Args:
        logits_RV: float32, -inf for a token that is forbidden; each row has a finite maximum.
        temperature_R: float32, above zero; acts on min_p and top_p.
        top_k_R: int32; 0, less, or V and above: no limit.
        top_p_R: float32 in (0, 1]; 1: no limit.
        min_p_R: float32 in [0, 1); 0: no limit.
        tune: ``lines``, ``stages`` instead of those of tune.json.
        interpret: ``plgpu.InterpretGPUParams()`` runs on a CPU.

    Returns:
        float32[R], finite: rows without any limit get at most their least finite logit. Rows with
        NaN or without a finite maximum get any number.

    Raises:
        ValueError: logits are not float32 [R, V], or a limit is not of shape [R].
    """
    limits = (temperature_R, top_k_R, top_p_R, min_p_R)
    _check(logits_RV, limits)
    chosen = {**tuning("bench.candidates.sample_threshold"), **(tune or {})}
    R, V = logits_RV.shape
    lines = max(-(-V // LINE), chosen["lines"])
    top_R = logits_RV.max(1)
    padded_RV = jnp.pad(logits_RV, ((0, 0), (0, lines * LINE - V)), constant_values=-jnp.inf)
    no_limit = (top_k_R <= 0) | (top_k_R >= V)
    tile = Tile(lines=lines, size=chosen["lines"], stages=chosen["stages"])
    return hopper.search(
        padded_RV.reshape(R, lines, LINE),
        top_R,
        temperature_R.astype(jnp.float32),
        jnp.where(min_p_R > 0, top_R + temperature_R * jnp.log(min_p_R), hopper.LOWEST),
        jnp.where(no_limit, jnp.inf, top_k_R.astype(jnp.float32)),
        top_p_R.astype(jnp.float32),
        tile,
        interpret,
    )


def _check(logits_RV: Any, limits: tuple[Any, ...]) -> None:
    if logits_RV.ndim != 2 or logits_RV.dtype != jnp.float32:
        raise ValueError(f"logits are {logits_RV.dtype}{logits_RV.shape}, not float32[R, V]")
    R = logits_RV.shape[0]
    if any(x.shape != (R,) for x in limits):
        raise ValueError(f"limits of {R} rows have shapes {[x.shape for x in limits]}")
