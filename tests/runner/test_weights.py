"""Weights from a trainer: copied over the engine's own, from any input, or refused with the old ones intact."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

from jserve.errors import ConfigError, WeightsError
from jserve.model.attention import backend
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import is_spec
from jserve.model.shard import abstract
from jserve.model.step import StepModel
from jserve.model.view import Bucket, StepDims
from jserve.runner import weights
from jserve.runner.programs import n_compiles, starting
from jserve.runner.runner import ModelRunner
from jserve.runner.weights import WeightUpdate, layout_of
from jserve.weights.adapters import AdapterDelta
from jserve.weights.adopt import Match, adopt, in_host_memory, leaves_of
from jserve.weights.dummy import draw_all
from jserve.weights.handed import from_names
from jserve.weights.loader import adopted
from jserve.weights.place import named
from jserve.weights.quant.scheme import quantised, scheme_of
from tests.runner import whole
from tests.runner.harness import ARCH, RULES, Job, Rig, jobs, make_runner, tiny_params
from tests.speculation.device.drafters import drawn

ONE = (Bucket(D=6, P=48, F=4),)
JOB: Job = jobs(1, temperature=0.0)[0]


@pytest.fixture(scope="module", params=[1, 2])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(ONE, tp=request.param)


@pytest.fixture(scope="module")
def want() -> dict[int, list[list[int]]]:
    """What each seed's weights draw, by the whole text run anew."""
    return {seed: [whole.greedy(host(seed), JOB.prompt, JOB.n)] for seed in (0, 1)}


def host(seed: int) -> Any:
    return jax.tree.map(np.asarray, tiny_params(make_mesh(1), seed))


def last_device(x: np.ndarray) -> jax.Array:
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[-1]))


def otherwise_sharded(x: np.ndarray) -> jax.Array:
    """Over four devices along the last dimension."""
    spec = PartitionSpec(*(None,) * (x.ndim - 1), "tp")
    return jax.device_put(x, NamedSharding(make_mesh(4), spec))


INPUTS: dict[str, Any] = {
    "numpy": lambda tree: tree,
    "float64": lambda tree: jax.tree.map(lambda x: x.astype(np.float64), tree),
    "device 0": lambda tree: jax.tree.map(jnp.asarray, tree),
    "another device": lambda tree: jax.tree.map(last_device, tree),
    "sharded otherwise": lambda tree: jax.tree.map(otherwise_sharded, tree),
    "nnx state": lambda tree: nnx.State(
        jax.tree.map(nnx.Param, tree | {"layers": dict(enumerate(tree["layers"]))})
    ),
    "mixed": lambda tree: tree | {"embed": last_device(tree["embed"])},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", INPUTS)
def test_any_input_serves_as_if_started_with_it(
    runner: ModelRunner, want: dict[int, Any], form: str
) -> None:
    for seed in (1, 0):
        given = INPUTS[form](host(seed))
        before = n_compiles()
        runner.update_weights(given)
        assert n_compiles() == before
        for leaf in jax.tree.leaves(given):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        del given
        assert Rig(runner).run([JOB]) == want[seed]


def test_the_engines_own_layout_is_overwritten_in_place(
    runner: ModelRunner, want: dict[int, Any]
) -> None:
    """Arrays that lie as the engine's do are copied on the device, into the buffers it has."""
    runner.update_weights(host(0))
    before = pointers(runner.params)
    given = tiny_params(runner.model.mesh, seed=1)
    runner.update_weights(given)
    assert pointers(runner.params) == before
    assert not set(pointers(given)) & set(before)
    assert Rig(runner).run([JOB]) == want[1]


def pointers(params: Any) -> list[int]:
    leaves = jax.tree.leaves(params)
    return [s.data.unsafe_buffer_pointer() for leaf in leaves for s in leaf.addressable_shards]


def test_a_numpy_array_may_be_changed_afterwards(runner: ModelRunner, want: dict[int, Any]) -> None:
    given = jax.tree.map(np.copy, host(1))
    runner.update_weights(given)
    for leaf in jax.tree.leaves(given):
        leaf[...] = 7
    assert Rig(runner).run([JOB]) == want[1]


def test_a_trainer_may_donate_what_it_handed_over(runner: ModelRunner) -> None:
    """A step of descent with donated parameters before the engine is fed, and one after."""

    def descend(params: Any, rate: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            return sum(jnp.sum(x * x) for x in jax.tree.leaves(params))

        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

    step = jax.jit(descend, donate_argnums=0)
    trained = step(tiny_params(runner.model.mesh, seed=1), jnp.float32(0.1))
    kept = jax.tree.map(np.array, trained)
    runner.update_weights(trained)
    first = Rig(runner).run([JOB])
    assert first == [whole.greedy(kept, JOB.prompt, JOB.n)]
    step(trained, jnp.float32(0.2))
    for leaf in jax.tree.leaves(trained):
        if not leaf.is_deleted():  # whether a sharded leaf is donated depends on the release of jax
            leaf.delete()
    assert Rig(runner, seed=9).run([JOB]) == first
    runner.reset()
    assert Rig(runner).run([JOB]) == first


def without(tree: Any) -> Any:
    return {name: tree[name] for name in tree if name != "final_norm"}


def with_leaf(make: Any) -> Any:
    def change(tree: Any) -> Any:
        layers = [dict(layer) for layer in tree["layers"]]
        layers[1]["down"] = make(layers[1]["down"])
        return tree | {"layers": layers}

    return change


def gone(x: np.ndarray) -> jax.Array:
    array = jnp.asarray(x)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        (without, "final_norm", "missing"),
        (lambda tree: tree | {"head": np.zeros(3)}, "head", "no such parameter"),
        (with_leaf(lambda x: x[:, :-1]), "layers.1.down", "shape"),
        (with_leaf(lambda x: x.astype(np.int32)), "layers.1.down", "dtype int32"),
        (with_leaf(gone), "layers.1.down", "deleted"),
    ],
)
def test_a_wrong_leaf_is_named_and_the_old_weights_serve_on(
    runner: ModelRunner, want: dict[int, Any], change: Any, path: str, says: str
) -> None:
    runner.update_weights(host(0))
    with pytest.raises(WeightsError, match=says) as caught:
        runner.update_weights(change(host(1)))
    assert caught.value.field == f"params.{path}"
    assert path in caught.value.message
    assert Rig(runner).run([JOB]) == want[0]


