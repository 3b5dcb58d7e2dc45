"""Checkpoints in 16 and 32 bits that are quantised as they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.model.mesh import make_mesh
from jserve.model.quant import QTensor, widened
from jserve.model.shard import ShardRules
from jserve.weights.convert import convert
from jserve.weights.loader import adopted, load
from jserve.weights.quant.rounding import as_tensor
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.weights.test_weights_moe import respelled
from tests.weights.test_weights_quant import (
    CONFIG,
    FORMATS,
    RULES,
    assert_equal,
    loaded,
)
from tests.weights.test_weights_quant_moe import GPT_OSS, QWEN
from tests.weights.weights_kit import Model

CT = FORMATS["pack-quantized"].config

ON_LOAD = {"fp8": 2.0**-4, "int8": 1 / 254, "int8-weight-only": 1 / 254, "int4": 1 / 14}


"""Most that a weight is off, in parts of the largest of its row or group; of e4m3 in parts of itself."""


@pytest.mark.parametrize("asked", ON_LOAD)
def test_on_load_a_weight_is_the_nearest_that_its_scale_has(tmp_path: Path, asked: str) -> None:
    model = Model(tmp_path, CONFIG, np.float32).single()
    exact = assemble_all(model.family.specs(model.arch, 1), model.tensors.__getitem__, jnp.float32)
    rtn = loaded(model, 1, asked, json.dumps({"method": "rtn"}))
    for name in ("qkv", "o", "gate_up", "down"):
        x, w = rtn["layers"][0][name], np.asarray(exact["layers"][0][name])
        assert isinstance(x, QTensor)
        G = w.shape[-1] // x.scale.shape[-1]
        top = np.abs(w.reshape(*w.shape[:-1], -1, G)).max(-1).repeat(G, axis=-1)
        off = np.abs(np.asarray(widened(x)) - w)
        allowed = np.maximum(np.abs(w), top / 448) if asked == "fp8" else top
        assert (off <= 1.001 * ON_LOAD[asked] * allowed).all(), name
    assert isinstance(rtn["unembed"], jax.Array), "lm_head is ignored unless it is asked for"


@pytest.mark.parametrize("asked", ON_LOAD)
def test_on_load_devices_get_what_one_gets(tmp_path: Path, asked: str) -> None:
    model = Model(tmp_path, CONFIG, np.float32).single()
    one, four = loaded(model, 1, asked), loaded(model, 4, asked)
    for name in ("o", "gate_up", "down"):
        want, got = (widened(params["layers"][0][name]) for params in (one, four))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


LLAMA4 = CONFIG | {
    "architectures": ["Llama4ForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 64,
}
SPELT: dict[str, dict[str, Any]] = {
    "one by one": QWEN,
    "all together": QWEN,
    "alternating columns": GPT_OSS | {"quantization_config": None},
    "halves of columns": LLAMA4,
}


@pytest.mark.parametrize(
    "spelling",
    [n if n == "all together" else pytest.param(n, marks=pytest.mark.slow) for n in SPELT],
)
def test_on_load_experts_are_quantised_however_a_checkpoint_spells_them(
    tmp_path: Path, spelling: str
) -> None:
    """Each as the matrix that it is, and on several devices as on one."""
    model = Model(tmp_path, SPELT[spelling], np.float32)
    model = (respelled(model) if spelling == "all together" else model).single()
    source = resolve(str(model.path))
    exact = load(model.family, model.arch, source, make_mesh(1), RULES, jnp.float32)["layers"][1]
    one, four = (loaded(model, n, "int4")["layers"][1] for n in (1, 4))
    for name in ("expert_gate_up", "expert_down"):
        x = one[name]
        assert isinstance(x, QTensor)
        alone = [widened(as_tensor(w, x.form)) for w in exact[name]]
        np.testing.assert_array_equal(np.asarray(widened(x)), np.stack(alone))
        np.testing.assert_array_equal(np.asarray(widened(four[name])), np.stack(alone))


def test_on_load_experts_may_stay_and_spare_slots_have_copies(tmp_path: Path) -> None:
    model = Model(tmp_path, QWEN, np.float32).single()
    kept = loaded(model, 1, "int8", json.dumps({"ignore": ["re:.*experts"]}))["layers"][1]
    assert isinstance(kept["expert_down"], jax.Array)
    assert isinstance(kept["o"], QTensor)
    scheme = scheme_of(model.config, jnp.float32, "int8")
    family, mesh = quantised(model.family, scheme), make_mesh(1, ep=2)
    rules = ShardRules.of_mesh(mesh.shape, redundant_experts=2)
    how = (resolve(str(model.path)), mesh, rules, jnp.float32)
    spread = load(family, model.arch, *how, scheme=scheme)["layers"][1]["expert_down"]
    whole = loaded(model, 1, "int8")["layers"][1]["expert_down"]
    got, want = np.asarray(widened(spread)), np.asarray(widened(whole))
    assert got.shape[0] == want.shape[0] + 2
    slots = [any(np.array_equal(x, y) for y in want) for x in got]
    assert all(slots)


def test_a_clip_by_squared_error_beats_the_largest_weight(tmp_path: Path) -> None:
    model = Model(tmp_path, CONFIG, np.float32).single()
    errors = []
    for method in ("rtn", "mse"):
        x = loaded(model, 1, "int4", json.dumps({"method": method, "group_size": 64}))
        w = model.tensors["model.layers.0.mlp.down_proj.weight"]
        errors.append(float(np.sum((np.asarray(widened(x["layers"][0]["down"])) - w) ** 2)))
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_given_parameters_are_quantised_as_files_are(tmp_path: Path, asked: str) -> None:
    model = Model(tmp_path, CONFIG, np.float32).single()
    for tp in (1, 2):
        from_file = loaded(model, tp, asked)
        scheme = scheme_of(model.config, jnp.float32, asked)
        family, mesh = quantised(model.family, scheme), make_mesh(tp)
        given = assemble_all(
            model.family.specs(model.arch, 1), model.tensors.__getitem__, jnp.float32
        )
        assert_equal(adopted(family, model.arch, given, mesh, RULES, jnp.float32), from_file)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("asked", ON_LOAD)
def test_what_is_not_finite_is_not_rounded_away(tmp_path: Path, asked: str, bad: float) -> None:
    """One value among all, where a sample does not look, and with the scan off."""
    model = Model(tmp_path, CONFIG, np.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    model.tensors[name][3, 5] = bad
    with pytest.raises(WeightsError, match=r"up_proj\.weight: has (NaN|infinite) values"):
        loaded(model.single(), 1, asked)


def test_an_orbax_directory_is_quantised_on_load(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", CONFIG, np.float32).single()
    source = convert(str(model.path), tmp_path / "out")
    scheme = scheme_of(source.config, jnp.float32, "int4")
    how = (source, make_mesh(2), RULES, jnp.float32)
    got = load(quantised(model.family, scheme), model.arch, *how, scheme=scheme)
    assert_equal(got, loaded(model, 2, "int4"))


def test_dummy_weights_have_the_spread_of_wide_ones(tmp_path: Path) -> None:
    model = Model(tmp_path, CONFIG, np.float32)
    source = resolve(str(model.path), load_format="dummy")
    for asked in ON_LOAD:
        scheme = scheme_of(source.config, jnp.float32, asked)
        family = quantised(model.family, scheme)
        params = load(family, model.arch, source, make_mesh(1), RULES, jnp.float32, scheme=scheme)
        for x in (params["layers"][0][name] for name in ("qkv", "down")):
            assert isinstance(x, QTensor)
            values = np.asarray(widened(x))
            assert 0.01 < values.std() < 0.05, asked
            assert abs(values.mean()) < 0.004


@pytest.mark.parametrize(
    ("asked", "options", "field"),
    [
        ("int9", "", "quantization"),
        ("auto", '{"method": "mse"}', "quantization_config"),
        ("int4", "[]", "quantization_config"),
        ("int4", "{", "quantization_config"),
        ("int4", '{"bits": 4}', "quantization_config"),
        ("int4", '{"group_size": 48}', "quantization_config.group_size"),
        ("int8", '{"group_size": 64}', "quantization_config.group_size"),
        ("int4", '{"method": "best"}', "quantization_config.method"),
        ("int4", '{"ignore": "lm_head"}', "quantization_config.ignore"),
    ],
)
def test_an_option_that_is_not_valid_is_refused_by_name(
    asked: str, options: str, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        scheme_of({}, jnp.float32, asked, options)
    assert caught.value.field == field


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    with pytest.raises(ConfigError, match="already"):
        scheme_of({"quantization_config": dict(CT)}, jnp.float32, "int8")
