"""Draws the tokens of a step from its logits, with their log-probabilities.

It owns in which order step features and ``sample`` come, and that rows which are not in use are skipped where that
saves time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jserve.model.draws import draws_of, per_draw
from jserve.model.feature import StepFeature
from jserve.model.feature_logits import changed, changes, own_tokens
from jserve.model.live_rows import over_live
from jserve.model.sample import Chosen, logprobs, processed, sample
from jserve.model.slots import SlotState
from jserve.model.view import StepView
from jserve.model.vocab_part import VocabPart

# Jitted only so that buckets with as many draws trace them once; XLA inlines the calls.
_SAMPLE = jax.jit(sample, static_argnames="part")
_LOGPROBS = jax.jit(logprobs, static_argnames="part")
_PROCESSED = jax.jit(processed, static_argnames="part")


def drawn(
    view: StepView,
    features: tuple[StepFeature, ...],
    slots: SlotState,
    raw_EV: jax.Array,
    part: VocabPart,
    *,
    processes: bool,
    skips: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None, Chosen]:
    """int32[E] tokens, bool[E] that is True where they are sound, int32[E] codes of faults of features (None: no
    feature changes what is drawn), and log-probabilities; meaningless for rows that are not in use.

    Args:
        raw_EV: float32, the model's logits, of the columns of ``part``.
        processes: log-probabilities are of what is drawn from, not of ``raw_EV``.
        skips: rows that are not in use are passed over (``over_live``), unless features change logits.
    """
    draws, flags = draws_of(view), view.flags
    picks_EK = None if slots.pick_CK is None else slots.pick_CK[draws.slot_E]

    def shown(raw_EV, given_EV, draws, token_E, picks_EK):
        if processes:
            raw_EV = _PROCESSED(given_EV, draws, slots, flags, part=part)
        return _LOGPROBS(raw_EV, token_E, flags, picks_EK, part=part)

    def plain(rows: Any) -> Any:
        raw_EV, draws, picks_EK = rows
        token_E, ok_E = _SAMPLE(raw_EV, draws, slots, flags, part=part)
        return token_E, ok_E, shown(raw_EV, raw_EV, draws, token_E, picks_EK)

    if not changes(features):
        rows = (raw_EV, draws, picks_EK)
        live_E = per_draw(view, view.count_R > 0)
        token_E, ok_E, chosen = over_live(plain, live_E, rows) if skips else plain(rows)
        return token_E, ok_E, None, chosen
    given = changed(features, view, raw_EV, part)
    own = own_tokens(features, view, part)
    token_E, ok_E = sample(raw_EV, draws, slots, flags, part, given_EV=given.logits_EV, own=own)
    fault_E = given.faults(token_E)
    token_E, ok_E = jnp.maximum(token_E, 0), ok_E & (given.fault_E > 0)
    return token_E, ok_E, fault_E, shown(raw_EV, given.logits_EV, draws, token_E, picks_EK)
