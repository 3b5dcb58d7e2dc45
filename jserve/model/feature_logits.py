"""Gives the changes that step features make to logits and to the tokens drawn from them, and the feature to blame where
nothing can be drawn.

A place that is not sound has a code, which the host reads as the name of a feature and what it did. Places where no
token is drawn (the end of a chunk in mid-prompt) keep the model's logits, so that no feature can end a request there::

    logits of the model -> feature 0 -> feature 1 -> biases, masks ... -> draw -> tokens of the features that draw
    0: not finite         -1: nan       -4: nan      of forbidding ones: -2, -5       -3, -6: a token that may not be
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jserve.model.draws import Draws, per_draw
from jserve.model.feature import StepFeature
from jserve.model.noise import keys
from jserve.model.sample import Own
from jserve.model.view import StepView
from jserve.model.vocab_part import VocabPart
from jserve.types import NOTHING_LEFT

SAID = (
    "gives logits that are NaN or infinite",
    NOTHING_LEFT,
    "draws a token that may not be drawn",
)
"""The faults of a feature, in the order of their codes."""
_NAN, _NOTHING, _TOKEN = range(len(SAID))


def code(i: int, fault: int) -> int:
    """Below 0: that of a fault of feature ``i`` of a bucket."""
    return -(1 + len(SAID) * i + fault)


def fault_of(features: Sequence[StepFeature], found: int) -> tuple[str, str]:
    """The name of the feature of a code below 0, and what it did."""
    i, fault = divmod(-found - 1, len(SAID))
    return features[i].name, SAID[fault]


@dataclass(frozen=True, slots=True)
class Changed:
    """The logits to draw from, as features leave them."""

    logits_EV: jax.Array
    """Columns of a ``VocabPart``; -inf: not to be drawn."""
    fault_E: jax.Array
    """int32: the code of the first feature that left nothing sound; 0: the model gave nothing sound; 1: all is."""
    forbids_E: jax.Array
    """int32: the code of the first feature that forbids a token; 0: none does."""

    def faults(self, token_E: jax.Array) -> jax.Array:
        """int32[E]: the code of each place that is not sound, 0 where that is no feature's fault.

        Args:
            token_E: int32, as ``sample`` gives them: below 0 the code of a feature.
        """
        drawn_E = jnp.where(token_E < 0, token_E, self.forbids_E)
        return jnp.where(self.fault_E > 0, drawn_E, self.fault_E)


def changes(features: Sequence[StepFeature]) -> bool:
    """True if some feature changes logits or tokens."""
    return any(feature.logits is not None or feature.token is not None for feature in features)


def changed(
    features: Sequence[StepFeature], view: StepView, raw_EV: jax.Array, part: VocabPart
) -> Changed:
    """``raw_EV`` after the features that change logits, in their order. Split rows are gathered, where any does."""
    fault_E = part.all_finite(raw_EV).astype(jnp.int32)
    forbids_E = jnp.zeros_like(fault_E)
    if not any(feature.logits is not None for feature in features):
        return Changed(raw_EV, fault_E, forbids_E)
    drawn_E1 = per_draw(view, view.emit_R)[:, None]
    x_EV = part.whole(raw_EV)
    for i, feature in enumerate(features):
        if feature.logits is None:
            continue
        x_EV = jnp.where(drawn_E1, feature.logits(view, x_EV), x_EV)
        # Of a NaN neither is true.
        broken_E = ~jnp.all(x_EV < jnp.inf, axis=1)
        nothing_E = ~jnp.any(x_EV > -jnp.inf, axis=1)
        own_E = jnp.where(broken_E, code(i, _NAN), code(i, _NOTHING))
        fault_E = jnp.where((fault_E > 0) & (broken_E | nothing_E), own_E, fault_E)
        some_E = jnp.any(x_EV == -jnp.inf, axis=1)
        forbids_E = jnp.where((forbids_E == 0) & some_E, code(i, _NOTHING), forbids_E)
    return Changed(part.columns(x_EV, raw_EV.shape[1]), fault_E, forbids_E)


def own_tokens(features: Sequence[StepFeature], view: StepView, part: VocabPart) -> Own | None:
    """The draws of features that draw, for ``sample``; None: none does."""
    drawing = [(i, feature) for i, feature in enumerate(features) if feature.token is not None]
    return partial(_own_tokens, drawing, view, part) if drawing else None


def _own_tokens(
    drawing: Sequence[tuple[int, StepFeature]],
    view: StepView,
    part: VocabPart,
    logits_EV: jax.Array,
    draws: Draws,
    purpose_E: jax.Array,
    token_E: jax.Array,
) -> jax.Array:
    logits_EV, V = part.whole(logits_EV), part.n_ids(logits_EV)
    # Where nothing is left no sampler is to blame.
    drawn_E = per_draw(view, view.emit_R) & jnp.any(logits_EV > -jnp.inf, axis=1)
    key_E = keys(draws.seed_E2, draws.pos_E, purpose_E)
    for i, feature in drawing:
        assert feature.token is not None
        own_E = feature.token(view, logits_EV, key_E, jnp.maximum(token_E, 0))
        known_E = jnp.clip(own_E, 0, V - 1)
        logit_E = jnp.take_along_axis(logits_EV, known_E[:, None], axis=1)[:, 0]
        right_E = (known_E == own_E) & (logit_E > -jnp.inf)
        own_E = jnp.where(right_E, own_E, code(i, _TOKEN))
        token_E = jnp.where(drawn_E & (token_E >= 0), own_E, token_E)
    return token_E
