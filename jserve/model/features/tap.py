"""The tap: a step feature that gives a request the values at points of the model, for each token that it draws.

Points are read where the token is drawn: of the last token before it. A reduction is a function of one place, mapped
over all of them on the device, so that a result never depends on who else is in the step::

    blocks.3.hook_resid_post [T, D] --drawn places--> [E, points, D] --reduce--> [E, ...] --by row--> the host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.draws import by_row, drawn_places
from jserve.model.feature import StepFeature
from jserve.speculation.device.draft_passes import StepOutcome
from jserve.speculation.drafters.drafter import Target
from jserve.types import RowPlan

Reduce = Callable[[jax.Array], jax.Array]
"""float32[points, D] of one place, points in the order of a pass -> an array of any shape."""


def tap(name: str, *points: str, reduce: Reduce | None = None) -> StepFeature:
    """A feature for ``register_feature``: requests ask for it by ``extra_args={name: True}``, and
    ``CompletionOutput.extra[name]`` has a nested list for each token, of the shape that ``reduce`` gives.

    Args:
        points: as ``jserve.model.points`` names them; ``*`` in one stands for anything.
        reduce: by default all values, [points, D].
    """
    return StepFeature(
        name=name,
        points=points,
        is_tap=True,
        check=_check,
        after=partial(_after, reduce or (lambda x_PD: x_PD)),
        unpack=_unpack,
    )


def _check(asked: Any) -> None:
    if asked is not True:
        raise ValueError(f"must be true, not {asked!r}")


def _after(reduce: Reduce, target: Target, outcome: StepOutcome) -> jax.Array:
    """[R, J, ...]."""
    at_E = drawn_places(outcome.view)
    x_EPD = jnp.stack([x_TD[at_E] for x_TD in outcome.read], axis=1)
    return by_row(outcome.view, jax.vmap(reduce)(x_EPD), 0)


def _unpack(
    found_RJX: np.ndarray, rows: Sequence[RowPlan], at: Sequence[int]
) -> dict[int, list[Any]]:
    return {i: found_RJX[r].tolist() for i, r in enumerate(at)}
