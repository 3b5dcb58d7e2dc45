"""The table of step times comes from the real runner's own programs."""

from __future__ import annotations

import pytest

from jserve.model.features import SCORE
from jserve.model.view import Bucket
from jserve.sim import measure
from jserve.sim.costs import StepTimeTable
from tests.whole import equal


@pytest.mark.slow
def test_every_program_is_timed(runner) -> None:
    buckets = [b for b in equal.BUCKETS if SCORE not in b.features]
    before = runner.programs.late_compiles
    table = measure.measure(runner, buckets, repeats=1, about={})
    assert runner.programs.late_compiles == before
    runner.reset()  # what the plans left behind is nobody's KV
    assert {(s.n_decode, s.n_prefill) for s in table.steps} == {(b.D, b.P) for b in buckets}
    assert Bucket(D=2, P=16, F=4) in buckets
    assert 0 < StepTimeTable(table.steps).seconds(2, 10, 50) < 60