def test_a_failure_half_way_leaves_the_old_weights(
    runner: ModelRunner, want: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.update_weights(host(0))
    copies: list[str] = []

    def full(match: Match, dtype: Any) -> np.ndarray:
        copies.append(match.name)
        if len(copies) > 5:
            raise MemoryError("no room")
        return in_host_memory(match, dtype)

    monkeypatch.setattr("jserve.runner.weights.in_host_memory", full)
    with pytest.raises(MemoryError):
        runner.update_weights(host(1))
    assert len(copies) == 6
    assert Rig(runner).run([JOB]) == want[0]


def bf16_update(tp: int, V: int) -> tuple[StepModel, WeightUpdate, Any, Any]:
    """(model, its update, its weights of seed 0, a float32 tree on one device)."""
    arch = dataclasses.replace(ARCH, V=V)
    model = StepModel(
        family=LLAMA,
        arch=arch,
        backend=backend("xla"),
        dims=StepDims(C=2, M=2, Z=8, V=V),
        mesh=make_mesh(tp),
        rules=RULES,
        n_pages=3,
        kv_dtype=jnp.float32,
        dtype=jnp.bfloat16,
    )
    canonical = LLAMA.specs(arch, 1)
    trees = [drawn(canonical, make_mesh(1), RULES, seed) for seed in (0, 1)]
    own, given = (jax.tree.map(np.asarray, tree) for tree in trees)
    placed = adopt(own, model.specs(), model.mesh, RULES, model.dtype, canonical=canonical)
    with starting():
        return model, WeightUpdate(model, {}), placed, given


def adapter(arch: Any, scale: float = 0.5) -> tuple[AdapterDelta, dict[str, np.ndarray]]:
    """Factors of some tensors of a layer, one of three that are one parameter among them; the same as dense changes."""
    rng = np.random.default_rng(5)
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (arch.N * arch.H, arch.D),
        "layers.1.self_attn.v_proj.weight": (arch.K * arch.H, arch.D),
        "model.layers.1.mlp.down_proj.weight": (arch.D, arch.F),
    }
    factors = {
        name: (rng.standard_normal((3, n), np.float32), rng.standard_normal((m, 3), np.float32))
        for name, (m, n) in shapes.items()
    }
    dense = {name: scale * b @ a for name, (a, b) in factors.items()}
    return AdapterDelta(factors, scale), dense


