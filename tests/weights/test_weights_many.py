"""A checkpoint of 20,000 tensors: what a tensor costs beyond its bytes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.weights.loader import load
from jserve.weights.source import resolve
from tests.weights.weights_kit import BF16, LLAMA, Model

CONFIG: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 52,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 32,
}
MOST_S = 0.4e-3
"""Of a tensor. One of 3 MB, of which Qwen3-30B-A3B has as many, takes 1.5 ms from a disk of 2 GB/s."""


@pytest.mark.slow
def test_tensors_cost_little_beside_their_bytes(tmp_path: Path) -> None:
    model = Model(tmp_path, CONFIG).sharded(8)
    n = len(model.tensors)
    assert n > 20_000
    began = time.perf_counter()
    size = sum(len(path.read_bytes()) for path in tmp_path.glob("*.safetensors"))
    reading = time.perf_counter() - began
    began = time.perf_counter()
    source = resolve(str(tmp_path))
    got = load(model.family, model.arch, source, make_mesh(1), ShardRules(), BF16)
    jax.block_until_ready(got)
    loading = time.perf_counter() - began
    print(f"{n} tensors, {size / 1e6:.0f} MB: read {reading:.2f} s, loaded {loading:.2f} s")
    assert (loading - reading) / n < MOST_S
    name = "model.layers.51.mlp.experts.127.down_proj.weight"
    last = np.asarray(got["layers"][51]["expert_down"])[127]
    np.testing.assert_array_equal(last, model.tensors[name])
