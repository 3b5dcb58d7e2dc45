"""Programs are warmed up and timed with rows that are real, and that leave nothing behind."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jserve.model.features import SCORE
from jserve.model.view import Bucket, StepDims
from jserve.runner.buckets import Needs
from jserve.runner.rehearsal import EVERYTHING, GREEDY, rehearsal
from jserve.runner.warmup import CPU_S, QUICK_S, WarmUp
from tests.runner.harness import make_runner

DIMS = StepDims(C=6, M=4, Z=8, V=128)
BUCKETS = [
    Bucket(D=2, P=0, F=0),
    Bucket(D=2, P=16, F=2),
    Bucket(D=4, P=48, F=3, J=4),
    Bucket(D=4, P=0, F=0, J=8, n_draft=7),
    Bucket(D=6, P=31, F=1, features=(SCORE,)),
]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_rehearsal_fills_its_bucket(bucket):
    plan = rehearsal(bucket, DIMS, GREEDY)
    needs = Needs.of(plan)
    assert (needs.D, needs.P, needs.J) == (bucket.D, bucket.P, bucket.J)
    assert (needs.n_draft, needs.features) == (bucket.n_draft, bucket.features)
    assert needs.fit(bucket)
    assert not plan.page_table_RM.any(), "on the scratch page"
    assert max(row.start + row.count for row in plan.rows) <= DIMS.M * DIMS.Z


def test_what_a_context_cannot_hold_is_left_out():
    plan = rehearsal(Bucket(D=2, P=512, F=2), DIMS, GREEDY)
    assert [row.count for row in plan.rows] == [1, 1, 31, 31]


def test_it_computes_on_real_rows_and_leaves_nothing_behind():
    runner = make_runner()
    pool = [np.asarray(pair[0]) for pair in runner.state.kv]
    for keys in pool:
        pages = keys if keys.shape[0] == runner.limits.n_pages else np.moveaxis(keys, 1, 0)
        assert pages[0].any(), "no row was real"
        assert not pages[1:].any()
    fresh = jax.tree.leaves(runner._new_state().slots)
    for now, new in zip(jax.tree.leaves(runner.state.slots), fresh, strict=True):
        np.testing.assert_array_equal(now, new)
    assert runner._packer._owner == [None] * runner.sizes.dims.C


class Ran:
    """A device whose programs take so long, at their first run longer, and also behind another."""

    def __init__(
        self,
        seconds: dict[Bucket, float],
        late: float = 0.0,
        behind: float = 0.0,
        host: float = 0.0,
    ) -> None:
        self.seconds, self.late, self.behind, self.host = seconds, late, behind, host
        self.now, self.runs = 0.0, []

    def times(self, **about: bool) -> dict[Bucket, float]:
        warm_up = WarmUp(run=self._run, clock=lambda: self.now, progress=lambda *_: None)
        found = warm_up.times(list(self.seconds), **about)
        sizes = {(b.D, b.P): b for b in self.seconds}
        return {sizes[t.n_decode, t.n_prefill]: t.seconds for t in found}

    def _run(self, bucket, params):
        took = self.seconds[bucket] + self.late * all(b != bucket for b, _ in self.runs)
        took += self.behind * (not self.runs or self.runs[-1][0] != bucket)
        self.now += took + self.host
        self.runs.append((bucket, params))
        return took


SMALL, LARGE = Bucket(D=2, P=0, F=0), Bucket(D=2, P=16, F=2)


def test_the_known_time_is_no_first_run_and_every_branch_was_taken():
    ran = Ran({SMALL: 0.01, LARGE: 0.02}, late=0.03)
    found = ran.times(cpu=True, drafts=False)
    assert found == pytest.approx({SMALL: 0.01, LARGE: 0.02})
    assert [params for b, params in ran.runs if b is SMALL] == [GREEDY, EVERYTHING, GREEDY]


def test_what_is_slow_on_a_cpu_runs_once_and_not_for_ever():
    ran = Ran({SMALL: 2 * QUICK_S, LARGE: CPU_S, Bucket(D=4, P=16, F=2): CPU_S})
    assert set(ran.times(cpu=True, drafts=False)) == {SMALL, LARGE}
    assert len(ran.runs) == 2
    ran = Ran(ran.seconds)
    assert set(ran.times(cpu=False, drafts=False)) == set(ran.seconds)
    assert len(ran.runs) == 3 * 3


def test_what_drafts_are_weighed_by_is_timed_in_rounds():
    ran = Ran({SMALL: 2 * QUICK_S, LARGE: CPU_S}, late=1.0)
    found = ran.times(cpu=True, drafts=True)
    assert found == pytest.approx({SMALL: 2 * QUICK_S, LARGE: CPU_S})
    rounds = [bucket for bucket, _ in ran.runs[2:]]
    assert rounds == [SMALL, LARGE] * (len(rounds) // 2), (
        "what is slow follows others as well as itself"
    )


def test_a_program_is_timed_behind_itself():
    ran = Ran({SMALL: 0.01, LARGE: 0.02}, behind=0.01)
    assert ran.times(cpu=True, drafts=True) == pytest.approx({SMALL: 0.01, LARGE: 0.02})


@pytest.mark.parametrize("drafts", [False, True])
def test_the_host_counts_only_where_one_run_is_all_there_is(drafts):
    found = Ran({SMALL: 0.01, LARGE: 0.02}, host=0.005).times(cpu=True, drafts=drafts)
    host = 0.0 if drafts else 0.005
    assert found == pytest.approx({SMALL: 0.01 + host, LARGE: 0.02 + host})
