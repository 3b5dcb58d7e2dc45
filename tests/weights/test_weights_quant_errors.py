"""Quantised checkpoints that are broken, or ask for what is not read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.config import EngineConfig, ModelOptions
from jserve.errors import ConfigError, WeightsError
from jserve.model.mesh import make_mesh
from jserve.weights.convert import convert
from jserve.weights.loader import adopted, load
from jserve.weights.quant.on_load import KINDS
from jserve.weights.quant.scheme import FORMATS as FORMAT_NAMES, quantised, scheme_of
from jserve.weights.quant.values import check_patterns, matches, ways
from tests.weights.quant_files import E4M3, gptq
from tests.weights.test_weights_quant import (
    CONFIG,
    FORMATS,
    RULES,
    Written,
    assert_equal,
    edited,
    loaded,
)
from tests.weights.weights_kit import Model


def test_different_orders_of_one_matrix_are_refused(tmp_path: Path) -> None:
    model = Written(
        tmp_path, FORMATS["gptq ordered"], edited("k_proj.g_idx", lambda x: x[::-1].copy())
    )
    with pytest.raises(ConfigError, match="different orders"):
        loaded(model)
    loaded(model, 1, "none")


def test_devices_that_cut_stored_groups_are_refused(tmp_path: Path) -> None:
    model = Written(tmp_path / "m", FORMATS["awq"])
    source = convert(str(model.path), tmp_path / "out")
    scheme = scheme_of(source.config, jnp.float32)
    how = (source, make_mesh(4), RULES, jnp.float32)
    with pytest.raises(ConfigError, match="cuts groups of 32"):
        load(quantised(model.family, scheme), model.arch, *how, scheme=scheme)


def test_params_beside_a_quantised_checkpoint_are_refused(tmp_path: Path) -> None:
    model = Written(tmp_path / "m", FORMATS["awq"])
    scheme = scheme_of(model.config, jnp.float32)
    how = (make_mesh(1), RULES, jnp.float32)
    with pytest.raises(ConfigError) as caught:
        adopted(quantised(model.family, scheme), model.arch, {}, *how)
    assert caught.value.field == "quantization"


def with_first(value: Any) -> Any:
    def change(x: np.ndarray) -> np.ndarray:
        x.reshape(-1)[0] = value
        return x

    return change


def state(**changes: Any) -> Any:
    def change(text: np.ndarray) -> np.ndarray:
        given = json.loads(text.tobytes()) | changes
        return np.frombuffer(json.dumps(given).encode(), np.uint8)

    return change


def beside(ending: str, make: Any) -> Any:
    """Gives every quantised matrix [N, D] a tensor more, ``make(N, D)``."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            stem, _, found = name.rpartition(".")
            x = tensors[name]
            shapes = {
                "weight_packed": lambda x=x: (x.shape[0], x.shape[1] * 8),
                "qweight": lambda x=x: (x.shape[1] * 8, x.shape[0]),
                "weight": lambda x=x: x.shape,
            }
            if found in shapes and (found != "weight" or f"{stem}.weight_scale" in tensors):
                tensors[f"{stem}.{ending}"] = make(*shapes[found]())

    return edit


