"""Logits processors and samplers: step features that give the rows that ask other logits, or draw their tokens, by a
function of one row.

A processor sees the model's logits, before biases, penalties, masks and truncation; log-probabilities stay those of
the model unless option ``logprobs_mode`` says otherwise. A sampler sees what these leave, before temperature and
truncation, and a key of the place. Both are mapped over the places where tokens are drawn, so that a row's token never
depends on who else is in the step::

    logits [E, V] --processor(logits_V, row)--> biases, penalties, masks --sampler(logits_V, key, row)--> token [E]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.feature import SlotArray, StepFeature
from jserve.model.features.row import RowNumbers, RowView
from jserve.model.view import StepView

Processor = Callable[[jax.Array, RowView], jax.Array]
"""(float32[V], the place) -> float32[V]; -inf for a token that is not to be drawn."""
Sampler = Callable[[jax.Array, jax.Array, RowView], jax.Array]
"""(float32[V], a key of ``jax.random``, the place) -> int32: a token whose logit is not -inf."""


def logits_processor(
    name: str, process: Processor, *, state: SlotArray | None = None, **numbers: float
) -> StepFeature:
    """A feature for ``register_feature``: requests ask for it by ``extra_args={name: {number: value}}``, by the value
    alone where there is one number, or by true. A request from whose logits nothing can be drawn (all are -inf, or one
    is NaN or infinite) ends with an error that names the processor.

    Args:
        process: a pure function of one row, of jax operations.
        state: what ``row_state`` gives, for ``RowView.state``; every slot of an engine holds it.
        numbers: its numbers, with the values of requests that do not say them; at most ``MOST_NUMBERS``.

    Raises:
        ConfigError: more numbers, or one that is not finite.
    """
    asked = RowNumbers(name, {key: float(value) for key, value in numbers.items()}, state)
    return _feature(asked, logits=_Processing(asked, process).logits)


def sampler(
    name: str, draw: Sampler, *, state: SlotArray | None = None, **numbers: float
) -> StepFeature:
    """A feature for ``register_feature``, asked for as a ``logits_processor`` is: draws the tokens of the requests that
    ask. A request for which it draws a token that there is not, or whose logit is -inf, ends with an error that names
    it. Of several that a request asks for, the last by name draws.

    Args:
        draw: a pure function of one row, of jax operations. Its key is a function of the request's seed and the
            position, and of nothing else.
        state, numbers: as of ``logits_processor``.

    Raises:
        ConfigError: as ``logits_processor``.
    """
    asked = RowNumbers(name, {key: float(value) for key, value in numbers.items()}, state)
    return _feature(asked, token=_Sampling(asked, draw).token)


def _feature(asked: RowNumbers, **hooks: Any) -> StepFeature:
    return StepFeature(
        name=asked.name,
        fields=asked.fields,
        check=asked.check,
        pack=asked.pack,
        state=asked.state,
        **hooks,
    )


@dataclass(frozen=True, slots=True)
class _Processing:
    asked: RowNumbers
    process: Processor

    def logits(self, view: StepView, x_EV: jax.Array) -> jax.Array:
        """Those of rows that ask processed, all others as they are."""
        given_EV = jax.vmap(self.process)(x_EV, self.asked.rows(view))
        if given_EV.shape != x_EV.shape:
            name = self.asked.name
            why = f"{name} gives {given_EV.shape[1:]} logits a row, not {x_EV.shape[1:]}"
            raise ConfigError(why, field=name)
        return jnp.where(self.asked.asks(view)[:, None], given_EV.astype(jnp.float32), x_EV)


@dataclass(frozen=True, slots=True)
class _Sampling:
    asked: RowNumbers
    draw: Sampler

    def token(
        self, view: StepView, x_EV: jax.Array, key_E: jax.Array, token_E: jax.Array
    ) -> jax.Array:
        """Those of rows that ask drawn, all others as they are."""
        own_E = jax.vmap(self.draw)(x_EV, key_E, self.asked.rows(view))
        if own_E.shape != token_E.shape or not jnp.issubdtype(own_E.dtype, jnp.integer):
            name, found = self.asked.name, f"{own_E.dtype}{list(own_E.shape[1:])}"
            raise ConfigError(f"{name} draws {found} a row, not one integer", field=name)
        return jnp.where(self.asked.asks(view), own_E.astype(jnp.int32), token_E)
