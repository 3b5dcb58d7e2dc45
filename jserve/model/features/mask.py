"""The mask feature: which tokens a row may draw, as a bitmask over the vocabulary for each of its draws.

It owns the fields and their packing; ``jserve.model.sample`` applies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jserve.model.feature import StepFeature
from jserve.model.view import Bucket, Field, StepDims
from jserve.types import RowPlan


def fields(bucket: Bucket, dims: StepDims) -> tuple[Field, ...]:
    """``redraw_RJ`` is as ``RowPlan.redraw``, -1 for none."""
    R, J = bucket.R, bucket.J
    return Field("mask_RJW", (R, J, -(-dims.V // 32))), Field("redraw_RJ", (R, J))


def wanted(rows: Sequence[RowPlan]) -> bool:
    return any([row.mask is not None for row in rows])


def pack(
    views: Mapping[str, np.ndarray], rows: Sequence[RowPlan], at: Sequence[int], dims: StepDims
) -> None:
    views["mask_RJW"][...] = views["redraw_RJ"][...] = -1
    for r, row in zip(at, rows, strict=True):
        if row.mask is not None:
            views["mask_RJW"][r, : len(row.mask)] = row.mask
            views["redraw_RJ"][r, : len(row.redraw)] = row.redraw


MASK = StepFeature(name="mask", fields=fields, wanted=wanted, pack=pack)