@pytest.mark.parametrize(("tp", "V"), [(1, 128), (8, 101)])
def test_an_adapter_is_added_to_the_weights_in_use(tp: int, V: int) -> None:
    """Wherever parts of the tensor lie, repeated kv heads included."""
    model, update, own, _ = bf16_update(tp, V)
    before, leaves = jax.tree.map(np.array, own), jax.tree.leaves(own)
    delta, dense = adapter(model.arch)
    canonical = LLAMA.specs(model.arch, 1)
    parts = {part.name: part.shape for _, spec in named(canonical) for part in spec.parts}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in parts.items()}
    full = {f"model.{n.removeprefix('model.')}": x for n, x in dense.items()}
    change = dict(leaves_of(from_names((zeros | full).items(), canonical)))
    args = (model.specs(), model.mesh, model.rules, jnp.float32)
    tree = jax.tree.unflatten(
        jax.tree.structure(canonical, is_leaf=is_spec), [change[n] for n, _ in named(canonical)]
    )
    placed = jax.tree.map(np.asarray, adopt(tree, *args, canonical=canonical))
    want = jax.tree.map(lambda x, d: (x.astype(np.float32) + d).astype(x.dtype), before, placed)
    compiles = n_compiles()
    new = update(own, delta)
    assert n_compiles() == compiles
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    changed = [
        np.any(np.asarray(a) != b)
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(before), strict=True)
    ]
    assert sum(changed) == 3
    assert sum(a is not b for a, b in zip(jax.tree.leaves(new), leaves, strict=True)) == 3


@pytest.mark.parametrize("form", ["the engine's own", "numpy", "float32", "nnx state"])
@pytest.mark.parametrize(("tp", "V"), [(1, 128), (2, 101)])
def test_a_part_leaves_the_rest_where_it_is(
    tp: int, V: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's arrays are its own afterwards, and what lies as the engine's does is copied on the devices."""
    model, update, own, given = bf16_update(tp, V)
    args = (model.specs(), model.mesh, model.rules)
    canonical = LLAMA.specs(model.arch, 1)
    want = adopt(given, *args, jnp.bfloat16, canonical=canonical)
    made = {
        "the engine's own": want,
        "numpy": jax.tree.map(lambda x: x.astype(jnp.bfloat16), given),
        "float32": adopt(given, *args, jnp.float32, canonical=canonical),
        "nnx state": given,
    }[form]
    some: Any = {"embed": made["embed"], "layers": {1: {"down": made["layers"][1]["down"]}}}
    if isinstance(some["embed"], np.ndarray):
        some = jax.tree.map(np.array, some)
    if form == "nnx state":
        some = nnx.State(jax.tree.map(nnx.Param, some))
    before, theirs = jax.tree.leaves(own), jax.tree.map(np.array, want)
    compiles, through_host = n_compiles(), list[str]()
    monkeypatch.setattr(
        weights, "in_host_memory", lambda *a: through_host.append(a[0].name) or in_host_memory(*a)
    )
    new = update(own, some, some=True)
    assert n_compiles() == compiles
    assert through_host == ([] if form == "the engine's own" else ["embed", "layers.1.down"])
    for leaf in jax.tree.leaves(some):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 7
        elif isinstance(leaf, jax.Array):
            leaf.delete()
    names = [name for name, _ in named(model.specs())]
    for name, old, leaf, other in zip(
        names, before, jax.tree.leaves(new), jax.tree.leaves(theirs), strict=True
    ):
        if name in ("embed", "layers.1.down"):
            assert old.is_deleted()
            assert leaf.sharding.is_equivalent_to(old.sharding, leaf.ndim)
            np.testing.assert_array_equal(np.asarray(leaf), other)
        else:
            assert leaf is old, name


@pytest.mark.parametrize(
    ("factors", "field"),
    [
        ({"model.layers.0.self_attn.q_proj.weight": (np.ones((2, 3)), np.ones((4, 3)))}, "q_proj"),
        ({"model.layers.0.self_attn.q_proj.weight": (np.ones((2, 3)), np.ones((4, 2)))}, "q_proj"),
        ({"model.layers.0.self_attn.x_proj.weight": (np.ones((2, 3)), np.ones((4, 2)))}, "x_proj"),
        ({"model.norm.weight": (np.full((1, 32), np.nan), np.ones((1, 1)))}, "norm"),
    ],
)
def test_factors_that_do_not_fit_change_nothing(factors: Any, field: str) -> None:
    _, update, own, _ = bf16_update(1, 128)
    with pytest.raises(WeightsError) as caught:
        update(own, AdapterDelta(factors))
    assert field in (caught.value.field or "")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(own))


def test_an_adapter_of_peft_is_read(tmp_path: Path) -> None:
    delta, _ = adapter(ARCH)
    tensors = {}
    for name, (a, b) in delta.factors.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "rank_pattern": {}}

    def read(**changed: Any) -> AdapterDelta:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changed))
        return AdapterDelta.from_directory(tmp_path)

    found = read()
    assert found.scale == 2.0
    assert read(use_rslora=True).scale == 4.0
    for name, factors in delta.factors.items():
        for got, want in zip(found.factors[name], factors, strict=True):
            np.testing.assert_array_equal(got, want)
    for changed in (
        {"use_dora": True},
        {"bias": "all"},
        {"r": 0},
        {"modules_to_save": ["lm_head"]},
    ):
        with pytest.raises(ConfigError) as caught:
            read(**changed)
        assert caught.value.field in changed
    del tensors[next(iter(tensors))]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="no factor of two"):
        read()
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError):
        read()


@pytest.mark.parametrize(("tp", "V"), [(1, 128), (2, 101), (8, 101)])
@pytest.mark.parametrize("placed", [False, True])
def test_float32_into_bfloat16(tp: int, V: int, placed: bool) -> None:
    """tp 8 exceeds the 4 kv heads, and 101 tokens divide over no mesh. ``placed``: on the engine's own
    shards, where the cast runs on the device."""
    model, update, own, given = bf16_update(tp, V)
    args = (model.specs(), model.mesh, model.rules)
    want = adopt(given, *args, jnp.bfloat16, canonical=LLAMA.specs(model.arch, 1))
    if placed:
        given = adopt(given, *args, jnp.float32, canonical=LLAMA.specs(model.arch, 1))
    before = n_compiles()
    new = update(own, given)
    assert n_compiles() == before
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.bfloat16
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(own))


def over_two(x: np.ndarray, dtype: Any, devices: int = 0) -> jax.Array:
    """On the engine's two devices, over a mesh of the trainer's own: cut along the last dimension that divides."""
    mesh = jax.make_mesh(
        (2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[devices:][:2]
    )
    cut = next((i for i in reversed(range(x.ndim)) if x.shape[i] % 2 == 0), None)
    spec = PartitionSpec(*("fsdp" if i == cut else None for i in range(x.ndim)))
    return jax.device_put(x.astype(dtype), NamedSharding(mesh, spec))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainers_own_sharding_is_copied_on_the_devices(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the program for the arrays that the engine started with: not by way of host memory, in place, and without a
    compilation. Other arrays take that way, and are right too."""
    model, _, own, given = bf16_update(2, 128)
    trained = jax.tree.map(lambda x: over_two(x, dtype), given)
    with starting():
        update = WeightUpdate(model, {}, trained=layout_of(trained))
    want = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16)), given)
    before, compiled = pointers(own), n_compiles()
    through_host = []
    monkeypatch.setattr(
        weights, "in_host_memory", lambda *a: through_host.append(a[0].name) or in_host_memory(*a)
    )
    own = update(own, trained)
    assert not through_host
    assert pointers(own) == before
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    elsewhere = jax.tree.map(lambda x: over_two(-x, dtype, devices=2), given)
    own = update(own, elsewhere)
    assert len(through_host) == len(jax.tree.leaves(own))
    assert n_compiles() == compiled
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), -b)


