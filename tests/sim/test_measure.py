"""The table of step times: which plans are timed, what is written, and that it reads back."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jserve.config import CacheOptions
from jserve.errors import ConfigError
from jserve.ports import InFlight, RunnerLimits
from jserve.sim import costs, measure
from jserve.types import StepPlan


@dataclass(frozen=True)
class StepShape:
    D: int
    P: int


LIMITS = RunnerLimits(
    n_slots=6,
    max_rows=6,
    max_decode_rows=6,
    max_prefill_tokens=32,
    max_prefill_rows=4,
    max_drafts=0,
    n_pages=20,
    page_size=8,
    max_model_len=128,
    vocab_size=50,
)


class Timed:
    """A device on a clock of its own: a millisecond a token, and two of host time when it waits."""

    def __init__(self) -> None:
        self.limits, self.now, self.free_at = LIMITS, 0.0, 0.0
        self.plans: list[tuple[StepPlan, StepShape | None]] = []

    def launch(self, plan: StepPlan, bucket) -> InFlight:
        self.plans.append((plan, bucket))
        self.now += 0.002
        size = plan.n_tokens if bucket is None else bucket.D + bucket.P
        self.free_at = max(self.now, self.free_at) + 0.001 * size
        return InFlight(plan=plan, launched=self.now, handle=self.free_at)

    def collect(self, flight: InFlight):
        self.now = max(self.now, flight.handle)


def table(runner: Timed, shapes: list[StepShape]) -> costs.TableFile:
    return measure.measure(
        runner, shapes, repeats=5, about={"model": "m"}, page_bytes=4096, clock=lambda: runner.now
    )


def test_a_step_is_its_period_and_the_host_what_waiting_costs_more() -> None:
    found = table(Timed(), [StepShape(4, 0), StepShape(6, 32)])
    assert {round(s.seconds, 9) for s in found.steps if not s.n_prefill} == {0.004}
    assert {round(s.seconds, 9) for s in found.steps if s.n_prefill} == {0.038}
    assert found.host_seconds == pytest.approx(0.002)
    assert len({s.n_context for s in found.steps}) >= 3
    assert max(s.n_context for s in found.steps) <= LIMITS.max_model_len


def test_plans_stay_inside_the_limits_and_prime_the_slots() -> None:
    runner = Timed()
    table(runner, [StepShape(4, 0), StepShape(6, 32), StepShape(2, 16)])
    length = dict.fromkeys(range(6), 0)
    for plan, bucket in runner.plans:
        rows = plan.rows
        assert len({row.slot for row in rows}) == len(rows) <= LIMITS.max_rows
        assert sum(not row.from_slot for row in rows) <= LIMITS.max_prefill_rows
        assert sum(row.count for row in rows if not row.from_slot) <= LIMITS.max_prefill_tokens
        assert all(0 < row.start + row.count <= LIMITS.max_model_len for row in rows)
        assert plan.page_table_RM.min() >= 1
        assert plan.page_table_RM.max() < LIMITS.n_pages
        assert plan.page_table_RM.dtype == np.int32
        for row in rows:
            if row.from_slot:
                assert length[row.slot] == row.start, "the device knows the slot at this length"
            length[row.slot] = row.start + row.count
        if bucket is not None and bucket.P:
            assert sum(row.from_slot for row in rows) == min(bucket.D, LIMITS.n_slots - 1)


def test_the_file_is_read_as_a_device(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    found = table(Timed(), [StepShape(4, 0), StepShape(6, 32)])
    measure.write(found, path)
    device = costs.from_table(path, CacheOptions(page_size=8))
    assert device.costs.seconds(3, 0, 5) == pytest.approx(0.004)
    assert device.costs.seconds(1, 20, 5) == pytest.approx(0.038)
    assert (device.n_pages, device.max_model_len) == (20, 128)
    assert (device.page_bytes, device.move_s) == (4096, 0.0)
    assert "38.000" in measure.shown(found)
    with pytest.raises(ConfigError, match="nowhere"):
        measure.write(found, tmp_path / "nowhere" / "x")
