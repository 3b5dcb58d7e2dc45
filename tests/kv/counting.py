"""A drive that counts the prompt tokens it had to compute, per request."""

from __future__ import annotations

import dataclasses
from collections import Counter

from tests.sched.sched_drive import Drive, Told, limits, request

__all__ = ["CountingDrive", "Told", "limits", "request", "with_fields"]


class CountingDrive(Drive):
    """``computed[id]``: tokens of prefill rows that were scheduled for a request."""

    def __init__(self, *args, **kwargs) -> None:
        self.computed: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    def _check_plan(self, plan) -> None:
        super()._check_plan(plan)
        for row in plan.rows:
            self.computed[row.choice.request.id] += 0 if row.from_slot else row.count

    def done(self, id: str) -> bool:
        return self.told[id, 0].end is not None

    def until_done(self, id: str) -> None:
        for _ in range(200):
            if self.done(id):
                return
            self.step()
        raise AssertionError(f"{id} does not end")


def with_fields(req, **fields):
    """``req`` with other fields."""
    return dataclasses.replace(req, **fields)
