"""Quantised checkpoints of every format: the matrices they stand for, on one device and several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.hand import Row
from jserve.model.mesh import make_mesh
from jserve.model.quant import Form, QTensor, widened
from jserve.model.shard import ShardRules, partitions
from jserve.model.view import Bucket
from jserve.weights.loader import load
from jserve.weights.quant.gguf import FORMS as GGUF
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.model.driver import Driver
from tests.weights.quant_files import FORMATS as WHOLE, Format, compressed, gptq
from tests.weights.quant_float_files import more
from tests.weights.weights_kit import LLAMA, Model

FORMATS = WHOLE | more(WHOLE["awq"], WHOLE["pack-quantized"])


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
    """A checkpoint in a format. ``wide``: its tensors as they would be without it; ``head``: lm_head has it, too."""

    def __init__(
        self,
        path: Path,
        fmt: Format,
        edit: Any = None,
        base: Any = CONFIG,
        head: bool = False,
        **config: Any,
    ) -> None:
        super().__init__(path, base, np.float32)
        rng, self.wide = np.random.default_rng(1), dict(self.tensors)
        for name, x in self.wide.items():
            if is_matrix(name, x) or (head and "lm_head" in name):
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
        name = "auto-round" if "packing_format" in fmt.config else name
        want.setdefault(name, set()).add(re.sub(r" g\d+", "", fmt.form))
    want["mxfp4"] = {"e2m1"}
    of_gguf = [Form(**form) for form in GGUF.values()]
    want["GGUF"] = {f.kind + " shifts" * f.shifts for f in of_gguf}
    assert forms_in_docs() == want


_WIDENED = jax.jit(widened)


def wide(params: Any) -> Any:
    return jax.tree.map(
        lambda x: _WIDENED(x) if isinstance(x, QTensor) else x,
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stands_for_these_matrices(tmp_path: Path, name: str) -> None:
    check_matrices(Written(tmp_path, FORMATS[name]), FORMATS[name].form, (1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stands_for_these_matrices_on_other_devices(tmp_path: Path, name: str) -> None:
    """On eight, ``down`` has shards of 24 inputs, below most groups, and each kv head lies four times."""
    check_matrices(Written(tmp_path, FORMATS[name]), FORMATS[name].form, (2, 8))


def check_matrices(model: Written, form: str, sizes: tuple[int, ...]) -> None:
    """The parameters on so many devices."""
    for tp in sizes:
        params = loaded(model, tp)
        assert said(params["layers"][0]["gate_up"]) == form
        if tp == 1:
            assert isinstance(params["layers"][0]["down"], QTensor) == (form != "wide")
        want = assemble_all(model.family.specs(model.arch, tp), model.wide.__getitem__, jnp.float32)
        assert_equal(wide(params), want)


LOGITS = ["pack-quantized, zeros", "gptq ordered", "nvfp4"]


@pytest.mark.one_in(4)
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


def test_scales_of_kv_of_autofp8_come_along(tmp_path: Path) -> None:
    fmt = FORMATS["fp8 static"]
    config = CONFIG | {"quantization_config": dict(fmt.config) | {"kv_cache_scheme": "static"}}

    def beside(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.endswith(("k_scale", "v_scale"))]:
            value = np.abs(tensors.pop(name)) + 1
            tensors[name.replace(name[-7:], f"{name[-7]}_proj.output_scale")] = value

    model = Written(tmp_path, fmt, beside, base=config, kv_cache_scheme="static")
    kv = np.asarray(loaded(model, 2)["layers"][1]["kv_scale"])
    stem = "model.layers.1.self_attn."
    want = [float(model.tensors[f"{stem}{x}_proj.output_scale"].item()) for x in "kv"]
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
