"""Experts on different devices: as on one device, whatever slots they lie in and whichever way the mesh is cut."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.hand import Row
from jserve.model.shard import ShardRules, is_spec, make_mesh, padded
from jserve.model.view import Bucket
from jserve.weights.layout import split
from tests.model.driver import Driver

CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [],
}
FAMILY = family_for(CONFIG)
ARCH = FAMILY.arch(CONFIG)
PAGES = list(range(1, 6))
TEXT = np.random.default_rng(2).integers(0, 96, 33).tolist()
BUCKET = Bucket(D=2, P=40, F=1)
MESHES = [(2, 1), (4, 1), (2, 2)]
"""(ep, tp)."""


def tensors(family: Any = FAMILY, arch: Any = ARCH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    found: dict[str, np.ndarray] = {}
    for spec in jax.tree.leaves(family.specs(arch, 1), is_leaf=is_spec):
        value = 0.25 * rng.standard_normal(spec.shape) + spec.init_mean
        found |= split(spec, value.astype(np.float32))
    return found


def driver(ep: int, tp: int, spare: int = 0) -> Driver:
    mesh = make_mesh(tp, ep=ep)
    rules = ShardRules.of_mesh(mesh.shape, spare)
    return Driver(FAMILY, ARCH, tensors().__getitem__, attn="xla", mesh=mesh, rules=rules)


def logits(of: Driver) -> np.ndarray:
    return of.step(BUCKET, prefill=[Row(PAGES, 0, TEXT)])[2 : 2 + len(TEXT)]


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    return logits(driver(1, 1))


@pytest.mark.parametrize(("ep", "tp", "spare"), [(*mesh, 0) for mesh in MESHES] + [(4, 1, 4)])
def test_devices_with_some_experts_each_agree_with_one(
    ep: int, tp: int, spare: int, alone: np.ndarray
) -> None:
    got = logits(driver(ep, tp, spare))
    assert np.abs(got - alone).max() < 1e-5 * np.ptp(alone)
