"""Sharding rules: every combination draws what one device draws, or is refused by the rule's name."""

from __future__ import annotations

import ast
import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jserve
from jserve.errors import ConfigError
from jserve.model.attention import backend
from jserve.model.families.llama import FAMILY
from jserve.model.hand import Row, pack
from jserve.model.mesh import make_mesh, mesh_of
from jserve.model.param_spec import ParamSpec, Part, is_spec
from jserve.model.shard import Axes, ShardRules, padded
from jserve.model.step import StepModel, make_step
from jserve.model.view import RANDOM, Bucket, StepDims, numpy_views
from jserve.runner.state import new_state
from jserve.sharding import Sharding
from jserve.weights.adopt import adopt
from jserve.weights.layout import split as parts_of
from jserve.weights.place import tp_size
from tests.model.driver import Driver

ARCH = FAMILY.arch(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 37,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
)
"""The vocabulary divides over no number of devices: where it is split, it is padded."""
COMBINATIONS = list(itertools.product((True, False), repeat=3))


@lru_cache(maxsize=1)
def weights() -> Any:
    """Seeded float32 values. Every logit is negative: a padded one, were it 0, would be drawn.

    Dimension 0 of the residual stream does that: it is constant, and no layer reads or writes it.
    """
    rng = np.random.default_rng(3)

    def draw(spec: ParamSpec) -> np.ndarray:
        return (rng.standard_normal(spec.shape) * 0.3 + spec.init_mean).astype(np.float32)

    tree = jax.tree.map(draw, FAMILY.specs(ARCH, 1), is_leaf=is_spec)
    tree["embed"] *= 3
    tree["embed"][:, 0], tree["unembed"][:, 0], tree["final_norm"][0] = 16.0, -20.0, 1.0
    for layer in tree["layers"]:
        layer["attn_norm"] *= 3
        layer["mlp_norm"] *= 3
        layer["attn_norm"][0] = layer["mlp_norm"][0] = 0.0
        layer["o"][0] = layer["down"][0] = 0.0
    return tree


def tensor(name: str) -> np.ndarray:
    """Of a checkpoint with these weights."""
    tree = jax.tree.leaves(weights())
    specs = jax.tree.leaves(FAMILY.specs(ARCH, 1), is_leaf=is_spec)
    parts = (parts_of(spec, x) for spec, x in zip(specs, tree, strict=True))
    return next(found[name] for found in parts if name in found)


def rules_of(heads: Any, ffn: Any, vocab: Any) -> ShardRules:
    return ShardRules(kv_heads=heads or None, ffn=ffn or None, vocab=vocab or None)


def greedy(mesh: Mesh, rules: ShardRules) -> tuple[np.ndarray, list[int]]:
    driver = Driver(FAMILY, ARCH, tensor, attn="xla", mesh=mesh, rules=rules, M=5)
    return driver.greedy([5, 17, 31, 8, 36], 12)


@pytest.fixture(scope="module")
def alone() -> tuple[np.ndarray, list[int]]:
    logits, tokens = greedy(make_mesh(1), ShardRules())
    assert logits.shape == (5, ARCH.V)
    assert logits.max() < 0
    assert np.ptp(logits, axis=0).max() > 0.1, "contexts that cannot be told apart"
    return logits, tokens


@pytest.mark.one_in(6)
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", COMBINATIONS)
def test_every_combination_gives_what_one_device_gives(
    split: tuple[bool, bool, bool], n: int, alone: tuple[np.ndarray, list[int]]
) -> None:
    logits, tokens = greedy(make_mesh(n), rules_of(*("tp" if on else None for on in split)))
    assert tokens == alone[1]
    # A sum over n devices rounds n times.
    assert np.abs(logits - alone[0]).max() < 1e-6 * n * np.abs(alone[0]).max()


def test_dimensions_may_lie_on_different_mesh_axes(alone: tuple[np.ndarray, list[int]]) -> None:
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    assert greedy(mesh, rules_of("x", "y", "y"))[1] == alone[1]


# ---- whole steps -------------------------------------------------------------------------------

BUCKET = Bucket(D=2, P=8, F=2)
PROMPTS = [5, 17, 31, 8, 36], [9, 2, 36]


def model_on(mesh: Mesh, rules: ShardRules) -> StepModel:
    return StepModel(
        family=FAMILY,
        arch=ARCH,
        backend=backend("xla"),
        dims=StepDims(C=2, M=3, Z=8, V=ARCH.V),
        mesh=mesh,
        rules=rules,
        n_pages=7,
        kv_dtype=jnp.float32,
        dtype=jnp.float32,
    )


def packed(model: StepModel, decode: list[Row], prefill: list[Row]) -> np.ndarray:
    """The first row is greedy, the second random."""
    buf = pack(BUCKET, model.dims, model.backend, decode, prefill)
    views = numpy_views(buf, model.fields(BUCKET))
    for row in (1, BUCKET.D + 1):
        views["temperature_R"][row], views["uses_R"][row] = 1.5, RANDOM
        views["seed_R2"][row] = 7, 11
    views["flags"][...] = RANDOM
    return buf


