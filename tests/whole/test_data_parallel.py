"""Groups of devices (axis ``dp``) in the real engine: tokens of one engine, on devices that no other group has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from jserve import LLM, SamplingParams, build
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from tests.whole.conftest import SMALL_OPTIONS

OPTIONS = {**SMALL_OPTIONS, "max_num_seqs": 1, "structured_outputs": False}
PROMPTS = [[5 + i, 7, 9 + i] * (1 + i) for i in range(5)]


def drawn(model: Path, **options: Any) -> tuple[list[tuple[int, ...]], list[set[int]], list[int]]:
    """The tokens of each prompt; of each engine its devices and its steps."""
    params = [SamplingParams(max_tokens=5, temperature=float(i % 2), seed=i) for i in range(5)]
    llm = LLM(str(model), **OPTIONS, **options)
    try:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        engines = build.each_of(llm._engine)
        states = [jax.tree.leaves(engine.runner.state) for engine in engines]  # type: ignore[attr-defined]
        devices = [{d.id for leaf in leaves for d in leaf.devices()} for leaves in states]
        return [o.outputs[0].token_ids for o in found], devices, [e.n_steps for e in engines]
    finally:
        llm.close()


@pytest.mark.slow
def test_groups_draw_the_tokens_of_one_engine(tiny_dir: Path) -> None:
    want, *_ = drawn(tiny_dir)
    got, devices, steps = drawn(tiny_dir, sharding="dp=2,tp=2")
    assert got == want
    assert devices == [{0, 1}, {2, 3}]
    assert min(steps) > 0
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("tp", "dp"), axis_types=kinds, devices=jax.devices()[4:8])
    got, devices, _ = drawn(tiny_dir, mesh=mesh)
    assert got == want
    assert devices == [{4, 6}, {5, 7}]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sharding": "dp=5,tp=2"}, "sharding.mesh"),
        ({"sharding": "dp=2", "journal": "j"}, "journal"),
        ({"sharding": "dp=2", "disk_dir": "d", "host_memory_gb": 0.01}, "disk_dir"),
        ({"sharding": "dp=2", "tensor_parallel_size": 2}, "sharding"),
    ],
)
def test_what_groups_cannot_have_is_refused(tiny_dir: Path, options: dict, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_dir), **OPTIONS, **options)
    assert caught.value.field == field


def test_one_engine_has_no_groups(tiny_dir: Path) -> None:
    config = EngineConfig.of(model=str(tiny_dir), sharding="dp=2", **OPTIONS)
    with pytest.raises(ConfigError, match="2 engines"):
        build.engine(config)
