"""Layouts whose sums differ have other names: pages on disk, and step times, are those of one layout."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve.errors import ConfigError
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.hand import step_model_of
from jserve.model.mesh import mesh_of
from jserve.model.shard import ShardRules, padded, shardings
from jserve.ports import StepTime
from jserve.runner.moves import identity
from jserve.sharding import Sharding
from jserve.sim.costs import FORMAT, TableFile
from jserve.sim.known import step_times
from jserve.sim.measure import write
from jserve.weights.place import tp_size
from tests.runner.harness import ARCH
from tests.runner.test_layouts import XY, host_params, runner

RULES = {"kv_heads": ["x", "y"], "ffn": "x", "vocab": "y"}
PLAIN: dict[str, Any] = {"mesh": XY, "rules": RULES}
SUMS: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {"tp": 1}},
    "two": {"mesh": {"tp": 2}},
    "plain": PLAIN,
    "another mesh": {**PLAIN, "mesh": {"x": 4, "y": 2}},
    "other rules": {**PLAIN, "rules": {**RULES, "ffn": "y"}},
    "axes in another order": {**PLAIN, "rules": {**RULES, "kv_heads": ["y", "x"]}},
    "sums": {**PLAIN, "sums": "weights"},
    "logits": {**PLAIN, "logits": "split"},
    "residual": {**PLAIN, "residual": "split"},
    "auto": {**PLAIN, "mode": "auto"},
    "by path": {
        **PLAIN,
        "mode": "auto",
        "params": {"layers/0/down": [None, "y"]},
    },
}
"""No two of them add the same numbers in the same order."""
WRITTEN_OTHERWISE = {
    "two": "tp=2",
    "plain": {"rules": {"vocab": ["y"], "embed": None, **RULES}, "mesh": XY, "sums": "float32"},
    "auto": {"mode": "auto", "mesh": XY, "rules": dict(reversed(RULES.items()))},
}


def page_identity(given: Any) -> str:
    """Of an engine with the weights of ``host_params``."""
    sharding = Sharding.of(given)
    mesh = mesh_of(sharding)
    rules = ShardRules.of_sharding(sharding, mesh.shape)
    tp = tp_size(mesh, rules)
    specs = padded(LLAMA.specs(ARCH, tp), rules, mesh.shape)
    params = jax.device_put(host_params(tp), shardings(specs, mesh, rules))
    model = step_model_of(LLAMA, ARCH, mesh=mesh, rules=rules, dtype=jnp.float32)
    return identity(model, params)


@lru_cache
def identities() -> dict[str, str]:
    return {name: page_identity(spec) for name, spec in SUMS.items()}


@pytest.mark.slow
def test_pages_of_layouts_whose_sums_differ_lie_apart() -> None:
    found = identities()
    assert len({*found.values()}) == len(found), [
        pair for pair in combinations(found, 2) if found[pair[0]] == found[pair[1]]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN_OTHERWISE)
def test_a_layout_written_otherwise_finds_its_pages(name: str) -> None:
    assert page_identity(WRITTEN_OTHERWISE[name]) == identities()[name]


@pytest.mark.slow
def test_step_times_of_another_layout_are_refused(tmp_path: Path) -> None:
    """``two`` on as many devices as ``sums``: the device is the same, only the layout differs."""
    made = {
        n: runner(spec)
        for n, spec in (("two", "tp=2"), ("sums", {"mesh": {"tp": 2}, "sums": "weights"}))
    }
    facts = {n: {"source": "tiny"} | one.report() for n, one in made.items()}
    buckets = [(b.D, b.P) for b in made["two"].plain_buckets]
    steps = tuple(StepTime(n_decode=d, n_prefill=p, n_context=16, seconds=0.5) for d, p in buckets)
    table = TableFile(
        format=FORMAT,
        about=facts["two"],
        host_seconds=0.0,
        n_slots=8,
        n_pages=99,
        page_size=8,
        max_model_len=64,
        steps=steps,
    )
    write(table, tmp_path / "t.json")
    assert step_times(tmp_path / "t.json", facts["two"], buckets) == steps
    with pytest.raises(ConfigError, match=r"sharding is 'tp=2 .* sums:weights' here"):
        step_times(tmp_path / "t.json", facts["sums"], buckets)
