"""Experts on different devices: as on one device, whatever slots they lie in and whichever way the mesh is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model import moe, moe_places
from jserve.model.arch import Mlp, resized
from jserve.model.families import family_for
from jserve.model.hand import Row
from jserve.model.mesh import make_mesh
from jserve.model.moe_specs import check_has_experts
from jserve.model.param_spec import is_spec
from jserve.model.shard import ShardRules, padded
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("ep", "tp", "spare"),
    [
        (2, 2, 0),
        (4, 1, 4),
        *(pytest.param(*mesh, 0, marks=pytest.mark.slow) for mesh in ((2, 1), (4, 1))),
    ],
)
def test_devices_with_some_experts_each_agree_with_one(
    ep: int, tp: int, spare: int, alone: np.ndarray
) -> None:
    got = logits(driver(ep, tp, spare))
    assert np.abs(got - alone).max() < 1e-5 * np.ptp(alone)


def test_an_expert_that_nobody_chose_may_hold_anything() -> None:
    """NaN in all weights of experts that no token chose; with four devices three have no other. With a router of
    zeros all scores are equal, so every token goes to the first three."""
    weights = tensors()
    for i in range(2):
        weights[f"model.layers.{i}.mlp.gate.weight"] = np.zeros((8, 32), np.float32)
    want = logits(Driver(FAMILY, ARCH, weights.__getitem__, attn="xla"))
    for name in weights:
        if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) not in (0, 1, 2):
            weights[name] = np.full_like(weights[name], np.nan)
    mesh = make_mesh(1, ep=4)
    rules = ShardRules.of_mesh(mesh.shape)
    got = logits(Driver(FAMILY, ARCH, weights.__getitem__, attn="xla", mesh=mesh, rules=rules))
    assert np.abs(got - want).max() < 1e-5 * np.ptp(want)


def test_padding_and_what_others_have_routes_nowhere() -> None:
    """Each device has a tile for those of the token's experts that it has, and padding has none."""
    found: list[int] = []
    real = moe.Tiles.of

    def of(expert_TX: jax.Array, E: int, Q: int) -> moe.Tiles:
        tiles = real(expert_TX, E, Q)
        jax.debug.callback(lambda n: found.append(int(n)), tiles.n)
        return tiles

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe.Tiles, "of", of)
        mesh = make_mesh(1, ep=2)
        rules = ShardRules.of_mesh(mesh.shape)
        # Pages that no other test has: a layer of known shapes is not traced again.
        own = Driver(FAMILY, ARCH, tensors().__getitem__, attn="xla", mesh=mesh, rules=rules, M=7)
        own.step(BUCKET, prefill=[Row(PAGES, 0, TEXT[:1])])
        jax.effects_barrier()
    assert len(found) == 4
    assert sum(found) == 2 * 3


def wrong_offset(*args: Any) -> jax.Array:
    """Slots one too far."""
    slot_TX = moe_places.slots_of(*args)
    return jnp.where(slot_TX < args[3], (slot_TX + 1) % args[3], slot_TX)


PLANTS = {
    "offset": (moe, "slots_of", wrong_offset),
    "no sum": (moe, "reduce", lambda y, *_: y),
    "all nowhere": (moe, "slots_of", lambda e, p, E, n, *_: jnp.full_like(e, n)),
    "no owner": (moe, "slots_of", lambda e, p, E, n, *_: jnp.where(e < E, e % n, n)),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_seen(
    plant: str, alone: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PLANTS[plant])
    jax.clear_caches()
    got = logits(driver(2, 1))
    jax.clear_caches()
    assert np.abs(got - alone).max() > 1e-2 * np.ptp(alone)


def places_of(*slots: list[int]) -> moe_places.Placement:
    R = max(map(len, slots))
    rows = [own + own[:1] * (R - len(own)) for own in slots]
    return moe_places.Placement(slot_ER=jnp.array(rows), n_E=jnp.array([len(own) for own in slots]))


def test_a_token_goes_to_one_of_its_experts_slots_by_its_position() -> None:
    places = places_of([5], [0, 2, 4], [1])
    expert_TX = jnp.tile(jnp.array([[1, 2]]), (600, 1)).at[0, 0].set(3)
    got = np.asarray(moe_places.slots_of(expert_TX, jnp.arange(600), 3, 6, None, places))
    assert got[0, 0] == 6, "expert E is nowhere"
    assert set(got[:, 1]) == {1}
    counts = np.bincount(got[1:, 0], minlength=6)
    assert counts[[1, 3, 5]].sum() == 0
    assert counts[[0, 2, 4]].min() > 170, "copies share the tokens"
    alone = moe_places.slots_of(expert_TX[7:8], jnp.arange(7, 8), 3, 6, None, places)
    assert np.asarray(alone)[0].tolist() == got[7].tolist(), "whatever else is in the step"


@pytest.mark.parametrize(
    ("sizes", "spare", "arch", "field"),
    [
        ({"ep": 3, "tp": 1}, 0, ARCH, "expert_parallel_size"),
        ({"ep": 2, "tp": 1}, 9, ARCH, "expert_parallel_size"),
        ({"ep": 2, "tp": 1}, 10, ARCH, "num_redundant_experts"),
        ({"ep": 2, "tp": 5}, 0, ARCH, "moe_intermediate_size"),
        ({"tp": 4}, 2, ARCH, "num_redundant_experts"),
    ],
)
def test_what_devices_cannot_share_is_refused_by_name(
    sizes: dict[str, int], spare: int, arch: Any, field: str
) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        padded(FAMILY.specs(arch, 1), ShardRules.of_mesh(sizes, spare), sizes)
    assert caught.value.field == field


def test_a_model_without_experts_is_refused() -> None:
    dense = resized(ARCH, L=1)
    dense = replace(dense, layers=(replace(dense.layers[0], ffn=Mlp(F=64)),))
    with pytest.raises(ConfigError, match="no experts") as caught:
        check_has_experts(dense, ShardRules.of_mesh({"ep": 2, "tp": 1}), {"ep": 2, "tp": 1})
    assert caught.value.field == "expert_parallel_size"