def zeros4(value: int) -> Any:
    """Zeros of int4 in groups of 32, packed along N."""
    word = sum(value << 4 * i for i in range(8))
    return lambda N, D: np.full((N // 8, D // 32), word, np.uint32).view(np.int32)


def zeros8(value: int) -> Any:
    """Zeros of rows."""
    return lambda N, D: np.full((N, 1), value, np.int8)


ZEROS4, ZEROS6, ZEROS8 = (
    "pack-quantized, zeros",
    "pack 6 bits, dense, zeros",
    "int-quantized, zeros",
)


NAN8 = np.array([0x7F], np.uint8).view(E4M3)[0]


FILES: dict[str, tuple[str, Any, str]] = {
    "no scales": ("awq", edited("scales", lambda x: None), "missing"),
    "short zeros": ("awq", edited("qzeros", lambda x: x[:, :-1]), "shape"),
    "wrong type": ("awq", edited("qweight", lambda x: x.astype(np.int64)), "dtype"),
    "another order": ("gptq 4 bits", edited("g_idx", lambda x: x[::-1].copy()), "order"),
    "groups beyond": ("gptq ordered", edited("g_idx", with_first(99)), "names groups beyond"),
    "groups below": ("gptq ordered", edited("g_idx", with_first(-1)), "names groups beyond"),
    "uneven groups": ("gptq ordered", edited("g_idx", lambda x: np.sort(x) * 0), "more or less"),
    "no scale of inputs": ("fp8 static", edited("input_scale", lambda x: None), "missing"),
    "negative inputs": ("fp8 static", edited("input_scale", with_first(-1.0)), "positive"),
    "another bound": ("fbgemm", edited("input_scale_ub", with_first(7.0)), "activation_scale_ub"),
    "NaN power": ("mxfp4", edited("weight_scale", with_first(255)), "finite"),
    "global scale of zero": ("nvfp4", edited("global_scale", with_first(0.0)), "positive"),
    "half a matrix": ("modelopt nvfp4", edited("proj.weight", lambda x: x[:, :-1]), "groups"),
    "state of no object": ("nf4", edited("__nf4", lambda x: x[:-1].copy()), "JSON"),
    "long state": ("nf4", edited("__nf4", lambda x: np.zeros(5000, np.uint8)), "short"),
    "state of blocks": ("nf4", edited("__nf4", state(blocksize=40)), "divide"),
    "state of sizes": ("nf4", edited("__nf4", state(shape=[1 << 40, 1 << 40])), "blocks"),
    "state of text": ("nf4", edited("__nf4", state(shape="ab")), "size"),
    "another state": ("nf4", edited("__nf4", state(shape=[64, 32])), "shape"),
    "layout of columns": ("bitsandbytes int8", edited("weight_format", with_first(2)), "layout"),
    "zeros of no version": ("gptq 4 bits", edited("qzeros", with_first(0)), "symmetric"),
    "scale of zero": ("float-quantized", edited("weight_scale", with_first(0.0)), "positive"),
    "scale not finite": ("int-quantized", edited("weight_scale", with_first(np.inf)), "finite"),
    "NaN": ("fp8", edited("proj.weight", with_first(NAN8)), "NaN"),
    "NaN of compressed-tensors": ("float blocks", edited("proj.weight", with_first(NAN8)), "NaN"),
    "NaN of modelopt": ("modelopt fp8", edited("proj.weight", with_first(NAN8)), "NaN"),
    "NaN of mxfp8": ("mxfp8", edited("proj.weight", with_first(NAN8)), "NaN"),
    "NaN scale of nvfp4": ("nvfp4", edited("weight_scale", with_first(NAN8)), "finite"),
    "blocks": ("fp8 blocks", edited("scale_inv", lambda x: x[:-1]), "shape"),
    "shape of its own": ("pack-quantized", edited("weight_shape", with_first(63)), "weight_packed"),
    "gptq, scale of zero": ("gptq 4 bits", edited("scales", with_first(0.0)), "positive"),
    "gptq, negative scale": ("gptq 4 bits", edited("scales", with_first(-0.1)), "positive"),
    "gptq, scale not finite": ("gptq ordered", edited("scales", with_first(np.inf)), "finite"),
    "awq, scale of zero": ("awq", edited("scales", with_first(0.0)), "positive"),
    "awq, negative scale": ("awq without zeros", edited("scales", with_first(-0.1)), "positive"),
    "awq, scale not finite": ("awq", edited("scales", with_first(np.nan)), "finite"),
    "auto-round, no scale": ("auto-round gptq", edited("scales", with_first(0.0)), "not zero"),
    "auto-round, NaN": ("auto-round awq", edited("scales", with_first(np.nan)), "finite"),
    "negative block": ("nf4", edited("absmax", with_first(-1.0)), "not negative"),
    "block not finite": ("nf4", edited("absmax", with_first(np.inf)), "finite"),
    "short zeros, packed": (ZEROS4, edited("zero_point", lambda x: x[:-1]), "shape"),
    "long zeros, packed": (ZEROS4, edited("zero_point", lambda x: np.vstack([x, x])), "shape"),
    "short zeros, dense": (ZEROS6, edited("zero_point", lambda x: x[:-1]), "shape"),
    "long zeros, dense": (ZEROS6, edited("zero_point", lambda x: np.vstack([x, x])), "shape"),
    "short zeros, int8": (ZEROS8, edited("zero_point", lambda x: x[:-1]), "shape"),
    "long zeros, int8": (ZEROS8, edited("zero_point", lambda x: np.vstack([x, x])), "shape"),
    "zeros of one, int8": (ZEROS8, edited("zero_point", lambda x: x[:1, 0]), "shape"),
    "zeros beside symmetric": (
        "int-quantized",
        beside("weight_zero_point", zeros8(3)),
        r"weight_zero_point: has zeros .* symmetric",
    ),
    "zeros beside symmetric, packed": (
        "pack-quantized",
        beside("weight_zero_point", zeros4(9)),
        r"weight_zero_point: has zeros .* symmetric",
    ),
    "zeros beside symmetric, of a float": (
        "float-quantized",
        beside("weight_zero_point", zeros8(1)),
        r"weight_zero_point: has zeros .* symmetric",
    ),
    "order beside none": (
        "pack-quantized",
        beside("weight_g_idx", lambda N, D: (np.arange(D) // 32)[::-1].astype(np.int32)),
        r"weight_g_idx: has inputs .* no actorder group",
    ),
    "short order beside none": (
        "pack-quantized",
        beside("weight_g_idx", lambda N, D: np.zeros(D - 1, np.int32)),
        "shape",
    ),
    "zeros beside none, awq": (
        "awq without zeros",
        beside("qzeros", lambda N, D: np.full((D // 32, N // 8), 0x79999999, np.int32)),
        "qzeros: has zeros beside 8, .* zero_point false",
    ),
    "short order": ("pack ordered", edited("weight_g_idx", lambda x: x[:-1]), "shape"),
    "no order": ("pack ordered", edited("weight_g_idx", lambda x: None), "weight_g_idx: missing"),
    "short order, gptq": ("gptq ordered", edited("g_idx", lambda x: x[:-1]), "shape"),
    "no order, gptq": ("gptq ordered", edited("g_idx", lambda x: None), "g_idx: missing"),
    "not quantised": (
        "int-quantized",
        edited("proj.weight", lambda x: x.astype(np.float32)),
        "dtype",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    name, edit, says = FILES[case]
    model = Written(tmp_path, FORMATS[name], edit)
    with pytest.raises(WeightsError, match=says) as caught:
        loaded(model)
    assert "model.safetensors:model.layers.0" in str(caught.value.field)
    assert "\n" not in caught.value.message


HARMLESS: dict[str, tuple[str, Any]] = {
    "zeros of 0": ("int-quantized", beside("weight_zero_point", zeros8(0))),
    "zeros of the middle": ("pack-quantized", beside("weight_zero_point", zeros4(8))),
    "zeros of 0, of a float": ("float-quantized", beside("weight_zero_point", zeros8(0))),
    "zeros of 8": (
        "awq without zeros",
        beside("qzeros", lambda N, D: np.full((D // 32, N // 8), 0x88888888 - 2**32, np.int32)),
    ),
    "an order as it is": (
        "pack-quantized",
        beside("weight_g_idx", lambda N, D: (np.arange(D) // 32).astype(np.int32)),
    ),
    "an order of rows": (
        "int-quantized",
        beside("weight_g_idx", lambda N, D: np.zeros(D, np.int32)),
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_tensors_that_say_what_the_config_says_change_nothing(tmp_path: Path, case: str) -> None:
    name, edit = HARMLESS[case]
    got, want = (
        loaded(Written(tmp_path / str(i), FORMATS[name], e)) for i, e in enumerate([edit, None])
    )
    assert_equal(got, want)


@pytest.mark.parametrize("name", ["awq", "gptq 4 bits", "gptq ordered, zeros", "auto-round gptq"])
def test_a_group_that_does_not_divide_the_inputs_is_refused(tmp_path: Path, name: str) -> None:
    model = Written(tmp_path, FORMATS[name], group_size=40)
    with pytest.raises(WeightsError, match=r"qweight: shape .*, groups of 40"):
        loaded(model)


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


CT = FORMATS["pack-quantized"].config


INT4 = CT["config_groups"]["group_0"]["weights"]


GPTQ, NVFP4 = gptq(4, 32, True, 1).config, FORMATS["nvfp4"].config


AWQ = FORMATS["awq"].config


STATIC = FORMATS["float static"].config


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "hqq"}, "quant_method"),
    "no method": ({}, "quant_method"),
    "awq bits": ({"quant_method": "awq", "bits": 8}, "bits"),
    "awq version": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
    "gptq group": (GPTQ | {"group_size": 0}, "group_size"),
    "gptq rule": (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 5}}}, "bits"),
    "gptq pattern": (GPTQ | {"dynamic": {"-:(a+)+": {}}}, "dynamic.-:(a+)+"),
    "fp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [8, 8]},
        "activation_scheme",
    ),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [8]}, "weight_block_size"),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 0}, "activation_scale_ub"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo"),
    "modelopt names": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*" * 9]},
        "exclude_modules",
    ),
    "both bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True},
        "load_in_4bit",
    ),
    "storage": (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_storage": "bfloat16",
        },
        "bnb_4bit_quant_storage",
    ),
    "auto-round": ({"quant_method": "auto-round", "packing_format": "x"}, "packing_format"),
    "auto-round of modules": (
        dict(FORMATS["auto-round awq"].config) | {"extra_config": {"a.b": {"bits": 2}}},
        "extra_config.a.b",
    ),
    "format": (CT | {"format": "marlin-24"}, "format"),
    "nvfp4 group": (
        NVFP4 | group(num_bits=4, type="float", strategy="tensor_group", group_size=32),
        "config_groups.g.weights.group_size",
    ),
    "asymmetric inputs": (
        STATIC
        | {
            "config_groups": {
                "g": STATIC["config_groups"]["group_0"]
                | {"input_activations": {"num_bits": 8, "type": "float", "symmetric": False}}
            }
        },
        "config_groups.g.input_activations.symmetric",
    ),
    "sparse": (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
    "sparse of no format": (CT | {"sparsity_config": {"targets": []}}, "sparsity_config.format"),
    "sparse of no object": (CT | {"sparsity_config": "dense"}, "sparsity_config"),
    "gptq format": (GPTQ | {"format": "marlin", "checkpoint_format": None}, "format"),
    "gptq formats": (GPTQ | {"format": "gptq_v2"}, "format"),
    "gptq for marlin": (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
    "gptq words": (GPTQ | {"pack_dtype": "int8"}, "pack_dtype"),
    "awq of llm-awq": (AWQ | {"backend": "llm-awq"}, "backend"),
    "awq format": (AWQ | {"format": "gemv"}, "format"),
    "bits": (CT | group(**INT4 | {"num_bits": 9}), "config_groups.g.weights.num_bits"),
    "order": (CT | group(**INT4 | {"actorder": "random"}), "config_groups.g.weights.actorder"),
    "slow pattern": (CT | {"ignore": ["re:(a+)+$"]}, "ignore"),
    "many repeats": (CT | {"ignore": ["re:.*.*.*.*.*.*x!"]}, "ignore"),
    "many choices": (CT | {"ignore": ["re:" + "(aa|ab)" * 20 + "!"]}, "ignore"),
    "many options": (CT | {"ignore": ["re:" + "a?" * 40 + "!"]}, "ignore"),
    "many patterns": (CT | {"ignore": [f"re:.*{i}.*a.*!" for i in range(9)]}, "ignore"),
    "patterns in many groups": (
        CT
        | {
            "config_groups": {
                str(i): CT["config_groups"]["group_0"] | {"targets": [f"re:.*{i}.*a.*!"]}
                for i in range(9)
            }
        },
        "config_groups",
    ),
    "count beyond all": (CT | {"ignore": ["re:a{99999999999}"]}, "ignore"),
    "repeats of a rule": (GPTQ | {"dynamic": {"-:.*.*.*.*!": {}}}, "dynamic.-:.*.*.*.*!"),
    "repeats of a module": (
        dict(FORMATS["auto-round gptq"].config) | {"extra_config": {".*.*.*.*!": {"bits": 8}}},
        "extra_config..*.*.*.*!",
    ),
    "modules of blocks": (
        GPTQ | {"modules_in_block_to_quantize": "mlp.down_proj"},
        "modules_in_block_to_quantize",
    ),
    "module of blocks": (
        GPTQ | {"modules_in_block_to_quantize": [["mlp.down_proj", 3]]},
        "modules_in_block_to_quantize",
    ),
    "rotations": (CT | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    "no pattern": (CT | {"ignore": ["re:("]}, "ignore"),
    "long pattern": (CT | {"ignore": ["re:" + "a" * 300]}, "ignore"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_is_not_served_is_refused_by_name(case: str) -> None:
    config, key = SETTINGS[case]
    with pytest.raises(ConfigError) as caught:
        scheme_of({"quantization_config": config}, jnp.float32)
    assert caught.value.field == f"quantization_config.{key}"


DENSE = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("pack-quantized", {"sparsity_config": DENSE}),
    "both versions": ("gptq version 2", {"format": "gptq_v2"}),
    "an older version": ("gptq version 2", {"format": "gptq_v2", "checkpoint_format": None}),
    "an older version 1": ("gptq 4 bits", {"format": "gptq", "checkpoint_format": None}),
    "plain words": ("gptq 4 bits", {"is_marlin_format": False, "pack_dtype": "int32"}),
    "backend of awq": ("awq", {"backend": "autoawq"}),
    "any backend of awq": ("awq", {"backend": "auto", "format": "gemm", "version": None}),
    "backend of auto-round": ("auto-round awq", {"backend": "auto_round:awq"}),
}


@pytest.mark.parametrize("case", SAME)
def test_keys_that_say_the_same_change_nothing(case: str) -> None:
    name, more = SAME[case]
    got, want = (
        scheme_of({"quantization_config": {**FORMATS[name].config, **m}}, jnp.float32)
        for m in (more, {})
    )
    assert got == want


CONTRADICTED = {
    "awq": "qweight",
    "pack-quantized": "weight_shape",
    "int-quantized": "weight",
    "float-quantized": "weight",
    "gptq 4 bits": "qweight",
}
"""Format -> the tensor of a matrix that its reader asks for first."""


@pytest.mark.parametrize("name", CONTRADICTED)
def test_a_quantised_file_is_refused_by_a_config_of_none(tmp_path: Path, name: str) -> None:
    model = Written(tmp_path, FORMATS[name])
    del model.config["quantization_config"]
    model.write_json("config.json", model.config)
    says = "dtype" if CONTRADICTED[name] == "weight" else r"missing \(there is .*"
    with pytest.raises(WeightsError, match=rf"proj\.weight: {says}"):
        loaded(model)


@pytest.mark.parametrize("name", CONTRADICTED)
def test_a_plain_file_is_refused_by_the_config_of_a_format(tmp_path: Path, name: str) -> None:
    model, first = Model(tmp_path, CONFIG, np.float32).single(), CONTRADICTED[name]
    config = model.config | {"quantization_config": dict(FORMATS[name].config)}
    model.write_json("config.json", config)
    says = "dtype" if first == "weight" else r"missing \(there is weight\)"
    with pytest.raises(WeightsError, match=rf"proj\.{first}: {says}"):
        loaded(model)


PATTERNS = (
    r".*lm_head",
    r".*self_attn.*",
    r".*\.18\..*gate.*",
    r"model.layers.[0-9]+.mlp.(gate|up|down)_proj$",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r".*layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15)\.mlp\..*",
)


def test_patterns_of_published_checkpoints_are_read() -> None:
    check_patterns([f"re:{pattern}" for pattern in PATTERNS * 10], "ignore")
    assert [ways(p) for p in PATTERNS[:4]] == [64, 64, 64**2, 64 * 3]
    assert matches("model.layers.18.mlp.gate_proj", f"re:{PATTERNS[2]}")
    assert not matches("model.layers.17.mlp.gate_proj", f"re:{PATTERNS[2]}")


NAMED = {
    "awq": "awq",
    "gptq": "gptq 4 bits",
    "bitsandbytes": "nf4",
    "compressed-tensors": "pack-quantized",
    "fbgemm_fp8": "fbgemm",
    "auto-round": "auto-round awq",
    "modelopt": "modelopt nvfp4",
    "fp8": "fp8 static",
}


@pytest.mark.parametrize("asked", [*NAMED, "gguf", "mxfp4"])
def test_a_format_is_asked_for_by_name(asked: str) -> None:
    """Where it is there it serves as it does unasked, elsewhere it is refused."""
    if asked in NAMED:
        config = {"quantization_config": dict(FORMATS[NAMED[asked]].config)}
        assert scheme_of(config, jnp.float32, asked) == scheme_of(config, jnp.float32)
    for other in (n for n in ("awq", "gptq 4 bits") if n != NAMED.get(asked)):
        with pytest.raises(ConfigError, match=f"quantization {asked}: .*already"):
            scheme_of({"quantization_config": dict(FORMATS[other].config)}, jnp.float32, asked)
    if asked != "fp8":
        with pytest.raises(ConfigError, match="is not quantised; on load it can be by fp8") as e:
            scheme_of({}, jnp.float32, asked)
        assert e.value.field == "quantization"


@pytest.mark.parametrize(
    ("given", "name", "there"),
    [
        ("w8a8_fp8", "float-quantized", True),
        ("fp8_per_channel", "fp8 blocks", True),
        ("fp8", "float static", True),
        ("w8a8_int8", "int-quantized", True),
        ("int4", "awq", True),
        ("int8-weight-only", "gptq 8 bits, rows", True),
        ("awq_marlin", "awq", True),
        ("gptq_marlin", "gptq ordered", True),
        ("w8a8_fp8", "float of a matrix", False),
        ("w8a8_fp8", "int-quantized", False),
        ("w8a8_int8", "pack 8 bits", False),
        ("int4", "nvfp4", False),
        ("awq", "gptq 4 bits", False),
    ],
)
def test_names_of_others_mean_what_is_there_or_are_refused(
    given: str, name: str, there: bool
) -> None:
    asked = EngineConfig.of(quantization=given).model.quantization
    config = {"quantization_config": dict(FORMATS[name].config)}
    if there:
        assert scheme_of(config, jnp.float32, asked) == scheme_of(config, jnp.float32)
        with pytest.raises(ConfigError, match="already"):
            scheme_of(config, jnp.float32, asked, '{"method": "mse"}')
    else:
        with pytest.raises(ConfigError, match="already"):
            scheme_of(config, jnp.float32, asked)


def test_the_option_has_the_names_of_all_formats() -> None:
    fields = {f.name: f for f in dataclasses.fields(ModelOptions)}
    choices = set(fields["quantization"].metadata["choices"])
    assert choices == {"auto", "none", *KINDS, *FORMAT_NAMES} - {"intel/auto-round"}