def test_layouts_that_no_program_could_read_are_left_alone() -> None:
    """Arrays on other devices, of another shape or of integers; numpy has no layout."""
    model, _, _, given = bf16_update(2, 128)
    [own] = jax.tree.leaves(abstract({"w": model.specs()["embed"]}, model.mesh, RULES, model.dtype))
    fits, elsewhere = (
        layout_of({"w": over_two(np.zeros(own.shape), "float32", n)})["w"] for n in (0, 2)
    )
    assert weights._started(own, fits).sharding == fits.sharding
    smaller = jax.ShapeDtypeStruct((2, 2), fits.dtype, sharding=fits.sharding)
    whole_numbers = jax.ShapeDtypeStruct(own.shape, jnp.int32, sharding=fits.sharding)
    for other in (None, elsewhere, smaller, whole_numbers):
        assert weights._started(own, other) is own
    assert layout_of(given) == {}
    assert layout_of("a directory") == layout_of(None) == {}


def test_programs_need_no_room_beside_the_weights() -> None:
    _, update, own, _ = bf16_update(2, 101)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(own)) // 2
    for _, program in update._programs:
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes <= size // 100
        assert memory.alias_size_in_bytes >= size // 2


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_wide_weights_into_quantised_ones(asked: str) -> None:
    """On two devices; a tree in bfloat16 or float32 becomes what loading it would give, and compiles nothing."""
    model, _, _, given = bf16_update(2, 128)
    scheme = scheme_of({}, jnp.bfloat16, asked)
    family = quantised(LLAMA, scheme)
    model = dataclasses.replace(model, family=family)
    own = adopted(family, model.arch, given, model.mesh, RULES, model.dtype)
    other = jax.tree.map(lambda x: -x, given)
    with starting():
        update = WeightUpdate(model, {})
    want = adopted(family, model.arch, other, model.mesh, RULES, model.dtype)
    before = n_compiles()
    new = update(own, jax.tree.map(lambda x: x.astype(jnp.bfloat16), other))
    assert n_compiles() == before
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_weights_of_a_quantised_checkpoint_are_not_replaced() -> None:
    model, _, _, given = bf16_update(1, 128)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    scheme = scheme_of({"quantization_config": config}, jnp.bfloat16)
    model = dataclasses.replace(model, family=quantised(LLAMA, scheme))
    with pytest.raises(WeightsError, match="in its forms"):
        WeightUpdate(model, {})(None, given)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}


