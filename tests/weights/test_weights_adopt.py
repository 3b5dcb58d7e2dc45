"""Parameters handed over by the user: matched, cast, resharded, or refused by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jserve.errors import ConfigError, WeightsError
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules, padded, shardings
from jserve.weights.adopt import adopt
from jserve.weights.place import aligned
from tests.model.assembly import assemble_all
from tests.weights.weights_kit import BF16, LLAMA, Model, same

RULES = ShardRules()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("m"), LLAMA)


def params_of(model: Model, tp: int = 1, dtype: Any = BF16) -> Any:
    return assemble_all(model.family.specs(model.arch, tp), model.tensors.__getitem__, dtype)


def adopted(model: Model, params: Any, tp: int = 2, dtype: Any = BF16, **options: Any) -> Any:
    specs = model.family.specs(model.arch, tp)
    return adopt(params, specs, make_mesh(tp), RULES, dtype, **options)


def assert_adopted(model: Model, got: Any, tp: int = 2) -> None:
    want = params_of(model, tp)
    specs = model.family.specs(model.arch, tp)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    where = jax.tree.leaves(shardings(specs, make_mesh(tp), RULES))
    for a, b, s in zip(jax.tree.leaves(got), jax.tree.leaves(want), where, strict=True):
        assert same(a, b)
        assert a.sharding == s


def keyed(tree: Any, key: Callable[[int], Any]) -> Any:
    """Lists as dictionaries, as nnx writes them."""
    if isinstance(tree, list):
        return {key(i): keyed(x, key) for i, x in enumerate(tree)}
    return {k: keyed(x, key) for k, x in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.parametrize(
    "form",
    [
        lambda p: p,
        lambda p: jax.tree.map(np.asarray, p),
        lambda p: keyed(p, int),
        lambda p: keyed(p, str),
        lambda p: nnx.State(jax.tree.map(nnx.Param, keyed(p, int))),
        lambda p: jax.tree.map(nnx.Param, p),
        lambda p: {**p, "layers": tuple(p["layers"])},
    ],
    ids=["tree", "numpy", "int keys", "str keys", "nnx state", "nnx params", "tuple"],
)
def test_forms_of_the_same_tree(model: Model, form: Any) -> None:
    assert_adopted(model, adopted(model, form(params_of(model))))


def test_state_of_a_live_nnx_module(model: Model) -> None:
    class Trained(nnx.Module):
        def __init__(self, params: dict[str, Any]) -> None:
            for name, value in params.items():
                setattr(self, name, nnx.data(jax.tree.map(nnx.Param, value)))

    assert_adopted(model, adopted(model, nnx.state(Trained(params_of(model)), nnx.Param)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_casts(model: Model, dtype: Any) -> None:
    got = adopted(model, params_of(model, dtype=jnp.float32), dtype=dtype)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("tp", [4, 8])
def test_repeats_kv_heads_of_the_canonical_layout(model: Model, tp: int) -> None:
    canonical = model.family.specs(model.arch, 1)
    assert_adopted(model, adopted(model, params_of(model), tp, canonical=canonical), tp)
    assert_adopted(model, adopted(model, params_of(model, tp), tp, canonical=canonical), tp)
    with pytest.raises(WeightsError, match=r"params\.layers\.0\.qkv: shape"):
        adopted(model, params_of(model), tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_adopted_shares_no_buffer(model: Model, tp: int) -> None:
    """Neither with arrays that fit as they are, nor with numpy arrays that a device could alias."""
    first = adopted(model, params_of(model), tp)
    again = adopted(model, first, tp)
    want = jax.tree.map(np.asarray, again)
    want = jax.tree.map(np.copy, want)
    for leaf in jax.tree.leaves(first):
        leaf.delete()
    jax.tree.map(np.testing.assert_array_equal, again, want)
    mine = jax.tree.map(aligned_copy, want)
    taken = adopted(model, mine, tp)
    for leaf in jax.tree.leaves(mine):
        leaf[...] = 0
    jax.tree.map(np.testing.assert_array_equal, taken, want)


def aligned_copy(x: np.ndarray) -> np.ndarray:
    copy = aligned(x.shape, x.dtype)
    copy[...] = x
    return copy


def test_odd_vocabularies_are_padded(model: Model) -> None:
    rules, mesh = ShardRules(kv_heads=None, ffn=None), make_mesh(3)
    canonical = model.family.specs(model.arch, 1)
    specs = padded(canonical, rules, mesh.shape)
    given = params_of(model)
    got = adopt(given, specs, mesh, rules, BF16, canonical=canonical)
    assert got["embed"].shape == (66, 32)
    assert same(np.asarray(got["embed"])[:64], given["embed"])
    assert not np.asarray(got["unembed"])[64:].any()
    again = adopt(got, specs, mesh, rules, BF16, canonical=canonical)
    assert same(again["embed"], got["embed"])


def without(params: Any) -> Any:
    del params["layers"][1]["qkv"]
    return params


def deleted(params: Any) -> Any:
    params["layers"][1]["qkv"].delete()
    return params


def with_value(value: Any) -> Any:
    def change(params: Any) -> Any:
        params["layers"][0]["down"] = value
        return params

    return change


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        (without, "layers.1.qkv", "missing (1 of"),
        (lambda p: {}, "embed", "missing"),
        (lambda p: p["embed"], "embed", "missing"),
        (lambda p: p | {"extra": {"w": np.zeros(3)}}, "extra.w", "no such parameter"),
        (with_value(np.zeros((64, 32), BF16)), "layers.0.down", "shape (64, 32), must be (32, 64)"),
        (with_value(np.zeros((32, 64), np.int8)), "layers.0.down", "dtype int8"),
        (with_value(np.zeros((32, 64), np.complex64)), "layers.0.down", "dtype complex64"),
        (with_value(1.0), "layers.0.down", "not an array but float"),
        (with_value(np.zeros((32, 64), bool)), "layers.0.down", "dtype bool"),
        (lambda p: deleted(p), "layers.1.qkv", "was deleted"),
        (with_value(None), "layers.0.down", "not an array but NoneType"),
        (with_value({"w": np.zeros((32, 64))}), "layers.0.down", "missing"),
    ],
)
def test_mistakes_name_the_path(model: Model, change: Any, path: str, says: str) -> None:
    with pytest.raises(WeightsError) as caught:
        adopted(model, change(params_of(model)))
    assert caught.value.field == f"params.{path}"
    assert caught.value.message.startswith(f"params.{path}: ")
    assert says in caught.value.message


def test_mesh_must_fit(model: Model) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with pytest.raises(ConfigError, match="no axis 'tp'"):
        adopt(params_of(model), model.family.specs(model.arch, 1), mesh, RULES, BF16)
