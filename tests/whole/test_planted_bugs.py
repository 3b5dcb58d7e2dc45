"""The equalities have teeth: a device that errs in one small way is caught within a few workloads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from jserve.types import StepPlan, StepResult
from tests.whole import equal
from tests.whole.test_equalities import compare

SEEDS = range(200, 212)


class Erring:
    """A runner that changes plans before they run, or results before they are read."""

    def __init__(
        self,
        runner: Any,
        plan: Callable[[StepPlan], StepPlan] = lambda p: p,
        result: Callable[[StepPlan, StepResult], StepResult] = lambda p, r: r,
    ) -> None:
        self.runner, self.limits = runner, runner.limits
        self.plan, self.result = plan, result

    def launch(self, plan: StepPlan, bucket: Any = None) -> Any:
        return dataclasses.replace(self.runner.launch(self.plan(plan), bucket), plan=plan)

    def collect(self, flight: Any) -> StepResult:
        return self.result(flight.plan, self.runner.collect(flight))


def no_loads(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, loads=())


def two_pages_swapped(plan: StepPlan) -> StepPlan:
    """The first two pages of long rows change places, from the second chunk on."""
    table = plan.page_table_RM.copy()
    for r, row in enumerate(plan.rows):
        if row.start >= 9 and table.shape[1] >= 2:
            table[r, [0, 1]] = table[r, [1, 0]]
    return dataclasses.replace(plan, page_table_RM=table)


def chunk_one_late(plan: StepPlan) -> StepPlan:
    """A later chunk of a prompt is rotated as if it stood one place further on."""
    rows = tuple(
        msgspec.structs.replace(row, tokens=[*row.tokens[1:], row.tokens[0]])
        if not row.from_slot and row.start > 0 and row.count > 1
        else row
        for row in plan.rows
    )
    return dataclasses.replace(plan, rows=rows)


def every_draft_stands(plan: StepPlan, result: StepResult) -> StepResult:
    tokens, n_ok = result.tokens_RJ.copy(), result.n_ok_R.copy()
    for r, row in enumerate(plan.rows):
        if row.drafts and n_ok[r]:
            n = min(len(row.drafts), tokens.shape[1] - 1)
            tokens[r, :n], n_ok[r] = row.drafts[:n], n + 1
    return dataclasses.replace(result, tokens_RJ=tokens, n_ok_R=n_ok)


def first_row_repeats(plan: StepPlan, result: StepResult) -> StepResult:
    """In a full step the last row gets the first row's token."""
    tokens = result.tokens_RJ.copy()
    if len(plan.rows) >= 4:
        tokens[-1] = tokens[0]
    return dataclasses.replace(result, tokens_RJ=np.ascontiguousarray(tokens))


BUGS = {
    "slots are not loaded": {"plan": no_loads},
    "two pages swapped": {"plan": two_pages_swapped},
    "a chunk is read one token late": {"plan": chunk_one_late},
    "every draft stands": {"result": every_draft_stands},
    "rows are mixed up": {"result": first_row_repeats},
}


def differs(runner: Any, broken: Erring, seed: int) -> bool:
    rng = random.Random(seed)
    requests = equal.draw_requests(rng, f"p{seed}")
    alone = equal.alone(runner, requests)
    truth = {key: answer[0] for key, answer in alone.items()}
    way = dataclasses.replace(
        equal.PLAIN, overlap=1, chunk=9, drafts=True, prefix_caching=True, n_pages=60
    )
    try:
        compare(equal.run(broken, requests, way, rng, truth), alone)
    except AssertionError:
        return True
    return False


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(runner, bug: str) -> None:
    assert any(differs(runner, Erring(runner, **BUGS[bug]), seed) for seed in SEEDS)


def test_the_honest_device_passes_the_same_workloads(runner) -> None:
    assert not any(differs(runner, Erring(runner), seed) for seed in list(SEEDS)[:4])
