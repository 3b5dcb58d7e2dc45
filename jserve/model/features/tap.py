"""The tap: a step feature that gives a request the values at points of the model, for each token that it draws.

Points are read where the token is drawn: of the last token before it; and at each token of a prompt, for requests that
ask. A reduction is a function of one place, mapped over all of them on the device, so that a result never depends on
who else is in the step::

    blocks.3.hook_resid_post [T, D] --drawn places---> [E, points, D] --reduce--> [E, ...] --by row--> the host
                                    --prefill tokens-> [P, points, D] --reduce--> [P, ...] --by row--> the host
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.model.draws import by_row, drawn_places
from jserve.model.feature import StepFeature, by_token
from jserve.model.view import Bucket, Field, StepDims
from jserve.speculation.device.draft_passes import StepOutcome
from jserve.speculation.drafters.drafter import Target
from jserve.types import RowPlan

Reduce = Callable[[jax.Array], jax.Array]
"""float32[points, D] (of heads: [points, N, H]) of one place, points in the order of a pass -> an array of any
shape."""


PROMPT = "prompt"
"""Asked of a tap in place of True: values of the prompt's tokens too."""
BLOCK = 32
"""Prompt tokens whose reductions are computed at once."""


def tap(name: str, *points: str, reduce: Reduce | None = None, prompt: bool = False) -> StepFeature:
    """A feature for ``register_feature``: requests ask for it by ``extra_args={name: True}``, and
    ``CompletionOutput.extra[name]`` has a value for each token: a number, or a numpy array of the shape that
    ``reduce`` gives.

    Args:
        points: as ``jserve.model.points`` names them, of one shape; ``*`` in one stands for anything.
        reduce: by default all values, [points, D] or [points, N, H].
        prompt: requests may ask for ``"prompt"`` in place of True: ``RequestOutput.prompt_extra[name]`` then also has
            the values of each token of the prompt, which is computed in full. Programs with prefill compute them
            for all their tokens, and send them where somebody asked.
    """
    return StepFeature(
        name=name,
        points=points,
        is_tap=True,
        check=partial(_check, (True, PROMPT) if prompt else (True,)),
        fields=partial(_fields, name),
        pack=partial(_pack, name),
        after=partial(_after, name, reduce),
        unpack=partial(_unpack, name),
        of_prompt=_of_prompt if prompt else None,
        after_prompt=partial(_after_prompt, name, reduce) if prompt else None,
    )


def _check(known: tuple[Any, ...], asked: Any) -> None:
    if not any(asked is one or (isinstance(asked, str) and asked == one) for one in known):
        words = " or ".join("true" if one is True else f'"{one}"' for one in known)
        raise ValueError(f"must be {words}, not {asked!r}"[:200])


def _of_prompt(asked: Any) -> bool:
    return asked == PROMPT


def _fields(name: str, bucket: Bucket, dims: StepDims) -> tuple[Field, ...]:
    return (Field(_asks(name), ()),)


def _asks(name: str) -> str:
    """The name of its field: 0 in steps whose rows ask for other features, 2 where prompts are to have values."""
    return f"{name}.asks"


def _pack(
    name: str,
    views: Mapping[str, np.ndarray],
    rows: Sequence[RowPlan],
    at: Sequence[int],
    dims: StepDims,
) -> None:
    asks = any([name in row.choice.request.params.extra_args for row in rows])
    of_prompt = any([name in row.prompt_features for row in rows])
    views[_asks(name)][...] = 2 if of_prompt else int(asks)


def _after(name: str, reduce: Reduce | None, target: Target, outcome: StepOutcome) -> jax.Array:
    """[R, J, ...]."""
    at_E = drawn_places(outcome.view)
    x_EPD = _stacked(name, [x_TD[at_E] for x_TD in outcome.read])
    if reduce is not None:
        asked = outcome.view.extra[_asks(name)] > 0
        x_EPD = where_asked(asked, jax.vmap(reduce), x_EPD)
    return by_row(outcome.view, x_EPD, 0)


def _after_prompt(
    name: str, reduce: Reduce | None, target: Target, outcome: StepOutcome
) -> jax.Array:
    """[prefill tokens, ...], in blocks, since what a reduction computes on its way may be large."""
    n = outcome.view.P
    x_NPD = _stacked(name, [x_TD[-n:] for x_TD in outcome.read])
    if reduce is None:
        return x_NPD
    asked = outcome.view.extra[_asks(name)] > 1
    return where_asked(asked, partial(jax.lax.map, reduce, batch_size=BLOCK), x_NPD)


def _stacked(name: str, found: Sequence[jax.Array]) -> jax.Array:
    """[N, points, ...] of [N, ...] of each point."""
    if len({x.shape for x in found}) > 1:
        shapes = ", ".join(dict.fromkeys(str(list(x.shape[1:])) for x in found))
        why = f"its points have values of several shapes, {shapes}; make a tap for each"
        raise ConfigError(f"{name}: {why}", field=name)
    return jnp.stack(found, axis=1)


def where_asked(asked: jax.Array, reduce: Reduce, x_NPD: jax.Array) -> jax.Array:
    """[N, ...]; zeros where nobody asks: the programs of taps have all of them, and reductions may cost."""
    made = jax.eval_shape(reduce, x_NPD)
    return jax.lax.cond(asked, reduce, lambda _: jnp.zeros(made.shape, made.dtype), x_NPD)


def _unpack(
    name: str, found_RJX: np.ndarray, rows: Sequence[RowPlan], at: Sequence[int]
) -> dict[int, list[Any]]:
    places = enumerate(zip(rows, at, strict=True))
    asks = [(i, r) for i, (row, r) in places if name in row.choice.request.params.extra_args]
    return {i: by_token(found_RJX[r]) for i, r in asks}