def lowered(mesh: Mesh, rules: ShardRules) -> tuple[StepModel, Any]:
    model = model_on(mesh, rules)
    buf = jax.ShapeDtypeStruct(packed(model, [], []).shape, jnp.int32)
    jitted = jax.jit(make_step(model, BUCKET), donate_argnums=1)
    return model, jitted.lower(model.abstract_params(), model.abstract_state(), buf)


def run(mesh: Mesh, rules: ShardRules) -> list[list[int]]:
    """Tokens of both rows."""
    model, program = lowered(mesh, rules)
    specs, canonical = model.specs(), FAMILY.specs(ARCH, 1)
    params = adopt(weights(), specs, mesh, rules, jnp.float32, canonical=canonical)
    step, state, pages = program.compile(), new_state(model), ([1, 2, 3], [4, 5, 6])
    rows = [Row(pages[i], 0, PROMPTS[i], slot=i) for i in range(2)]
    state, out = step(params, state, packed(model, [], rows))
    drawn = [np.asarray(out.packed_RX)[BUCKET.D :, 2]]
    rows = [Row(pages[i], -1, [-1], slot=i) for i in range(2)]
    for _ in range(9):
        state, out = step(params, state, packed(model, rows, []))
        assert np.all(np.asarray(out.packed_RX)[: BUCKET.D, 1])
        drawn.append(np.asarray(out.packed_RX)[: BUCKET.D, 2])
    return np.stack(drawn, axis=1).tolist()


@pytest.fixture(scope="module")
def stepped() -> list[list[int]]:
    rows = run(make_mesh(1), ShardRules())
    assert len(set(rows[1])) > 3
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        pytest.param(s, marks=() if s == (True, False, True) else pytest.mark.slow)
        for s in COMBINATIONS
    ],
)
def test_steps_of_every_combination_draw_what_one_device_draws(
    split: tuple[bool, bool, bool], stepped: list[list[int]]
) -> None:
    assert run(make_mesh(2), rules_of(*("tp" if on else None for on in split))) == stepped


PLACES = list(itertools.product((None, "x", "y"), repeat=3))
"""Where heads, ffn and vocabulary may lie on a mesh of 2 by 4 devices."""
PAIRWISE = [(None, None, None), (None, "x", "y"), ("y", None, "x"), ("x", "y", None)]
"""Every pair of two dimensions split or whole, each split dimension once over 2 and once over 4 devices."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [pytest.param(p, marks=() if p in PAIRWISE else pytest.mark.slow) for p in PLACES],
)
def test_steps_on_eight_devices_draw_what_one_device_draws(
    places: tuple[str | None, ...], stepped: list[list[int]]
) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    assert run(mesh, rules_of(*places)) == stepped


@pytest.mark.slow
@pytest.mark.parametrize("split", COMBINATIONS)
def test_steps_on_one_axis_of_eight_draw_what_one_device_draws(
    split: tuple[bool, bool, bool], stepped: list[list[int]]
) -> None:
    """More devices than kv heads, and a vocabulary with three rows of padding."""
    assert run(make_mesh(8), rules_of(*("tp" if on else None for on in split))) == stepped


BY_DATA = {
    "both axes": {"rules": {"kv_heads": ["x", "y"], "ffn": ["y", "x"], "vocab": ["x", "y"]}},
    "auto": {"mode": "auto", "rules": {"kv_heads": "y", "ffn": ["x", "y"], "vocab": ["x", "y"]}},
    "auto, 2D": {
        "mode": "auto",
        "rules": {"embed": "x", "kv_heads": "y", "ffn": "y", "vocab": "y"},
    },
    "auto, by path": {
        "mode": "auto",
        "rules": {"kv_heads": "x"},
        "params": {
            r"layers/\d/down": [None, ["x", "y"]],
            r"layers/1/.*norm": ["y"],
            "embed": [None, ["y", "x"]],
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_DATA)
def test_a_sharding_as_data_draws_what_one_device_draws(
    name: str, stepped: list[list[int]]
) -> None:
    sharding = Sharding.of({"mesh": {"x": 2, "y": 4}, **BY_DATA[name]})
    mesh = mesh_of(sharding)
    rules = ShardRules.of_sharding(sharding, mesh.shape)
    assert run(mesh, rules) == stepped
    laid = jax.tree.leaves(model_on(mesh, rules).param_partitions())
    assert any(any(axes) for axes in laid), "everything is whole"


def test_paths_win_over_rules() -> None:
    sharding = Sharding.of({"mesh": {"x": 2, "y": 4}, **BY_DATA["auto, by path"]})
    model = model_on(mesh_of(sharding), ShardRules.of_sharding(sharding, {"x": 2, "y": 4}))
    found = model.param_partitions()
    assert found["layers"][0]["down"] == PartitionSpec(None, ("x", "y"))
    assert found["layers"][0]["attn_norm"] == PartitionSpec(None)
    assert found["layers"][1]["attn_norm"] == PartitionSpec("y")
    assert found["layers"][1]["qkv"] == PartitionSpec("x", None, None, None)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"layers/9/down": [None, ["x", "y"]]}, "sharding.params.layers/9/down"),
        ({"layers/0/down": [["x", "y"]]}, "sharding.params.layers/0/down"),
        ({"layers/0/attn_norm": [["x", "y"]]}, None),
        ({"embed": [["x", "y"], None]}, "sharding.params.embed"),
    ],
)
def test_paths_that_cannot_be_honoured_are_refused(params: Any, field: str | None) -> None:
    sharding = Sharding.of({"mesh": {"x": 2, "y": 4}, "mode": "auto", "params": params})
    mesh = mesh_of(sharding)
    rules = ShardRules.of_sharding(sharding, mesh.shape)

    def placed() -> Any:
        specs = padded(FAMILY.specs(ARCH, 1), rules, mesh.shape)
        return adopt(weights(), specs, mesh, rules, jnp.float32)

    if field is None:
        placed()
        return
    with pytest.raises(ConfigError) as caught:
        placed()
    assert caught.value.field == field


@pytest.mark.parametrize("split", [(True, False, True), (False, True, False)])
def test_a_step_has_the_collectives_of_what_is_split(split: tuple[bool, bool, bool]) -> None:
    """One sum for each dimension (both layers are one traced function), and one gather."""
    heads, ffn, vocab = split
    _, program = lowered(make_mesh(2), rules_of(*("tp" if on else None for on in split)))
    text = program.as_text()
    assert text.count("stablehlo.all_reduce") == heads + ffn + vocab
    assert text.count("stablehlo.all_gather") == vocab


COLLECTIVES = {
    "all_gather",
    "all_to_all",
    "axis_index",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
} | {"psum", "psum_scatter", "pswapaxes", "ragged_all_to_all"}


def test_every_collective_of_a_step_is_in_one_file() -> None:
    """``pallas_kernels`` has none: its ``axis_index`` is of a kernel's grid."""
    assert set(dir(jax.lax)) >= COLLECTIVES, "jax renamed one"
    root = Path(jserve.__file__).parent
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if COLLECTIVES & {getattr(node, kind, None) for kind in ("attr", "id", "name")}
    }
    assert users == {"model/collectives.py"}


