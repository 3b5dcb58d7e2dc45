"""A row's pages in one group of layers, and the positions that its tokens see there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jserve.kv_layout import Reach, Span
from jserve.testing.model import mix_N, place_at
from jserve.types import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The pages of one row in group ``number``."""

    pages_M: np.ndarray
    number: int
    span: Span
    sinks: int
    page_size: int
    wraps: bool
    """True: position p lies in column p // page_size modulo their number; False: there is one for every page."""

    def cells(self, at_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(page, offset) of positions ``at_N``."""
        column_N = at_N // self.page_size
        if self.wraps:
            column_N = column_N % len(self.pages_M)
        return self.pages_M[column_N], at_N % self.page_size

    def visible(self, start: int, n: int) -> np.ndarray:
        """int64[S]: positions, ascending, that tokens ``start`` to ``n - 1`` see."""
        first = int(self.span.lowest(np.int64(start)))
        return np.concatenate([np.arange(min(self.sinks, first)), np.arange(first, n)])

    def sums(self, value_S: np.ndarray, at_S: np.ndarray, start: int) -> np.ndarray:
        """uint64[N]: what each position from ``start`` on sees of ``value_S``, which lies at positions
        ``at_S``, as one sum."""
        cum_S1 = np.zeros(len(at_S) + 1, np.uint64)
        cum_S1[1:] = np.cumsum(place_at(value_S.astype(np.uint64), at_S))
        n_new = len(at_S) - int(np.searchsorted(at_S, start))
        skip = int(np.searchsorted(at_S, self.sinks))
        low_N = np.searchsorted(at_S, self.span.lowest(start + np.arange(n_new)))
        return cum_S1[len(cum_S1) - n_new :] - (cum_S1[np.maximum(low_N, skip)] - cum_S1[skip])

    def ctx(self, token_S: np.ndarray, at_S: np.ndarray, start: int) -> np.ndarray:
        """uint64[N]: the ctx of each position from ``start`` on, of tokens at positions ``at_S``. No two groups
        have the same."""
        return mix_N(self.sums(token_S, at_S, start) ^ np.uint64(self.number))


def group_rows(
    plan: StepPlan, r: int, reaches: tuple[Reach, ...], page_size: int, window: int, sinks: int
) -> list[GroupRow]:
    """Row ``r`` of ``plan`` in every group of ``reaches``; without any, in one group that sees the window and sinks."""
    if not reaches:
        only = GroupRow(
            pages_M=plan.page_table_RM[r],
            number=0,
            span=Span(window),
            sinks=sinks,
            page_size=page_size,
            wraps=False,
        )
        return [only]
    found: list[GroupRow] = []
    for i, (reach, table_NRM) in enumerate(zip(reaches, plan.group_tables, strict=True)):
        assert len(table_NRM) == reach.n_groups, "a group has no page table"
        found += [
            GroupRow(
                pages_M=table_RM[r],
                number=len(found) + n,
                span=reach.span,
                sinks=sinks,
                page_size=page_size,
                wraps=i > 0,
            )
            for n, table_RM in enumerate(table_NRM)
        ]
    return found
