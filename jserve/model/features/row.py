"""The knowledge of a function of one row: a few numbers that the request asks, and the place of the draw.

extra_args={"sharpen": 0.3}  --check, pack-->  asks_R, numbers_RN  --per draw-->  RowView
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
from jserve.model.feature import SlotArray
from jserve.model.feature_states import at_draws
from jserve.model.view import Bucket, Field, StepDims, StepView
from jserve.types import RowPlan

MOST_NUMBERS = 8
MOST = float(np.finfo(np.float32).max)


@register_dataclass
@dataclass(frozen=True)
class RowView:
    """The place of a draw, as far as a function of one row may know it."""

    position: jax.Array
    """int32: of the token to be drawn; 0 is the first of the prompt."""
    token: jax.Array
    """int32: the one before it."""
    numbers: dict[str, jax.Array]
    """float32 each: what the request asks, by name."""
    state: jax.Array | None = None
    """Behind all output tokens before this one; None: the function has none."""


def row_state(start: Any, after: Callable[[jax.Array, jax.Array], jax.Array]) -> SlotArray:
    """A state that a function of one row keeps between the tokens of an output, as ``RowView.state``. It is right under
    speculation, preemption and forced tokens, since it is a fold over the output tokens and nothing else.

    Args:
        start: a number or an array of a type that jax has (no float64 or int64), before the first token.
        after: (state, int32 token) -> the state behind one token more, of the same shape and type; a pure function of
            jax operations.

    Raises:
        ConfigError: ``after`` gives another shape or type.
    """
    array = np.asarray(jnp.asarray(start))
    token = jax.ShapeDtypeStruct((), np.int32)
    found = jax.eval_shape(after, jax.ShapeDtypeStruct(array.shape, array.dtype), token)
    if (found.shape, found.dtype) != (array.shape, array.dtype):
        have, want = (f"{x.dtype}{list(x.shape)}" for x in (found, array))
        raise ConfigError(f"state: after gives {have}, start is {want}", field="state")
    return SlotArray(array, after)


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The numbers of the feature ``name``, with the values of requests that do not say them.

    Raises:
        ConfigError: more than ``MOST_NUMBERS``, or one that is not finite.
    """

    name: str
    numbers: Mapping[str, float]
    state: SlotArray | None = None

    def __post_init__(self) -> None:
        if len(self.numbers) > MOST_NUMBERS or not all(map(math.isfinite, self.numbers.values())):
            why = f"{self.name}: numbers must be at most {MOST_NUMBERS}, and finite"
            raise ConfigError(why, field=self.name)

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

    def asks(self, view: StepView) -> jax.Array:
        """bool[E]: the draws of rows that ask."""
        return per_draw(view, view.extra[self._names[0]]) > 0

    def rows(self, view: StepView) -> RowView:
        """The places of all draws, [E] each."""
        numbers_EN, at_E = per_draw(view, view.extra[self._names[1]]), drawn_places(view)
        return RowView(
            position=view.pos_T[at_E] + 1,
            token=view.tok_T[at_E],
            numbers={key: numbers_EN[:, i] for i, key in enumerate(self.numbers)},
            state=None if self.state is None else at_draws(view, self.name, self.state),
        )

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
