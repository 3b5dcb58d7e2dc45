"""Quantised checkpoints of every format: the matrices they stand for, on one device and several."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.model.hand import Row
from jserve.model.quant import Form, QTensor, widened
from jserve.model.shard import ShardRules, make_mesh, partitions
from jserve.model.view import Bucket
from jserve.weights.convert import convert
from jserve.weights.loader import adopted, load
from jserve.weights.quant.gguf import FORMS as GGUF
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.model.driver import Driver
from tests.weights.quant_files import E4M3, FORMATS as WHOLE, Format, compressed, gptq
from tests.weights.quant_float_files import more
from tests.weights.weights_kit import LLAMA, Model

FORMATS = WHOLE | more(WHOLE["awq"])
RULES = ShardRules()
CONFIG = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "head_dim": 16,
    "torch_dtype": "float32",
}
"""Of two and four devices, each gets whole groups of some inputs, and parts of groups of others."""


def is_matrix(name: str, x: np.ndarray) -> bool:
    return x.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "mlp.gate."))


class Written(Model):
    """A checkpoint in a format. ``wide``: its tensors as they would be without it."""

    def __init__(
        self, path: Path, fmt: Format, edit: Any = None, base: Any = CONFIG, **config: Any
    ) -> None:
        super().__init__(path, base, np.float32)
        rng, self.wide = np.random.default_rng(1), dict(self.tensors)
        for name, x in self.wide.items():
            if is_matrix(name, x):
                stem = name.removesuffix(".weight")
                made, self.wide[name] = fmt.pack(rng, *x.shape)
                del self.tensors[name]
                self.tensors |= {f"{stem}.{ending}": t for ending, t in made.items()}
        if edit is not None:
            edit(self.tensors)
        self.config |= {"quantization_config": {**fmt.config, **config}}
        self.write_json("config.json", self.config)
        self.single()


def loaded(
    model: Model, tp: int = 1, asked: str = "auto", options: str = "", dtype: Any = jnp.float32
) -> Any:
    source = resolve(str(model.path))
    scheme = scheme_of(source.config, dtype, asked, options)
    family = quantised(model.family, scheme)
    return load(family, model.arch, source, make_mesh(tp), RULES, dtype, scheme=scheme)


def forms_in_docs() -> dict[str, set[str]]:
    """Format -> the forms that the table of docs/quantisation.md has for it."""
    page = Path(__file__).parents[2] / "docs/quantisation.md"
    rows = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line.count("|") == 5]
    found: dict[str, set[str]] = {}
    name = ""
    for first, _, forms, _ in rows[2:]:
        name = (re.findall("`(.+?)`", first) or [first.strip() or name])[-1]
        found.setdefault(name, set()).update(re.findall("`(.+?)`", forms))
    return found


def test_the_table_of_the_docs_is_what_is_served() -> None:
    want: dict[str, set[str]] = {}
    for fmt in FORMATS.values():
        keys = ("format", "quant_algo", "quant_method")
        name = next(fmt.config[key] for key in keys if key in fmt.config)
        want.setdefault(name, set()).add(re.sub(r" g\d+", "", fmt.form))
    want["mxfp4"] = {"e2m1"}
    of_gguf = [Form(**form) for form in GGUF.values()]
    want["GGUF"] = {f.kind + " shifts" * f.shifts for f in of_gguf}
    assert forms_in_docs() == want


def wide(params: Any) -> Any:
    return jax.tree.map(
        lambda x: widened(x) if isinstance(x, QTensor) else x,
        params,
        is_leaf=lambda x: isinstance(x, QTensor),
    )


def assert_equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), jax.tree_util.keystr(path))


def said(x: Any) -> str:
    """The form of a parameter in words."""
    if not isinstance(x, QTensor):
        return "wide"
    form = x.form
    flags = {
        "zeros": form.zeros,
        "shifts": form.shifts,
        "ordered": form.ordered,
        "static": form.static,
        "bounded": form.bound > 0,
        "rounded": form.rounded and not form.static and not form.bound,
    }
    group = [f"g{form.group}"] if form.group else []
    return " ".join([form.kind, *group, *(name for name, has in flags.items() if has)])


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stands_for_these_matrices(tmp_path: Path, name: str) -> None:
    model = Written(tmp_path, FORMATS[name])
    for tp in (1, 2, 4):
        params = loaded(model, tp)
        assert said(params["layers"][0]["gate_up"]) == FORMATS[name].form
        if tp == 1:
            assert isinstance(params["layers"][0]["down"], QTensor) == (
                FORMATS[name].form != "wide"
            )
        want = assemble_all(model.family.specs(model.arch, tp), model.wide.__getitem__, jnp.float32)
        assert_equal(wide(params), want)


LOGITS = ["awq", "pack-quantized, zeros", "gptq 8 bits, rows", "gptq ordered", "nvfp4"]


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_those_of_the_widened_matrices(tmp_path: Path, name: str) -> None:
    model, bucket = Written(tmp_path, FORMATS[name]), Bucket(D=2, P=24, F=1)
    for tp in (1, 2):
        logits = []
        for asked in ("none", "auto"):
            driver = Driver(model.family, model.arch, model.wide.__getitem__, tp=tp)
            driver.params = loaded(model, tp, asked)
            scheme = scheme_of(model.config, jnp.float32, asked)
            driver.param_specs = partitions(
                quantised(model.family, scheme).specs(model.arch, tp), RULES
            )
            tokens = [int(t) for t in np.random.default_rng(0).integers(0, 64, 20)]
            rows = [Row([1, 2, 3], 0, tokens)]
            logits.append(driver.step(bucket, prefill=rows)[2:22])
        np.testing.assert_allclose(logits[1], logits[0], atol=1e-4 * np.abs(logits[0]).max())


@pytest.mark.parametrize("name", ["awq", "fp8 blocks", "pack 3 bits, dense"])
def test_a_quantised_checkpoint_is_widened_when_asked(tmp_path: Path, name: str) -> None:
    model = Written(tmp_path, FORMATS[name])
    want = assemble_all(model.family.specs(model.arch, 2), model.wide.__getitem__, jnp.float32)
    assert_equal(loaded(model, 2, "none"), want)


def mixed(tmp_path: Path, groups: dict[str, tuple[Format, str]]) -> tuple[Any, Any]:
    """(model, its plain tensors): modules whose name has the key in the format beside it; ``""`` is in all."""
    model = Model(tmp_path, CONFIG, np.float32)
    rng, plain = np.random.default_rng(2), dict(model.tensors)
    for key, x in plain.items():
        if is_matrix(key, x):
            fmt, _ = next(g for part, g in groups.items() if part in key)
            made, plain[key] = fmt.pack(rng, *x.shape)
            del model.tensors[key]
            model.tensors |= {f"{key.removesuffix('.weight')}.{e}": t for e, t in made.items()}
    sections = {
        str(i): fmt.config["config_groups"]["group_0"]
        | {"targets": [target], "format": fmt.config["format"]}
        for i, (fmt, target) in enumerate(groups.values())
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    config |= {"config_groups": sections, "ignore": ["lm_head"]}
    model.write_json("config.json", model.config | {"quantization_config": config})
    return model.single(), plain


def test_one_file_of_several_formats(tmp_path: Path) -> None:
    model, plain = mixed(
        tmp_path,
        {
            "v_proj": (FORMATS["mxfp8"], "re:.*v_proj$"),
            "up_proj": (FORMATS["pack-quantized"], "re:.*up_proj$"),
            "o_proj": (FORMATS["float-quantized"], "re:.*o_proj$"),
            "down_proj": (FORMATS["float static"], "re:.*down_proj$"),
            "": (FORMATS["nvfp4"], "Linear"),
        },
    )
    layer = loaded(model)["layers"][0]
    forms = {name: said(layer[name]) for name in ("qkv", "o", "gate_up", "down")}
    assert forms == {
        "qkv": "e4m3 g16",
        "o": "e4m3 rounded",
        "gate_up": "int8 g16",
        "down": "e4m3 static",
    }
    for tp in (1, 2):
        want = assemble_all(model.family.specs(model.arch, tp), plain.__getitem__, jnp.float32)
        assert_equal(wide(loaded(model, tp)), want)


def test_different_orders_of_one_matrix_are_refused(tmp_path: Path) -> None:
    model = Written(
        tmp_path, FORMATS["gptq ordered"], edited("k_proj.g_idx", lambda x: x[::-1].copy())
    )
    with pytest.raises(ConfigError, match="different orders"):
        loaded(model)
    loaded(model, 1, "none")


def test_devices_that_share_ordered_inputs_get_them_wide(tmp_path: Path) -> None:
    layer = loaded(Written(tmp_path, FORMATS["gptq ordered"]), 2)["layers"][0]
    assert said(layer["down"]) == said(layer["o"]) == "wide"
    assert said(layer["qkv"]) == "int4 g32 ordered"


def test_the_largest_static_scale_of_a_matrix_counts(tmp_path: Path) -> None:
    model = Written(tmp_path, FORMATS["fp8 static"])
    scales = [float(model.tensors[f"model.layers.0.self_attn.{x}_proj.input_scale"]) for x in "qkv"]
    got = np.asarray(loaded(model, 2)["layers"][0]["qkv"].input_scale)
    assert len(set(scales)) > 1
    np.testing.assert_array_equal(got, np.array(scales, np.float32))


def test_modules_with_settings_of_their_own(tmp_path: Path) -> None:
    for i, (name, key) in enumerate([("gptq 4 bits", "dynamic"), ("auto-round gptq", "")]):
        fmt, eight = FORMATS[name], gptq(8, 32, True, 1)
        own: Any = {"dynamic": {"-:.*o_proj$": {}, "+:.*down_proj$": {"bits": 8}}}
        if not key:
            downs = {f"model.layers.{k}.mlp.down_proj": {"bits": 8} for k in range(2)}
            own = {"extra_config": {".*o_proj$": {"bits": 16}} | downs}
        model = Written(tmp_path / str(i), fmt, **own)
        rng = np.random.default_rng(7)
        for tensor in list(model.wide):
            stem = tensor.removesuffix(".weight")
            if tensor.endswith("o_proj.weight"):
                model.tensors[tensor] = model.wide[tensor]
            if tensor.endswith("down_proj.weight"):
                made, model.wide[tensor] = eight.pack(rng, *model.wide[tensor].shape)
                model.tensors |= {f"{stem}.{e}": t for e, t in made.items()}
        params = loaded(model.single())
        layer = params["layers"][1]
        forms = [said(layer[n]) for n in ("qkv", "o", "down")]
        assert forms == ["int4 g32", "wide", "int8 g32"]
        want = assemble_all(model.family.specs(model.arch, 1), model.wide.__getitem__, jnp.float32)
        assert_equal(wide(params), want)


def test_parts_of_different_forms_make_a_form_that_holds_both(tmp_path: Path) -> None:
    fmt = FORMATS["pack-quantized"]
    other = compressed(
        "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}
    )
    groups: Any = dict(fmt.config["config_groups"])
    groups["v"] = other.config["config_groups"]["group_0"] | {"targets": ["re:.*v_proj$"]}
    groups["o"] = groups["v"] | {"targets": ["model.layers.1.self_attn.o_proj"]}
    model = Model(tmp_path, CONFIG, np.float32)
    rng, plain = np.random.default_rng(2), dict(model.tensors)
    for key, x in plain.items():
        if is_matrix(key, x):
            of = other if "v_proj" in key or "1.self_attn.o_proj" in key else fmt
            made, plain[key] = of.pack(rng, *x.shape)
            del model.tensors[key]
            model.tensors |= {f"{key.removesuffix('.weight')}.{e}": t for e, t in made.items()}
    model.write_json(
        "config.json",
        model.config | {"quantization_config": fmt.config | {"config_groups": groups}},
    )
    params = loaded(model.single())
    layers = params["layers"]
    assert (layers[0]["qkv"].form.kind, layers[0]["qkv"].form.group) == ("int8", 16)
    assert [layer["o"].form.kind for layer in layers] == ["int4", "int8"]
    assert_equal(
        wide(params),
        assemble_all(model.family.specs(model.arch, 1), plain.__getitem__, jnp.float32),
    )


def test_ignored_modules_stay_wide_and_take_their_fused_neighbours_along(tmp_path: Path) -> None:
    fmt = FORMATS["pack-quantized"]
    model = Written(tmp_path, fmt, ignore=["lm_head", "re:.*k_proj"])
    keep = {n: x for n, x in model.wide.items() if "k_proj" in n}
    model.tensors = {n: x for n, x in model.tensors.items() if "k_proj" not in n} | keep
    params = loaded(model.single())
    assert not isinstance(params["layers"][0]["qkv"], QTensor)
    assert isinstance(params["layers"][0]["o"], QTensor)
    want = assemble_all(model.family.specs(model.arch, 1), model.wide.__getitem__, jnp.float32)
    assert_equal(wide(params), want)


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


@pytest.mark.parametrize("name", ["awq", "float-quantized"])
def test_convert_keeps_the_form(tmp_path: Path, name: str) -> None:
    model = Written(tmp_path / "m", FORMATS[name])
    source = convert(str(model.path), tmp_path / "out")
    scheme = scheme_of(source.config, jnp.float32)
    family = quantised(model.family, scheme)
    for tp in (1, 2):
        how = (source, make_mesh(tp), RULES, jnp.float32)
        restored = load(family, model.arch, *how, scheme=scheme)
        assert_equal(wide(restored), wide(loaded(model, tp)))


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


def test_scales_of_kv_of_modelopt_come_along(tmp_path: Path) -> None:
    fmt = FORMATS["modelopt fp8"]
    config = CONFIG | {"quantization_config": dict(fmt.config) | {"kv_cache_quant_algo": "FP8"}}

    def beside(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.endswith(("k_scale", "v_scale"))]:
            kind = name[-7]
            value = np.abs(tensors.pop(name)) + 1
            tensors[name.replace(f"{kind}_scale", f"{kind}_proj.{kind}_scale")] = value

    model = Written(tmp_path, fmt, beside, base=config, kv_cache_quant_algo="FP8")
    kv = np.asarray(loaded(model)["layers"][1]["kv_scale"])
    stem = "model.layers.1.self_attn."
    want = [float(model.tensors[f"{stem}{x}_proj.{x}_scale"].item()) for x in "kv"]
    np.testing.assert_array_equal(kv, np.array([want] * len(kv), np.float32))


def test_scales_of_kv_come_along(tmp_path: Path) -> None:
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    fmt = FORMATS["float-quantized"]
    config = CONFIG | {"quantization_config": fmt.config | {"kv_cache_scheme": kv}}
    model = Written(tmp_path, fmt, base=config, kv_cache_scheme=kv)
    for name in [n for n in model.tensors if n.endswith(("k_scale", "v_scale"))]:
        model.tensors[name] = model.wide[name] = np.abs(model.tensors[name]) + 1
    params = loaded(model.single())
    assert isinstance(params["layers"][0]["qkv"], QTensor)
    want = assemble_all(model.family.specs(model.arch, 1), model.wide.__getitem__, jnp.float32)
    assert_equal(wide(params), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("asked", ON_LOAD)
def test_what_is_not_finite_is_not_rounded_away(tmp_path: Path, asked: str, bad: float) -> None:
    """One value among all, where a sample does not look, and with the scan off."""
    model = Model(tmp_path, CONFIG, np.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    model.tensors[name][3, 5] = bad
    with pytest.raises(WeightsError, match=r"up_proj\.weight: has values that are not finite"):
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


def test_matrices_that_are_widened_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(Written(tmp_path, FORMATS["awq"]), 1, "none")
    assert "14 quantised matrices are served in float32, model.layers.0" in caplog.text


def edited(ending: str, change: Any) -> Any:
    """Changes the first tensor of that ending."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        name = next(n for n in tensors if n.endswith(ending))
        made = change(tensors[name].copy())
        tensors.pop(name)
        if made is not None:
            tensors[name] = made

    return edit


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
    "blocks": ("fp8 blocks", edited("scale_inv", lambda x: x[:-1]), "shape"),
    "shape of its own": ("pack-quantized", edited("weight_shape", with_first(63)), "weight_packed"),
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


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


