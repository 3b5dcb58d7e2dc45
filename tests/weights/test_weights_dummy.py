"""Dummy weights: the same on every mesh, close to normal, unrelated to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import ParamSpec, Part
from jserve.model.shard import ShardRules
from jserve.weights.dummy import draw
from jserve.weights.layout import relayout
from jserve.weights.loader import load
from jserve.weights.place import named
from jserve.weights.source import resolve
from tests.weights.weights_kit import LLAMA, same

CONFIG = LLAMA | {"attention_bias": True}


def drawn(tmp_path: Path, tp: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    source = resolve(str(path), load_format="dummy")
    family = family_for(source.config)
    mesh = make_mesh(tp)
    arch = family.arch(source.config)
    return load(family, arch, source, mesh, ShardRules(), dtype, seed=seed), family.specs(arch, tp)


@pytest.mark.parametrize(
    ("tp", "dtype"), [(2, jnp.bfloat16), (4, jnp.float32), (8, jnp.bfloat16), (8, jnp.float32)]
)
def test_values_do_not_depend_on_the_mesh(tmp_path: Path, tp: int, dtype: Any) -> None:
    """tp 4 and 8 repeat kv heads: there the parameter must be tp 1's in the other layout."""
    one, plain = drawn(tmp_path, 1, dtype=dtype)
    many, specs = drawn(tmp_path, tp, dtype=dtype)
    changed = 0
    for (name, src), (_, dst), x, y in zip(
        named(plain), named(specs), jax.tree.leaves(one), jax.tree.leaves(many), strict=True
    ):
        want = relayout(np.asarray(x), src, dst) if src.shape != dst.shape else x
        changed += src.shape != dst.shape
        assert same(want, y), name
    assert (changed > 0) == (tp > 2)


def test_seed_and_name_choose_the_values(tmp_path: Path) -> None:
    (a, _), (b, _), (c, _) = (drawn(tmp_path, 1, seed) for seed in (0, 0, 1))
    assert all(same(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert not same(a["embed"], c["embed"])
    assert not same(a["layers"][0]["qkv"], a["layers"][1]["qkv"])
    assert not same(a["layers"][0]["gate_up"][0], a["layers"][0]["gate_up"][1])
    assert np.all(np.asarray(a["final_norm"], np.float32) == 1)


def matrix(name: str, shape: tuple[int, int], seed: int = 0, std: float = 1.0) -> np.ndarray:
    part = Part(name=name, shape=shape, view=shape)
    spec = ParamSpec(shape=shape, axes=(None, None), parts=(part,), init=std, init_mean=0.0)
    sharding = ShardRules().sharding(make_mesh(1), spec.axes)
    return np.asarray(draw(spec, sharding, jnp.float32, seed), np.float64)


def test_looks_normal() -> None:
    x = matrix("w", (1024, 1024), std=0.02) / 0.02
    assert abs(x.mean()) < 0.005
    assert abs(x.std() - 1) < 0.005
    assert 2.6 < (x**4).mean() < 3.0
    inside = [(np.abs(x) < k).mean() for k in (1, 2, 3)]
    assert np.allclose(inside, [0.683, 0.954, 0.997], atol=0.02)


def test_has_no_structure() -> None:
    """Rows, columns, names and seeds are uncorrelated; singular values as of a random matrix."""
    n = 512
    x = matrix("w", (n, n))
    limit = 6 / n**0.5
    for gram in (x @ x.T / n, x.T @ x / n):
        assert np.abs(gram - np.diag(np.diag(gram))).max() < limit
    bound = 6 / n
    for y in (
        matrix("w2", (n, n)),
        matrix("w", (n, n), seed=1),
        np.roll(x, 1),
        np.roll(x, 1, 0),
        x.T,
    ):
        assert abs((x * y).mean() - (x.shape[0] / n**2 if y is x.T else 0)) < bound
    top = np.linalg.svd(x, compute_uv=False)
    assert 1.9 < top[0] / n**0.5 < 2.1
    assert top[-1] / n**0.5 < 0.02


def test_neighbours_at_any_distance_are_unrelated() -> None:
    x = matrix("w", (1024, 1024)).ravel()
    for power in range(19):
        near, far = x[: -(1 << power)], x[1 << power :]
        assert abs((near * far).mean()) < 6 / near.size**0.5, power
        assert abs((near**2 * far**2).mean() - 1) < 10 / near.size**0.5, power


def test_signs_are_balanced_along_strides() -> None:
    x = matrix("w", (256, 4096))
    for view in (x, x[:, ::64], x[::16]):
        share = (view > 0).mean()
        assert abs(share - 0.5) < 4 * 0.5 / view.size**0.5 + 0.003


def test_no_weights_are_needed(tmp_path: Path) -> None:
    params, _ = drawn(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert params["embed"].shape == (64, 32)
