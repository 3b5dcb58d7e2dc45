"""Twins of steps: the same work without the collectives, so that the difference of their times is what these cost."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core

from jserve.model.hand import step_model_of
from jserve.model.mesh import abstract_mesh
from jserve.model.shard import ShardRules
from jserve.model.step import make_step
from jserve.model.view import Bucket, buffer_size
from jserve.runner.runner import ModelRunner
from jserve.sharding import Sharding
from jserve.sizing.explain import traced
from jserve.sizing.models import find
from jserve.sizing.twin import WARM, StepCost, step_cost, without_collectives
from tests.runner.harness import make_runner

STEPS = (Bucket(D=4, P=0, F=0), Bucket(D=2, P=16, F=1))
SHARDINGS: dict[str, dict[str, Any]] = {
    "sums and gathers": {},
    "sums in parts": {"sums": "weights", "mesh": {"tp": 4}},
    "split residual": {"residual": "split", "rules": {"kv_heads": "tp", "ffn": "tp"}},
    "split logits": {"logits": "split"},
}


@pytest.mark.parametrize("asked", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("bucket", STEPS, ids=str)
def test_a_twin_has_no_collective_and_gives_the_same_shapes(asked: dict, bucket: Bucket) -> None:
    sharding, found = Sharding.of({"mesh": {"tp": 2}} | asked), find("checkpoints/jserve-mini")
    mesh: Any = abstract_mesh(dict(sharding.mesh))
    rules = ShardRules.of_sharding(sharding, mesh.shape)
    model = step_model_of(found.family, found.arch, mesh=mesh, rules=rules, dtype=found.dtype)
    args = (model.abstract_params(), model.abstract_state(), abstract_buf(model, bucket))
    closed = jax.make_jaxpr(make_step(model, bucket))(*args)
    assert {c.op for c in traced(closed.jaxpr)} & {"all-reduce", "reduce-scatter", "all-gather"}
    twin = without_collectives(closed)
    assert not list(traced(twin.jaxpr))
    run = core.jaxpr_as_fun(twin)
    shapes = jax.eval_shape(run, *jax.tree.leaves(args))
    assert [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in closed.out_avals]


def abstract_buf(model: Any, bucket: Bucket) -> Any:
    return jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), np.int32)


@lru_cache(maxsize=1)
def over_two() -> ModelRunner:
    return make_runner(STEPS, tp=2)


@pytest.mark.slow
def test_of_one_device_the_twin_is_the_step() -> None:
    runner = make_runner(STEPS)
    args, step = runner.made_up(STEPS[0]), make_step(runner.model, STEPS[0])
    closed = jax.make_jaxpr(step)(*args)
    given = jax.tree.leaves(args)
    runs = [jax.jit(core.jaxpr_as_fun(each)) for each in (closed, without_collectives(closed))]
    same = [run(*given) for run in runs]
    for a, b in zip(*same, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    cost = step_cost(runner, STEPS[0], 2)
    assert (cost.collectives, cost.collective_mib) == (0, 0.0)


@pytest.mark.slow
def test_a_cost_counts_the_collectives_of_the_program_and_times_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of times that are given: each pair is a step and its twin."""
    runner = over_two()
    before = runner.state
    ticks = iter([0.0] * 2 * WARM + [0.0, 0.5, 0.0, 0.2] * 3)
    monkeypatch.setattr("jserve.sizing.twin.time.perf_counter", lambda: next(ticks))
    cost = step_cost(runner, STEPS[1], 3)
    L, D, V = runner.model.arch.L, runner.model.arch.D, runner.model.arch.V
    tokens, drawn = STEPS[1].T, STEPS[1].R
    n_bytes = 4 * ((2 * L + 1) * tokens * D + drawn * V)
    assert cost == StepCost(
        decode_rows=2,
        prefill_tokens=16,
        collectives=2 * L + 2,
        collective_mib=n_bytes / 2**20,
        step_ms=500.0,
        exposed_ms=300.0,
    )
    assert runner.state is not before
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(runner.state))


@pytest.mark.slow
def test_a_twin_is_compiled_as_the_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what differs is the compiler's work too."""
    runner = over_two()
    options = {"xla_backend_optimization_level": "1"}
    monkeypatch.setattr(runner.programs, "options", options)
    compile, asked = jax.stages.Lowered.compile, []
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, options=None: asked.append(options) or compile(self, options),
    )
    step_cost(runner, STEPS[0], 1)
    assert asked == [options]
