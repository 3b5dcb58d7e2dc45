"""The ``StepFeature`` type: what a request can ask of a step beside a token, as plain functions.

``jserve.model.features`` has one file for each feature. A bucket lists those that its program has; a program
without a feature has nothing of it: no field, no operation, no output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jserve.types import RowPlan

if TYPE_CHECKING:
    import jax

    from jserve.model.view import Bucket, Field, StepDims, StepView
    from jserve.speculation.device.draft_passes import StepOutcome
    from jserve.speculation.drafters.drafter import Target


def _nothing(target: Target, outcome: StepOutcome) -> None:
    return None


def _takes_all(asked: Any) -> None:
    return None


def _no_values(found: Any, rows: Sequence[RowPlan], at: Sequence[int]) -> dict[int, Any]:
    return {}


def _no_fields(bucket: Bucket, dims: StepDims) -> tuple[Field, ...]:
    return ()


def _fills_nothing(
    views: Mapping[str, np.ndarray], rows: Sequence[RowPlan], at: Sequence[int], dims: StepDims
) -> None:
    return None


@dataclass(frozen=True, slots=True)
class SlotArray:
    """An array that a slot holds for a feature, of one row: a fold over the output tokens of a sequence."""

    start: np.ndarray
    """Before the first of them."""
    after: Callable[[jax.Array, jax.Array], jax.Array]
    """(the array, int32 token) -> the array behind one token more; a pure function of jax operations."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True, repr=False)
class StepFeature:
    """A feature; two are equal if their names are, and names are its order.

    On the device, inside the step's shard_map:
    fields: (bucket, dims) -> its fields of the packed buffer, which ``StepView.extra`` holds by name.
    after:  (target, what came of the step) -> its output, a pytree; None: it has none.
    writes: places of the residual stream that it changes, named alike, before or after a layer.
    edit:   (view, float32[T, D] there) -> the stream that goes on; rows that have not asked keep theirs.
    logits: (view, float32[E, V] of the places where tokens are drawn) -> those to draw from, -inf for a token that is
            not to be; rows that have not asked keep theirs. One from which nothing can be drawn ends its request.
    token:  (view, float32[E, V] after all that changes the likeliest token, keys of ``jax.random`` [E], int32[E] the
            engine's tokens) -> int32[E] the tokens of rows that have asked; others keep theirs. One that is no id, or
            of a logit of -inf, ends its request.
    after_prompt: (target, what came of the step) -> [P, ...], a value for each prefill token; in steps with prefill
            alone. None: it gives prompts nothing.
    is_tap: its values are activations: over HTTP it is asked of a server with ``--allow-taps`` only.
    points: places of the model that it reads, as ``jserve.model.points`` names them (``*`` stands for anything);
            ``after`` finds their values, float32[T, ...] each and in the order of a pass, in ``StepOutcome.read``.
    state:  an array that each slot holds for it; ``feature_states.at_draws`` gives it where tokens are drawn.

    On the host, in numpy:
    check:  (what a request asks of it in ``extra_args``) -> None; raises ValueError where ``pack`` could
            not take it, and the request is refused with that message. By default all is taken.
    kv_name: (what a request asks, once checked; tokens of its prompt) -> a text that names its part in the KV of that
            request: other texts, other KV, and pages are shared within one text only. None: KV is as without it.
    of_prompt: (what a request asks, once checked) -> whether it wants the values of its prompt's tokens, which
            ``after_prompt`` gives, too. Such a prompt is computed in full, without what the prefix cache knows of it,
            and the values go to ``RequestOutput.prompt_extra``. None: no request does.
    wanted: (rows) -> whether a row of a plan needs it; by default, whether a request of theirs names it in
            ``SamplingParams.extra_args``.
    pack:   (views, rows, at, dims) -> None: fill its fields, once places and tokens of the rows are in
            the other views; ``at`` holds the number of each row in the bucket. Raises ValueError for an
            index out of range, which JAX would clamp to a wrong answer. By default it fills nothing.
    unpack: (output as numpy, rows, at) -> what each row gets, by its number in the plan; ``at`` as in
            ``pack``. What a registered feature gives a row is a list of values that JSON can hold, or numpy
            arrays of numbers, one for each token that the row may draw (``by_token``), and goes to
            ``CompletionOutput.extra``.
    """

    name: str
    points: tuple[str, ...] = field(compare=False, default=())
    is_tap: bool = field(compare=False, default=False)
    writes: tuple[str, ...] = field(compare=False, default=())
    edit: Callable[[StepView, jax.Array], jax.Array] | None = field(compare=False, default=None)
    logits: Callable[[StepView, jax.Array], jax.Array] | None = field(compare=False, default=None)
    token: Callable[[StepView, jax.Array, jax.Array, jax.Array], jax.Array] | None = field(
        compare=False, default=None
    )
    state: SlotArray | None = field(compare=False, default=None)
    kv_name: Callable[[Any, int], str] | None = field(compare=False, default=None)
    of_prompt: Callable[[Any], bool] | None = field(compare=False, default=None)
    after_prompt: Callable[[Target, StepOutcome], jax.Array] | None = field(
        compare=False, default=None
    )
    fields: Callable[[Bucket, StepDims], tuple[Field, ...]] = field(
        compare=False, default=_no_fields
    )
    wanted: Callable[[Sequence[RowPlan]], bool] | None = field(compare=False, default=None)
    pack: Callable[[Mapping[str, np.ndarray], Sequence[RowPlan], Sequence[int], StepDims], None] = (
        field(compare=False, default=_fills_nothing)
    )
    check: Callable[[Any], None] = field(compare=False, default=_takes_all)
    after: Callable[[Target, StepOutcome], Any] = field(compare=False, default=_nothing)
    unpack: Callable[[Any, Sequence[RowPlan], Sequence[int]], dict[int, Any]] = field(
        compare=False, default=_no_values
    )

    def needed(self, rows: Sequence[RowPlan]) -> bool:
        """True if a step of these rows has to run in a program that has the feature."""
        if self.wanted is not None:
            return self.wanted(rows)
        return any([self.name in row.choice.request.params.extra_args for row in rows])

    def __repr__(self) -> str:
        return self.name


def by_token(found_NX: np.ndarray) -> list[Any]:
    """One value for each of N tokens: numbers as Python's, more than a number as an array of its own memory."""
    if found_NX.dtype.kind not in "biuf":
        found_NX = found_NX.astype(np.float32)
    return found_NX.tolist() if found_NX.ndim == 1 else list(found_NX.copy())


def in_range(name: str, values: Sequence[int], low: int, high: int) -> None:
    """Raises ValueError for a value outside ``low`` .. ``high``."""
    if min(values) < low or max(values) > high:
        raise ValueError(f"{name} out of range [{low}, {high}]: {min(values)} .. {max(values)}")
