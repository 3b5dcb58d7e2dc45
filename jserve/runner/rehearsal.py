"""Makes the warm-up plan of a bucket: rows that fill it.

Padding would not do: loops over a row's context would not be entered, so that what XLA builds at its first run is
built under the first request, and times would leave out attention. The rows use no slot and on the scratch
page, so that nothing they leave is ever read.
"""

from __future__ import annotations

import numpy as np

from jserve.model.features import SCORE
from jserve.model.view import Bucket, StepDims
from jserve.sampling import SamplingParams
from jserve.types import Choice, Request, RowPlan, StepPlan

GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 0.1},
    bad_token_ids=((0, 0),),
    min_tokens=1,
    logprobs=1,
)
"""Takes every branch of sampling."""


def rehearsal(bucket: Bucket, dims: StepDims, params: SamplingParams) -> StepPlan:
    """All decode rows of ``bucket`` at position 0 with as many drafts as fit, and its prefill tokens in as
    few rows as the context allows. Whoever packs it points all rows at no slot."""
    most = dims.M * dims.Z
    choice = _choice(params, min(most, bucket.P + 1))
    rows = [_verify(choice, bucket)] * bucket.D
    left = bucket.P
    for _ in range(bucket.F):
        count = min(left, most - 1)
        if count:
            rows.append(_prefill(choice, count, score=SCORE in bucket.features))
        left -= count
    table_RM = np.zeros((len(rows), dims.M), np.int32)
    reaches = () if dims.groups is None else dims.groups.reaches
    tables = tuple(
        np.zeros((reach.n_groups, len(rows), width), np.int32)
        for reach, width in zip(reaches, dims.columns, strict=True)
    )
    return StepPlan(
        id=-1,
        rows=tuple(rows),
        page_table_RM=table_RM,
        group_tables=tables,
        n_draft=bucket.n_draft,
    )


def _choice(params: SamplingParams, length: int) -> Choice:
    request = Request(id="rehearsal", prompt_ids=(0,) * length, params=params)
    return Choice(request=request, index=0, seed=0)


def _verify(choice: Choice, bucket: Bucket) -> RowPlan:
    drafts = (-1 if bucket.n_draft else 0,) * (bucket.J - 1)
    return RowPlan(choice=choice, slot=0, start=0, count=bucket.J, from_slot=True, drafts=drafts)


def _prefill(choice: Choice, count: int, *, score: bool) -> RowPlan:
    prompt = choice.request.prompt_ids
    return RowPlan(
        choice=choice,
        slot=0,
        start=0,
        count=count,
        from_slot=False,
        tokens=prompt[:count],
        targets=prompt[1 : count + 1] if score else (),
    )