def test_a_rule_given_as_extra_counts_like_its_own() -> None:
    rules = ShardRules(extra={"ffn": None, "vocab": "x"})
    assert Axes.of(rules, {"tp": 2, "x": 2}) == Axes(heads="tp", ffn=None, vocab="x")
    assert Axes.of(rules, {"tp": 1, "x": 1}) == Axes()


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        (ShardRules(ffn="y"), "sharding.rules.ffn"),
        (ShardRules(kv_heads="y"), "sharding.rules.kv_heads"),
        (ShardRules(vocab="y"), "sharding.rules.vocab"),
        (ShardRules(embed="y"), "sharding.rules.embed"),
        (ShardRules(embed="tp"), "sharding.rules.embed"),
        (ShardRules(extra={"layers": "tp"}), "sharding.rules.layers"),
        (ShardRules(extra={"experts": "tp"}), "sharding.rules.experts"),
        (ShardRules(extra={"heads": "tp"}), "sharding.rules.heads"),
        (ShardRules(extra={"heads": "y"}), "sharding.rules.heads"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_the_rule(rules: ShardRules, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        make_step(model_on(make_mesh(2), rules), BUCKET)
    assert caught.value.field == field


def test_a_weight_of_an_unknown_logical_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such rule") as caught:
        ShardRules().partition(("channels", None))
    assert caught.value.field == "sharding.rules.channels"


def test_sizes_that_do_not_divide_name_the_rule() -> None:
    mesh = jax.make_mesh((1, 5), ("tp", "x"), devices=jax.devices()[:5])
    rules = ShardRules(ffn="x")
    assert tp_size(mesh, rules) == 1
    with pytest.raises(ConfigError, match="does not split over the 5") as caught:
        adopt(weights(), FAMILY.specs(ARCH, 1), mesh, rules, jnp.float32)
    assert caught.value.field == "sharding.rules.ffn"


@pytest.mark.parametrize(("n", "rows"), [(1, 37), (2, 38), (3, 39), (4, 40), (37, 37), (50, 50)])
def test_a_vocabulary_is_padded_to_equal_parts(n: int, rows: int) -> None:
    specs = padded(FAMILY.specs(ARCH, 1), ShardRules(), {"tp": n})
    assert specs["embed"].shape == specs["unembed"].shape == (rows, ARCH.D)
    assert specs["embed"].pad == rows - ARCH.V
    assert specs["layers"] == FAMILY.specs(ARCH, 1)["layers"]
    whole = padded(FAMILY.specs(ARCH, 1), ShardRules(vocab=None), {"tp": n})
    assert whole == FAMILY.specs(ARCH, 1)


def test_a_vocabulary_may_be_the_second_dimension() -> None:
    part = Part(name="head", shape=(8, 5), view=(8, 5))
    spec = ParamSpec(shape=(8, 5), axes=(None, "vocab"), parts=(part,))
    got = padded({"head": spec}, ShardRules(), {"tp": 2})["head"]
    assert (got.shape, got.pad, got.concat) == ((8, 6), 1, 1)