@pytest.mark.parametrize(
    ("asked", "config", "says"),
    [
        ("int8", {}, "an adapter cannot be added to weights that were quantised on load"),
        ("auto", {"quantization_config": AWQ}, "only a tree of matrices in its forms"),
    ],
)
def test_an_adapter_of_quantised_weights_is_refused(asked: str, config: Any, says: str) -> None:
    """Of the sum a matrix in 8 or 4 bits would keep little; nothing changes."""
    model = bf16_update(1, 128)[0]
    family = quantised(LLAMA, scheme_of(config, jnp.bfloat16, asked))
    model = dataclasses.replace(model, family=family)
    specs = family.specs(model.arch, 1)
    own = draw_all(specs, 0, model.mesh, RULES, model.dtype)
    with pytest.raises(WeightsError, match=says) as caught:
        WeightUpdate(model, {})(own, adapter(model.arch)[0])
    assert caught.value.field == "params"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(own))


@pytest.mark.parametrize("asked", ["int8", "auto"])
def test_quantised_weights_replace_those_of_their_form(asked: str) -> None:
    """Those of weights quantised on load and of a checkpoint; as they are, of one device or of two, by programs that
    are there. Another form is refused by its path, and the old weights stay."""
    model, _, _, _ = bf16_update(2, 128)
    config = {"quantization_config": AWQ} if asked == "auto" else {}
    family = quantised(LLAMA, scheme_of(config, jnp.bfloat16, asked))
    model = dataclasses.replace(model, family=family)
    how = (model.mesh, RULES, model.dtype)
    own = draw_all(model.specs(), 1, model.mesh, RULES, model.dtype)
    other = draw_all(model.specs(), 2, model.mesh, RULES, model.dtype)
    with starting():
        update = WeightUpdate(model, {})
    wrong = {**other, "layers": [dict(layer) for layer in other["layers"]]}
    o = wrong["layers"][1]["o"]
    wrong["layers"][1]["o"] = dataclasses.replace(
        o, form=dataclasses.replace(o.form, group=8, zeros=True)
    )
    with pytest.raises(WeightsError, match=r"params\.layers\.1\.o: is in another form: group") as e:
        update(own, wrong)
    assert e.value.field == "params.layers.1.o"
    wrong["layers"][1]["o"] = other["embed"]
    with pytest.raises(WeightsError, match=r"layers\.1\.o: is not quantised, must be int"):
        update(own, wrong)
    host, copies = (
        jax.tree.map(np.asarray, other),
        [jax.tree.map(jnp.copy, own) for _ in range(4)],
    )
    before = n_compiles()
    for source in (other, host, {**host, "layers": dict(enumerate(host["layers"]))}):
        new = update(copies.pop(), source)
        assert jax.tree.structure(new) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(other), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    some = {"layers": {1: {"o": other["layers"][1]["o"]}}}
    mixed = update(copies.pop(), some, some=True)
    assert n_compiles() == before
    for layer, tree in ((1, other), (0, own)):
        want, got = tree["layers"][layer]["o"], mixed["layers"][layer]["o"]
        np.testing.assert_array_equal(np.asarray(got.q), np.asarray(want.q))
    assert adopted(family, model.arch, other, *how)["layers"][0]["o"].form == o.form


def test_quantised_weights_into_wide_ones_are_refused_by_path() -> None:
    model, update, own, _ = bf16_update(1, 128)
    family = quantised(LLAMA, scheme_of({}, jnp.bfloat16, "int8"))
    given = draw_all(family.specs(model.arch, 1), 2, model.mesh, RULES, model.dtype)
    with pytest.raises(WeightsError, match=r"down: is int8, must be not quantised"):
        update(own, given)
