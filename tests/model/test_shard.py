"""Tensor parallelism on forced CPU devices, parameter assembly, dummy weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import ParamSpec, dtype_of, is_spec
from jserve.model.shard import ShardRules
from jserve.weights.dummy import draw_all
from tests.model.assembly import assemble
from tests.model.driver import Driver

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
    "max_position_embeddings": 128,
}
FAMILY = family_for(CONFIG)
ARCH = FAMILY.arch(CONFIG)


def tensors(name: str) -> np.ndarray:
    """Random checkpoint tensor of that name."""
    specs = jax.tree.leaves(FAMILY.specs(ARCH, 1), is_leaf=is_spec)
    part = next(p for s in specs for p in s.parts if p.name == name)
    rng = np.random.default_rng(list(name.encode()))
    return 0.15 * rng.standard_normal(part.shape, np.float32) + ("norm" in name)


@pytest.fixture(scope="module")
def alone() -> tuple[np.ndarray, list[int]]:
    return Driver(FAMILY, ARCH, tensors, attn="xla").greedy(list(range(3, 40)), 16)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_shards_give_what_one_device_gives(tp: int, alone: tuple[np.ndarray, list[int]]) -> None:
    driver = Driver(FAMILY, ARCH, tensors, attn="xla", tp=tp)
    logits, tokens = driver.greedy(list(range(3, 40)), 16)
    assert np.abs(logits - alone[0]).max() < 2e-6 * np.ptp(alone[0])
    assert tokens == alone[1]
    assert len(set(tokens)) > 4
    kv = driver.kv[0][0]
    assert kv.addressable_shards[0].data.shape[1] == max(ARCH.K, tp) // tp


@pytest.mark.parametrize(
    ("change", "tp", "field"),
    [
        ({"intermediate_size": 98}, 4, "intermediate_size"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "num_attention_heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "num_key_value_heads"),
    ],
)
def test_sizes_that_do_not_split_are_refused(change: Any, tp: int, field: str) -> None:
    arch = FAMILY.arch({**CONFIG, **change})
    FAMILY.specs(arch, 1)
    with pytest.raises(ConfigError, match=field) as e:
        FAMILY.specs(arch, tp)
    assert e.value.field == field


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ConfigError) as e:
        make_mesh(9)
    assert e.value.field == "tensor_parallel_size"


def test_assemble_lays_heads_of_a_group_together() -> None:
    spec = FAMILY.specs(ARCH, 4)["layers"][0]["qkv"]
    qkv = assemble(spec, tensors)
    q, k = (tensors(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qk")
    assert qkv.shape == (4, 4, 8, 64)
    np.testing.assert_array_equal(qkv[3, 1], q.reshape(8, 8, 64)[7])
    np.testing.assert_array_equal(qkv[0, 2], qkv[1, 2])
    np.testing.assert_array_equal(qkv[2, 2], k.reshape(2, 8, 64)[1])


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    def draw(tp: int, seed: int) -> Any:
        return draw_all(FAMILY.specs(ARCH, tp), seed, make_mesh(tp), ShardRules(), jnp.float32)

    one, two = draw(1, 0), draw(2, 0)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    eight = draw(8, 0)
    np.testing.assert_array_equal(eight["embed"], one["embed"])
    np.testing.assert_array_equal(eight["layers"][0]["qkv"][5, -1], one["layers"][0]["qkv"][1, -1])
    assert not np.array_equal(draw(1, 1)["embed"], one["embed"])
    a, b = (np.asarray(layer["gate_up"]).ravel() for layer in one["layers"])
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
    assert a.std() == pytest.approx(0.02, rel=0.03)
    assert abs(a.mean()) < 1e-3
    np.testing.assert_array_equal(one["final_norm"], np.ones(64))


def test_a_leaf_with_a_dtype_of_its_own_is_not_the_models() -> None:
    own = ParamSpec(shape=(2,), axes=(None,), parts=(), dtype=jnp.int8)
    specs = {"a": own, "b": ParamSpec(shape=(2,), axes=(None,), parts=())}
    params = {"a": jnp.zeros(2, jnp.int8), "b": jnp.zeros(2, jnp.bfloat16)}
    assert dtype_of(params, specs) == jnp.bfloat16
