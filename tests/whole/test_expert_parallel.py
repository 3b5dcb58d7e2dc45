"""Engines built by options alone whose experts lie on different devices, and move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jserve import build
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.types import Request
from tests.runner.test_experts import CONFIG, OPTIONS, REQUESTS, weights

DUMMY = {**OPTIONS, "load_format": "dummy", "dtype": "float32"}
"""Weights are handed over."""


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def tokens(model: str, *, mesh: Any = None, **options: Any) -> tuple[list[list[int]], dict]:
    """(tokens of each request, counters) of an engine with these options."""
    config = EngineConfig.of(model=model, **DUMMY | options)
    made, _ = build.engine(config, params=weights(make_mesh(1), ShardRules()), mesh=mesh)
    found: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    for request in REQUESTS:
        made.submit(Request(id=request.id, prompt_ids=request.prompt_ids, params=request.params))
    for out in made.drain():
        assert out.error is None
        found[out.request_id] += out.token_ids
    counters = made.stats().values
    build.close(made)
    return list(found.values()), counters


@pytest.mark.slow
def test_options_spread_experts_over_devices(model_dir: str) -> None:
    want, plain = tokens(model_dir)
    assert all(len(set(own)) > 5 for own in want)
    assert not any(name.startswith("expert_") for name in plain)
    even = {"enable_eplb": True, "num_redundant_experts": 4, "eplb_step_interval": 4}
    got, counters = tokens(model_dir, expert_parallel_size=2, tensor_parallel_size=2, **even)
    assert got == want
    assert counters["expert_rebalances_total"] > 0
    assert counters["expert_moves_total"] > 0
    assert counters["compiles_after_ready_total"] == 0
    assert tokens(model_dir, mesh=make_mesh(2, ep=2))[0] == want
    assert "expert_load_hottest_share" in tokens(model_dir, expert_load_metrics=True)[1]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"expert_parallel_size": 16}, "expert_parallel_size"),
        ({"num_redundant_experts": 1}, "num_redundant_experts"),
        ({"enable_eplb": True}, "enable_eplb"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    model_dir: str, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tokens(model_dir, **options)
    assert caught.value.field == field
