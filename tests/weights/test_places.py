"""Where the weights of a sharding lie: as flax's rules of logical axes say, or a key of the sharding is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax.linen.spmd import logical_to_mesh_axes
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jserve import explain_sharding
from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.mesh import mesh_of, n_parts
from jserve.model.param_spec import is_spec
from jserve.model.shard import ShardRules
from jserve.sharding import LOGICAL, LOGITS, RESIDUAL, SUMS, Sharding
from jserve.sizing.models import source_of
from jserve.weights.loader import load

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 34,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [],
}
AXES = ("x", "y", "z")
PATHS = ("layers/.*/down", "layers/0/qkv", ".*embed", "layers/0/nothing")
FOLLOWS = {"ffn_expert": "ffn"}


@st.composite
def specs(draw: Any, modes: tuple[str, ...] = ("manual", "auto")) -> dict[str, Any]:
    """Mostly what can be honoured: sizes that often divide, all axes used by some rule."""
    mesh: dict[str, int] = {}
    for axis in AXES[: draw(st.integers(1, 3))]:
        rest = 8 // int(n_parts(tuple(mesh), mesh))
        mesh[axis] = draw(st.sampled_from([n for n in (1, 2, 2, 2, 3, 4) if n <= rest]))
    one = st.sampled_from(sorted(mesh))
    axes = st.one_of(st.none(), one, one, st.lists(one, unique=True, max_size=3))
    names = draw(st.permutations(LOGICAL))[: draw(st.integers(1, 5))]
    rules = {name: draw(axes) for name in names}
    used = {
        axis
        for found in rules.values()
        for axis in ([found] if isinstance(found, str) else found or ())
    }
    rules["kv_heads"] = [*({*mesh} - used), *([] if draw(st.booleans()) else used)]
    mode = draw(st.sampled_from(modes))
    spec: dict[str, Any] = {"mesh": mesh, "mode": mode, "rules": rules}
    if mode == "auto" and draw(st.booleans()):
        entries = st.lists(axes, min_size=2, max_size=4)
        spec["params"] = {draw(st.sampled_from(PATHS)): draw(entries)}
    for key, known in (("sums", SUMS), ("logits", LOGITS), ("residual", RESIDUAL)):
        if mode == "manual" and draw(st.booleans()):
            spec[key] = draw(st.sampled_from(known))
    return spec


def by_flax(axes: tuple[Any, ...], path: str, sharding: Sharding) -> tuple[Any, ...]:
    """The mesh axes of each dimension of a weight with these logical axes."""
    for pattern, each in sharding.params:
        if re.fullmatch(pattern, path):
            return each
    stated = dict(sharding.rules or ())
    rules = []
    for name, found in stated.items():
        rules.append((name, found))
        rules += [(x, found) for x, of in FOLLOWS.items() if of == name and x not in stated]
    found = logical_to_mesh_axes(axes, [(name, each or None) for name, each in rules])
    return tuple(found or ())


def model(tmp_path: Path, config: Mapping[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def placed(config: Mapping[str, Any], path: Path, sharding: Sharding) -> tuple[Any, Any, Any]:
    """(weights, their specs on one device, mesh), loaded as an engine loads them."""
    mesh = mesh_of(sharding)
    rules, family = ShardRules.of_sharding(sharding, mesh.shape), family_for(config)
    arch = family.arch(config)
    params = load(family, arch, source_of(str(path)), mesh, rules, jnp.float32)
    return params, family.specs(arch, 1), mesh


def tried(door: Callable[[], Any]) -> tuple[Any, ConfigError | None]:
    """What ``door`` gives, or how it refuses; anything else that it raises is a failure."""
    try:
        return door(), None
    except ConfigError as error:
        return None, error


@pytest.mark.slow
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("mode", ["manual", "auto"])
def test_weights_lie_as_flax_says_or_a_key_is_refused(
    config: dict[str, Any], mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, seen = model(tmp_path_factory.mktemp("model"), config), {"honoured": 0, "refused": 0}

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(specs((mode,)))
    def check(spec: dict[str, Any]) -> None:
        found, error = tried(lambda: placed(config, path, Sharding.of(spec)))
        if error is not None:
            assert (error.field or "").startswith("sharding."), error
            assert (error.field or "") in error.message
            seen["refused"] += 1
            return
        (params, plain, mesh), sharding = found, Sharding.of(spec)
        seen["honoured"] += 1
        laid = jax.tree_util.tree_leaves_with_path(params)
        for (at, array), one in zip(laid, jax.tree.leaves(plain, is_leaf=is_spec), strict=True):
            name = jax.tree_util.keystr(at, simple=True, separator="/")
            want = NamedSharding(mesh, PartitionSpec(*by_flax(one.axes, name, sharding)))
            assert array.sharding.is_equivalent_to(want, array.ndim), (name, array.sharding, want)

    check()
    assert min(seen.values()) >= 10, seen


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("mode", "n"), [("manual", 40), ("auto", 8)])
def test_steps_of_any_sharding_are_traced_or_a_key_is_refused(
    config: dict[str, Any], mode: str, n: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Mode auto: compiled, too."""
    path, honoured = model(tmp_path_factory.mktemp("model"), config), []

    @settings(max_examples=n, deadline=None, derandomize=True, database=None)
    @given(specs((mode,)))
    def check(spec: dict[str, Any]) -> None:
        explained, error = tried(lambda: explain_sharding(str(path), spec))
        if error is not None:
            assert (error.field or "").startswith("sharding."), error
            return
        assert all(program.collectives is not None for program in explained.programs)
        honoured.append(spec)

    check()
    assert len(honoured) >= n // 8


