"""However requests are run, each gets what it gets alone: every architecture, on the real engine in float32."""

from __future__ import annotations

import pytest

from tests.model.test_parity import CASES
from tests.whole import equal
from tests.whole.test_equalities import check_workload


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_way_of_running_equals_alone(case: str) -> None:
    """Chunks, cache hits, preemption, drafts, buckets, overlap."""
    runner = equal.runner_of(*CASES[case])
    for seed in range(4):
        check_workload(runner, seed)
