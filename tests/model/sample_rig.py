"""Builds the device-side inputs of sampling from ``SamplingParams`` and token histories."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import sample as sampling, slots as slot_rows
from jserve.model.draws import Draws
from jserve.model.view import N_STOP_IDS
from jserve.runner.batch import uses
from jserve.sampling import SamplingParams
from jserve.types import SlotLoad
from tests.model.sample_reference import Context

C = 150
"""Slots in all tests, so that little is compiled."""
_LOAD = jax.jit(slot_rows.load)


def slots_of(rows: Seq[tuple[SamplingParams, Context]], V: int) -> Any:
    """Slots as they are after the loads of these rows (row i in slot i); unneeded ones hold
    rubbish."""
    rng = np.random.default_rng(5)
    slots = jax.tree.map(
        lambda a: jnp.asarray(rng.integers(0, 5, a.shape).astype(a.dtype)),
        slot_rows.empty(C, V, n_vocab_rows=C),
    )
    for i, (params, context) in enumerate(rows):
        if params.needs_vocab_row or params.bans_words:
            tokens = [*context.prompt, *context.output]
            n_prompt, row = len(context.prompt), C - 1 - i
            item = SlotLoad(slot=i, tokens=tokens, n_prompt=n_prompt, params=params, vocab_row=row)
            for buf in slot_rows.load_buffers(item, V):
                slots = _LOAD(slots, buf)
    return slots


def draws_of(
    rows: Seq[tuple[SamplingParams, Context]], seeds: Seq[int] | None = None, J: int = 1
) -> tuple[Draws, int]:
    """The draws of these rows with no drafts, and the step's flags."""
    E = len(rows)
    seeds = list(range(E)) if seeds is None else seeds
    stop_ES = np.full((E, N_STOP_IDS), -1, np.int32)
    mask_EW = None
    for i, (params, context) in enumerate(rows):
        stops = [*context.eos_ids, *params.stop_token_ids]
        stop_ES[i, : len(stops)] = stops
    if any(c.mask is not None for _, c in rows):
        V = max(len(c.mask) for _, c in rows if c.mask is not None)
        mask_EW = jnp.asarray(np.stack([mask_words(c.mask, V) for _, c in rows]))

    def f(name: str) -> jax.Array:
        return jnp.asarray([getattr(p, name) for p, _ in rows], jnp.float32)

    draws = Draws(
        slot_E=jnp.arange(E, dtype=jnp.int32),
        uses_E=jnp.asarray([uses(p) for p, _ in rows], jnp.int32),
        pos_E=jnp.asarray([len(c.prompt) + len(c.output) for _, c in rows], jnp.int32),
        prefix_EJ=jnp.full((E, J - 1), -1, jnp.int32),
        n_prefix_E=jnp.zeros(E, jnp.int32),
        temperature_E=f("temperature"),
        top_p_E=f("top_p"),
        min_p_E=f("min_p"),
        repetition_E=f("repetition_penalty"),
        presence_E=f("presence_penalty"),
        frequency_E=f("frequency_penalty"),
        top_k_E=jnp.asarray([max(p.top_k, 0) for p, _ in rows], jnp.int32),
        seed_E2=jnp.asarray(np.array(seeds, np.int64).view(np.uint32).reshape(E, 2)),
        min_pos_E=jnp.asarray([len(c.prompt) + p.min_tokens for p, c in rows], jnp.int32),
        stop_ES=jnp.asarray(stop_ES),
        mask_EW=mask_EW,
    )
    return draws, int(np.bitwise_or.reduce([uses(p) for p, _ in rows]))


def mask_words(mask_V: np.ndarray | None, V: int) -> np.ndarray:
    """int32[ceil(V / 32)]: the bits of a grammar mask; all ones for None."""
    bits = np.ones(-(-V // 32) * 32, np.uint8)
    if mask_V is not None:
        bits[:V] = mask_V
    return np.packbits(bits, bitorder="little").view(np.int32)


@lru_cache(maxsize=1)
def jitted() -> dict[str, Any]:
    """The sampling functions under jit, compiled once per shape for all tests.

    New function objects each time: after ``cache_clear`` they trace anew, patched parts included.
    """

    def fresh(name: str) -> Any:
        return jax.jit(lambda *args: getattr(sampling, name)(*args))

    return {n: fresh(n) for n in ("sample", "adjust", "scaled", "truncated", "logprobs", "argmax")}