CT = FORMATS["pack-quantized"].config
INT4 = CT["config_groups"]["group_0"]["weights"]
GPTQ, NVFP4 = gptq(4, 32, True, 1).config, FORMATS["nvfp4"].config
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
    "sparse": (CT | {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
    "bits": (CT | group(**INT4 | {"num_bits": 9}), "config_groups.g.weights.num_bits"),
    "order": (CT | group(**INT4 | {"actorder": "random"}), "config_groups.g.weights.actorder"),
    "slow pattern": (CT | {"ignore": ["re:(a+)+$"]}, "ignore"),
    "no pattern": (CT | {"ignore": ["re:("]}, "ignore"),
    "long pattern": (CT | {"ignore": ["re:" + "a" * 300]}, "ignore"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_is_not_served_is_refused_by_name(case: str) -> None:
    config, key = SETTINGS[case]
    with pytest.raises(ConfigError) as caught:
        scheme_of({"quantization_config": config}, jnp.float32)
    assert caught.value.field == f"quantization_config.{key}"


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


BESIDE: dict[str, tuple[str, Any]] = {
    "hf_quant_config.json": (
        "modelopt fp8",
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ),
    "quantize_config.json": ("gptq 4 bits", GPTQ),
    "quant_config.json": (
        "awq",
        {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
    ),
}


@pytest.mark.parametrize("file", BESIDE)
def test_a_config_of_its_own_file_is_read(tmp_path: Path, file: str) -> None:
    name, given = BESIDE[file]
    model = Written(tmp_path, FORMATS[name])
    del model.config["quantization_config"]
    model.write_json("config.json", model.config)
    model.write_json(file, given)
    assert said(loaded(model)["layers"][0]["gate_up"]) == FORMATS[name].form


def test_a_file_that_contradicts_its_config_is_refused_with_both_names(tmp_path: Path) -> None:
    model = Written(tmp_path / "a", FORMATS["awq"])
    del model.config["quantization_config"]
    model.write_json("config.json", model.config)
    with pytest.raises(WeightsError, match=r"proj\.weight: missing \(there is qweight, qzeros"):
        loaded(model)
    model = Model(tmp_path / "b", CONFIG, np.float32).single()
    config = model.config | {"quantization_config": dict(FORMATS["awq"].config)}
    model.write_json("config.json", config)
    with pytest.raises(WeightsError, match=r"qweight: missing \(there is weight\)"):
        loaded(model)


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    with pytest.raises(ConfigError, match="already"):
        scheme_of({"quantization_config": dict(CT)}, jnp.float32, "int8")