CONTESTED = {"mesh": {"x": 2, "y": 2}, "mode": "auto"}


@pytest.mark.parametrize(
    ("rules", "embed", "gate_up", "down"),
    [
        ({"vocab": "x", "embed": "x", "ffn": "y"}, ("x", None), (None, "y", "x"), ("x", "y")),
        (
            {"ffn": ["x", "y"], "embed": "x"},
            (None, "x"),
            (None, ("x", "y"), None),
            (None, ("x", "y")),
        ),
        ({"embed": "y", "vocab": "x", "kv_heads": "y"}, ("x", "y"), (None, None, "y"), ("y", None)),
    ],
)
def test_of_two_rules_for_one_mesh_axis_the_earlier_one_has_it(
    rules: dict[str, Any], embed: Any, gate_up: Any, down: Any, tmp_path: Path
) -> None:
    sharding = Sharding.of({**CONTESTED, "rules": rules})
    params, *_ = placed(DENSE, model(tmp_path, DENSE), sharding)
    layer = params["layers"][0]
    found = (params["embed"], layer["gate_up"], layer["down"])
    assert [tuple(x.sharding.spec) for x in found] == [embed, gate_up, down]


def test_the_order_of_rules_is_part_of_a_layouts_name_where_it_counts() -> None:
    """And nowhere else: equal layouts are equal engines."""

    def name(**rules: Any) -> str:
        sharding = Sharding.of({**CONTESTED, "rules": rules})
        return ShardRules.of_sharding(sharding, {"x": 2, "y": 2}).described({"x": 2, "y": 2})

    assert name(vocab="x", embed="x", ffn="y") != name(embed="x", vocab="x", ffn="y")
    assert name(vocab="x", embed="y", ffn="x") == name(ffn="x", embed="y", vocab="x")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({**CONTESTED, "rules": {"embed": "x", "vocab": "x", "ffn": "y"}}, "rules.vocab"),
        ({**CONTESTED, "rules": {"embed": "x", "ffn": ["x", "y"]}}, "rules.ffn"),
        ({"mesh": {"x": 2}, "rules": {"ffn": "x", "experts": "x"}}, "rules.experts"),
        ({"mesh": {"x": 3}, "rules": {"ffn": "x"}}, "rules.ffn"),
        ({"mesh": {"x": 3}, "rules": {"kv_heads": "x"}}, "rules.kv_heads"),
        ({"mesh": {"tp": 5}}, "rules.kv_heads"),
        (
            {"mesh": {"x": 2}, "mode": "auto", "params": {"embed": [["x"], []], ".*norm": ["x"]}},
            None,
        ),
        (
            {"mesh": {"x": 5}, "mode": "auto", "params": {"embed": [None, "x"]}},
            "params.embed",
        ),
    ],
)
def test_what_this_model_cannot_honour_is_refused_by_its_key(
    spec: dict[str, Any], field: str | None, tmp_path: Path
) -> None:
    path = model(tmp_path, DENSE)
    if field is None:
        placed(DENSE, path, Sharding.of(spec))
        return
    for door in (
        lambda: placed(DENSE, path, Sharding.of(spec)),
        lambda: explain_sharding(str(path), spec),
    ):
        with pytest.raises(ConfigError) as caught:
            door()
        assert caught.value.field == f"sharding.{field}"


@pytest.mark.parametrize(
    ("rules", "sizes", "field"),
    [
        ({"experts": "x"}, {"x": 4}, "rules.experts"),
        ({"ffn_expert": "x"}, {"x": 5}, "rules.ffn_expert"),
    ],
)
def test_experts_that_do_not_divide_are_refused_by_their_rule(
    rules: dict[str, Any], sizes: dict[str, int], field: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        explain_sharding(str(model(tmp_path, EXPERTS)), {"mesh": sizes, "rules": rules})
    assert caught.value.field == f"sharding.{field}"
