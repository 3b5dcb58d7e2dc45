"""Records one short entry per committed step until the next Stats message takes them.

It costs a step one small struct and a walk over its prefill rows, read or not; records that are not taken are
dropped.
"""

from __future__ import annotations

from collections import deque

from jserve.engine.wire import StepRecord
from jserve.types import StepPlan, StepResult

KEPT = 512
"""Records between two Stats messages; a device that makes more steps loses the oldest."""


class StepLog:
    """Records of committed steps, each taken once."""

    def __init__(self, kept: int = KEPT) -> None:
        self._records: deque[StepRecord] = deque(maxlen=kept)

    def add(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """``plan`` was committed with ``result`` at ``now`` (monotonic seconds)."""
        n_prefill_rows = n_prefill_tokens = 0
        for row in reversed(plan.rows):  # prefill rows come last
            if row.from_slot:
                break
            n_prefill_rows += 1
            n_prefill_tokens += row.count
        self._records.append(
            StepRecord(
                at=now,
                device_us=result.device_us,
                n_rows=len(plan.rows),
                n_prefill_rows=n_prefill_rows,
                n_prefill_tokens=n_prefill_tokens,
                n_drawn=int(result.n_ok_R.sum()),
            )
        )

    def take(self) -> list[StepRecord]:
        """Records since the last call, oldest first."""
        records = list(self._records)
        self._records.clear()
        return records
