"""Logits processors: a step feature that gives the rows that ask other logits, by a function of one row.

The function sees the model's logits, before biases, penalties, masks and truncation; log-probabilities stay those of
the model unless option ``logprobs_mode`` says otherwise. It is mapped over the places where tokens are drawn, so that a
row's logits never depend on who else is in the step::

    extra_args={"sharpen": 0.3}  --pack-->  numbers_RN  --per draw, vmap-->  f(logits_V, row) -> logits_V
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jserve.errors import ConfigError
from jserve.model.draws import drawn_places, per_draw
from jserve.model.feature import StepFeature
from jserve.model.view import Bucket, Field, StepDims, StepView
from jserve.types import RowPlan

MOST_NUMBERS = 8
MOST = float(np.finfo(np.float32).max)


@register_dataclass
@dataclass(frozen=True)
class RowView:
    """The place of a draw, as far as a processor may know it."""

    position: jax.Array
    """int32: of the token to be drawn; 0 is the first of the prompt."""
    token: jax.Array
    """int32: the one before it."""
    numbers: dict[str, jax.Array]
    """float32 each: what the request asks, by name."""


Processor = Callable[[jax.Array, RowView], jax.Array]
"""(float32[V], the place) -> float32[V]; -inf for a token that is not to be drawn."""


def logits_processor(name: str, process: Processor, **numbers: float) -> StepFeature:
    """A feature for ``register_feature``: requests ask for it by ``extra_args={name: {number: value}}``, by the value
    alone where there is one number, or by true.

    A sampler of one's own is a processor too: it gives the log-probabilities to draw from, at temperature 1.

    Args:
        process: a pure function of one row, of jax operations.
        numbers: its numbers, with the values of requests that do not say them; at most ``MOST_NUMBERS``.

    Raises:
        ConfigError: more numbers, or one that is not finite.
    """
    if len(numbers) > MOST_NUMBERS or not all(map(math.isfinite, numbers.values())):
        why = f"{name}: numbers must be at most {MOST_NUMBERS}, and finite"
        raise ConfigError(why, field=name)
    of = _Processing(name, process, {key: float(value) for key, value in numbers.items()})
    return StepFeature(name=name, fields=of.fields, check=of.check, pack=of.pack, logits=of.logits)


@dataclass(frozen=True, slots=True)
class _Processing:
    """The arguments of ``logits_processor``, and the functions of its feature."""

    name: str
    process: Processor
    numbers: Mapping[str, float]

    def fields(self, bucket: Bucket, dims: StepDims) -> tuple[Field, ...]:
        """``asks_R`` is 1 for rows that ask."""
        (asks, numbers), n = self._names, max(1, len(self.numbers))
        return Field(asks, (bucket.R,)), Field(numbers, (bucket.R, n), is_float=True)

    def check(self, asked: Any) -> None:
        self._values(asked)

    def pack(
        self,
        views: Mapping[str, np.ndarray],
        rows: Sequence[RowPlan],
        at: Sequence[int],
        dims: StepDims,
    ) -> None:
        asks_R, numbers_RN = (views[name] for name in self._names)
        asks_R[...] = 0
        numbers_RN[...] = 0.0
        for r, row in zip(at, rows, strict=True):
            extra = row.choice.request.params.extra_args
            if self.name in extra:
                values = self._values(extra[self.name])
                asks_R[r], numbers_RN[r, : len(values)] = 1, values

    def logits(self, view: StepView, raw_EV: jax.Array) -> jax.Array:
        """Those of rows that ask processed, all others as they are."""
        asks_R, numbers_RN = (view.extra[name] for name in self._names)
        numbers_EN = per_draw(view, numbers_RN)
        at_E = drawn_places(view)
        places = RowView(
            position=view.pos_T[at_E] + 1,
            token=view.tok_T[at_E],
            numbers={key: numbers_EN[:, i] for i, key in enumerate(self.numbers)},
        )
        given_EV = jax.vmap(self.process)(raw_EV, places)
        if given_EV.shape != raw_EV.shape:
            why = f"{self.name} gives {given_EV.shape[1:]} logits a row, not {raw_EV.shape[1:]}"
            raise ConfigError(why, field=self.name)
        # Not -inf, which sampling takes for the logits of a broken model.
        given_EV = jnp.maximum(given_EV.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        return jnp.where(per_draw(view, asks_R)[:, None] > 0, given_EV, raw_EV)

    @property
    def _names(self) -> tuple[str, str]:
        return f"{self.name}.asks_R", f"{self.name}.numbers_RN"

    def _values(self, asked: Any) -> list[float]:
        """The numbers in order. Raises ValueError."""
        if asked is True:
            asked = {}
        elif not isinstance(asked, Mapping) and len(self.numbers) == 1:
            asked = dict.fromkeys(self.numbers, asked)
        if not isinstance(asked, Mapping):
            known = ", ".join(self.numbers)
            raise ValueError(f"must be true or an object of numbers by name: {known}")
        for key, value in asked.items():
            if key not in self.numbers:
                raise ValueError(f"has no number {str(key)[:64]!r}, only {', '.join(self.numbers)}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or abs(value) > MOST:
                raise ValueError(f"{key} must be a finite number, not {str(value)[:64]}")
        return [float(asked.get(key, default)) for key, default in self.numbers.items()]
