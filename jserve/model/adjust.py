"""Changes logits before a draw: whatever can change which token is the likeliest.

The order is vLLM's: grammar mask, bias (logit_bias, allowed and bad ids), bad words, min_tokens, penalties. ``flags``
says what any row of the step needs; the rest is skipped by ``lax.cond``. E counts draws, as in ``sample``; V is the
number of columns of a device's ``VocabPart``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jserve.model.draws import Draws
from jserve.model.slots import NONE, SlotState
from jserve.model.view import BAD_WORDS, BIAS, MIN_TOKENS, PENALTY
from jserve.model.vocab_part import WHOLE, VocabPart
from jserve.model.vocab_rows import IN_PROMPT, VocabState

CHANGES = BIAS | BAD_WORDS | MIN_TOKENS | PENALTY
"""The flags that make ``adjust`` give other logits than it gets, masks apart."""
_NEG = -jnp.inf


def adjust(
    raw_EV: jax.Array,
    draws: Draws,
    slots: SlotState,
    flags: jax.Array,
    part: VocabPart = WHOLE,
) -> jax.Array:
    """The logits after everything that can change which token is the most likely."""
    x_EV = raw_EV if draws.mask_EW is None else masked(raw_EV, draws.mask_EW, part)
    vocab = slots.vocab

    def where(bit: int, change: Callable[[jax.Array], jax.Array], x_EV: jax.Array) -> jax.Array:
        return jax.lax.cond(flags & bit, change, lambda x: x, x_EV)

    if vocab is not None:
        x_EV = where(BIAS, lambda x: _biased(x, draws, vocab, part), x_EV)
    x_EV = where(BAD_WORDS, lambda x: _without(x, _bad_ids(draws, slots), part), x_EV)
    x_EV = where(MIN_TOKENS, lambda x: _without(x, _early_stops(draws), part), x_EV)
    if vocab is not None:
        x_EV = where(PENALTY, lambda x: _penalised(x, draws, vocab, part), x_EV)
    return x_EV


def masked(x_EV: jax.Array, mask_EW: jax.Array, part: VocabPart) -> jax.Array:
    bits_EWb = (mask_EW[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    bits_EV = bits_EWb.reshape(x_EV.shape[0], -1)[:, : part.n_ids(x_EV)]
    return jnp.where(part.columns(bits_EV, x_EV.shape[1]) > 0, x_EV, _NEG)


def in_mask(mask_EW: jax.Array, token_E: jax.Array) -> jax.Array:
    """bool[E]: whether each row's mask allows its token."""
    word_E = jnp.take_along_axis(mask_EW, (token_E >> 5)[:, None], axis=1)[:, 0]
    return (word_E >> (token_E & 31)) & 1 > 0


def without_token(mask_EW: jax.Array, token_E: jax.Array) -> jax.Array:
    """The masks without one token of each row; NONE takes nothing away."""
    bit_E = jnp.where(token_E == NONE, 0, jnp.int32(1) << (token_E & 31))
    here_EW = jnp.arange(mask_EW.shape[1]) == (token_E >> 5)[:, None]
    return jnp.where(here_EW, mask_EW & ~bit_E[:, None], mask_EW)


def _biased(x_EV: jax.Array, draws: Draws, vocab: VocabState, part: VocabPart) -> jax.Array:
    uses_E1 = (draws.uses_E & BIAS)[:, None] > 0
    return jnp.where(uses_E1, x_EV + part.columns(vocab.biases(draws.slot_E), x_EV.shape[1]), x_EV)


def _without(x_EV: jax.Array, id_EX: jax.Array, part: VocabPart) -> jax.Array:
    """``x_EV`` with -inf at each row's ids; NONE is no id."""
    row_E1 = jnp.arange(x_EV.shape[0])[:, None]
    return x_EV.at[row_E1, part.places(id_EX, x_EV.shape[1])].set(_NEG, mode="drop")


def _early_stops(draws: Draws) -> jax.Array:
    return jnp.where((draws.pos_E < draws.min_pos_E)[:, None], draws.stop_ES, NONE)


def _bad_ids(draws: Draws, slots: SlotState) -> jax.Array:
    """int32[E, W]: ids that would complete a bad word now."""
    recent_EB = slots.recent_CB[draws.slot_E]
    tail = recent_EB.shape[1]
    output_EX = jnp.concatenate([recent_EB, draws.prefix_EJ], axis=1)
    at_EB = draws.n_prefix_E[:, None] + jnp.arange(tail, dtype=jnp.int32)
    recent_EB = jnp.take_along_axis(output_EX, at_EB, axis=1)
    bad_EWK = slots.bad_CWK[draws.slot_E]
    before_EWB = bad_EWK[:, :, :-1]
    fits_EW = jnp.all((before_EWB == NONE) | (before_EWB == recent_EB[:, None, :]), axis=2)
    uses_E1 = (draws.uses_E & BAD_WORDS)[:, None] > 0
    return jnp.where(fits_EW & uses_E1, bad_EWK[:, :, -1], NONE)


def _penalised(x_EV: jax.Array, draws: Draws, vocab: VocabState, part: VocabPart) -> jax.Array:
    E, V = x_EV.shape
    counts_EV = part.columns(vocab.counts(draws.slot_E), V)
    if draws.prefix_EJ.shape[1]:
        counts_EV = counts_EV.at[jnp.arange(E)[:, None], part.places(draws.prefix_EJ, V)].add(
            1, mode="drop"
        )
    repetition_E1 = draws.repetition_E[:, None]
    repeated_EV = jnp.where(x_EV > 0, x_EV / repetition_E1, x_EV * repetition_E1)
    output_EV = counts_EV & (IN_PROMPT - 1)
    # Selected, not multiplied: a row without penalties has meaningless counts.
    x_EV = jnp.where((counts_EV > 0) & (repetition_E1 != 1.0), repeated_EV, x_EV)
    x_EV = x_EV - draws.frequency_E[:, None] * output_EV.astype(jnp.float32)
    return x_EV - draws.presence_E[:, None] * (output_EV > 0).astype(jnp.float32)
