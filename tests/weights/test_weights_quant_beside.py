"""Quantised checkpoints beside what is not: biases, tied and quantised heads, names and files of configs, Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model.mesh import make_mesh
from jserve.model.quant import QTensor
from jserve.weights.convert import convert
from jserve.weights.loader import load
from jserve.weights.quant.scheme import quantised, scheme_of
from tests.model.assembly import assemble_all
from tests.weights.test_weights_quant import (
    CONFIG,
    FORMATS,
    RULES,
    Written,
    assert_equal,
    check_matrices,
    is_matrix,
    loaded,
    said,
    wide,
)

QWEN2 = CONFIG | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": True,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["awq", "gptq ordered", "fp8 blocks", "int-quantized, zeros"])
def test_biases_and_tied_heads_stay_beside_quantised_matrices(tmp_path: Path, name: str) -> None:
    model = Written(tmp_path, FORMATS[name], base=QWEN2)
    assert any(n.endswith("q_proj.bias") for n in model.tensors)
    check_matrices(model, FORMATS[name].form, (1, 4))
    params = loaded(model)
    assert "unembed" not in params
    assert isinstance(params["embed"], jax.Array)


HEADS = {
    "awq": {"lm_head": True},
    "gptq 4 bits, zeros": {"lm_head": True},
    "pack-quantized": {"ignore": []},
    "nvfp4": {"ignore": []},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", HEADS)
def test_a_quantised_head_stays_so(tmp_path: Path, name: str) -> None:
    """Over the vocabulary of several devices, too."""
    model = Written(tmp_path, FORMATS[name], head=True, **HEADS[name])
    assert said(loaded(model)["unembed"]) == FORMATS[name].form
    check_matrices(model, FORMATS[name].form, (1, 4))


def test_the_method_of_auto_round_has_two_names() -> None:
    for name in (n for n in FORMATS if n.startswith("auto-round")):
        given = dict(FORMATS[name].config)
        a, b = (
            scheme_of({"quantization_config": given | {"quant_method": m}}, jnp.float32)
            for m in ("auto-round", "intel/auto-round")
        )
        assert a is not None
        assert b is not None
        assert (a.modules, a.reader) == (b.modules, b.reader)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("name", FORMATS)
def test_convert_keeps_the_form(tmp_path: Path, name: str) -> None:
    """On two devices, too, where these cut no group and share no inputs that are in an order."""
    model = Written(tmp_path / "m", FORMATS[name])
    source = convert(str(model.path), tmp_path / "out")
    scheme = scheme_of(source.config, jnp.float32)
    family = quantised(model.family, scheme)
    for tp in (1, 2):
        how = (source, make_mesh(tp), RULES, jnp.float32)
        form = loaded(model)["layers"][0]["down"]
        whole = not isinstance(form, QTensor) or (
            CONFIG["intermediate_size"] // tp % (form.form.group or 1) == 0
        )
        ordered = isinstance(form, QTensor) and form.form.ordered
        if whole and (tp == 1 or not ordered):
            restored = load(family, model.arch, *how, scheme=scheme)
            assert_equal(wide(restored), wide(loaded(model, tp)))
            continue
        with pytest.raises(ConfigError, match="shares inputs" if ordered else "cuts groups"):
            load(family, model.arch, *how, scheme=scheme)


@pytest.mark.parametrize("name", ["gptq 4 bits", "auto-round gptq", "auto-round awq"])
def test_scales_of_auto_round_may_be_negative(tmp_path: Path, name: str) -> None:
    """They have the sign of the largest weight, also where the checkpoint has another format's name."""

    def negated(tensors: dict[str, np.ndarray]) -> None:
        for key in [n for n in tensors if n.endswith("scales")]:
            tensors[key] = -tensors[key]

    model = Written(tmp_path, FORMATS[name], negated, autoround_version="0.5.1")
    plain = {n: -x if is_matrix(n, x) else x for n, x in model.wide.items()}
    want = assemble_all(model.family.specs(model.arch, 2), plain.__getitem__, jnp.float32)
    assert_equal(wide(loaded(model, 2)), want)


def test_modules_of_a_layer_that_gptq_does_not_name_are_not_quantised(tmp_path: Path) -> None:
    names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    for i, named in enumerate((names, [names[:2], names[2:]])):
        key = {"modules_in_block_to_quantize": named}
        model = Written(tmp_path / str(i), FORMATS["gptq 4 bits"], **key)
        for name in [n for n in model.wide if "self_attn" in n and n.endswith("proj.weight")]:
            model.tensors[name] = model.wide[name]
        layer = loaded(model.single())["layers"][1]
        forms = [said(layer[n]) for n in ("qkv", "o", "gate_up", "down")]
        assert forms == ["wide", "wide", "int4 g32", "int4 g32"]


BESIDE: dict[str, tuple[str, Any]] = {
    "hf_quant_config.json": (
        "modelopt fp8",
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ),
    "quantize_config.json": ("gptq 4 bits", dict(FORMATS["gptq 4 bits"].config)),
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
