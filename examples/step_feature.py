"""A step feature of one's own: the entropy of the distribution that each token was drawn from, at a
temperature that the request names.

python examples/step_feature.py [MODEL]
jserve serve --plugins examples/step_feature.py    # requests ask with "vllm_xargs": {"entropy": 1.0}
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jserve
from jserve import SamplingParams, StepFeature, register_feature
from jserve.model.draws import by_row, drawn_places, per_draw
from jserve.model.view import Bucket, Field, StepDims
from jserve.speculation.device.draft_passes import StepOutcome
from jserve.speculation.drafters.drafter import Target
from jserve.types import RowPlan

NAME = "entropy"


def asked_of(row: RowPlan) -> float | None:
    """The temperature that the row's request names; None: it does not ask."""
    return row.choice.request.params.extra_args.get(NAME)


def check(asked: Any) -> None:
    """Before the request is queued."""
    if not isinstance(asked, int | float) or not (math.isfinite(asked) and asked > 0):
        raise ValueError(f"must be a temperature above 0, not {asked!r}")


def fields(bucket: Bucket, dims: StepDims) -> tuple[Field, ...]:
    """On the way down: one number for each row of the bucket."""
    return (Field("entropy_at_R", (bucket.R,), is_float=True),)


def pack(
    views: Mapping[str, np.ndarray], rows: Sequence[RowPlan], at: Sequence[int], dims: StepDims
) -> None:
    """The buffer is used again, so rows that do not ask are written too."""
    views["entropy_at_R"][...] = 1.0
    for r, row in zip(at, rows, strict=True):
        views["entropy_at_R"][r] = asked_of(row) or 1.0


def after(target: Target, outcome: StepOutcome) -> jax.Array:
    """float32[R, J] in nats, inside the jitted step: of each place where a row draws a token."""
    view = outcome.view
    raw_EV = target.logits(outcome.x_TD[drawn_places(view)])
    at_E = per_draw(view, view.extra["entropy_at_R"])
    logp_EV = jax.nn.log_softmax(raw_EV / at_E[:, None])
    return by_row(view, -(jnp.exp(logp_EV) * logp_EV).sum(axis=-1), 0.0)


def unpack(
    entropy_RJ: np.ndarray, rows: Sequence[RowPlan], at: Sequence[int]
) -> dict[int, list[float]]:
    """On the way up: the same rows, found where ``pack`` put them; those that do not ask lose theirs."""
    return {i: entropy_RJ[r].tolist() for i, r in enumerate(at)}


ENTROPY = StepFeature(name=NAME, check=check, fields=fields, pack=pack, after=after, unpack=unpack)
register_feature(ENTROPY)  # engines built from here on have it


def main(model: str = "") -> None:
    params = SamplingParams(temperature=0, max_tokens=24, extra_args={NAME: 1.0})
    with jserve.LLM(model) as llm:
        [out] = llm.generate("One, two, three,", params)
        choice, tokenizer = out.outputs[0], llm.tokenizer
        for token, nats in zip(choice.token_ids, choice.extra[NAME], strict=True):
            print(f"{nats:6.3f}  {tokenizer.decode([token])!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
