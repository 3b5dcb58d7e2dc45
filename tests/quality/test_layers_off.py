"""The error of single matrices: a planted one is found, and the layer pass computes what a step does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model.hand import Row
from jserve.model.layer_pass import layer_pass
from jserve.model.norms import normed
from jserve.model.shard import Axes
from jserve.model.view import Bucket
from jserve.quality.drift import drift
from jserve.quality.layers import Loadable, layer_errors, why_not
from jserve.weights.offline.calibration import LayerStream
from jserve.weights.offline.job import quantize
from jserve.weights.offline.wish import Wish
from jserve.weights.quant.scheme import scheme_of
from jserve.weights.safetensors import SafetensorsFile
from jserve.weights.safetensors_writer import write_safetensors
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.model.driver import Driver
from tests.weights.test_weights_gguf import Written as Gguf
from tests.weights.weights_kit import LLAMA, Model

CONFIG = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "torch_dtype": "float32"}
TEXTS = [[int(t) for t in np.random.default_rng(i).integers(0, 64, 20)] for i in range(4)]


def loadable(path: Path) -> Loadable:
    source = resolve(str(path))
    return Loadable(
        source=source, scheme=scheme_of(source.config, jnp.float32), dtype=jnp.dtype("float32")
    )


def test_doubled_scales_of_one_matrix_are_the_worst_error(tmp_path: Path) -> None:
    Model(tmp_path / "wide", CONFIG, np.float32).single()
    out = quantize(str(tmp_path / "wide"), tmp_path / "out", Wish(scheme="int8"), [])
    reference = loadable(tmp_path / "wide")
    assert why_not(reference.source, loadable(out).source) == ""
    before = layer_errors(reference, loadable(out), TEXTS)
    assert len(before) == 8
    assert 0 < before[0][1] < 0.3
    path = out / "model-00002-of-00003.safetensors"
    file = SafetensorsFile(path)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    tensors["model.layers.1.self_attn.o_proj.weight_scale"] *= 2
    write_safetensors(path, tensors)
    after = layer_errors(reference, loadable(out), TEXTS)
    assert after[0][0] == "1.o"
    assert after[0][1] == pytest.approx(1.0, abs=0.1)


def test_a_gguf_file_has_errors_of_its_layers(tmp_path: Path) -> None:
    """The weights that its blocks stand for are their own reference, but for one that is half as large."""
    kinds = {"blk.0.attn_output.weight": "Q8_0", "blk.1.ffn_down.weight": "Q4_1"}
    gguf = Gguf(tmp_path, "llama", CONFIG, kinds)
    wide = Model(tmp_path / "wide", CONFIG, np.float32)
    wide.tensors = gguf.wide | {DOWN: gguf.wide[DOWN] / 2}
    wide.single()
    reference, model = loadable(tmp_path / "wide"), loadable(gguf.path)
    assert why_not(reference.source, model.source) == ""
    (worst, off), *others = layer_errors(reference, model, TEXTS)
    assert worst == "1.down"
    assert off == pytest.approx(1.0, abs=1e-3)
    assert len(others) == 7
    assert others[0][1] < 1e-3


DOWN = "model.layers.1.mlp.down_proj.weight"
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2, windows and caps": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "cohere2, parallel blocks": {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": None,
        "sliding_window": 8,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_one_by_one_are_the_step(name: str, tmp_path: Path) -> None:
    """Logits of whole texts, padded and unpadded, beside those of the engine's step."""
    model = Model(tmp_path, CONFIG | FAMILIES[name], np.float32)
    driver = Driver(model.family, model.arch, model.tensors.__getitem__)
    tokens = TEXTS[0]
    want = driver.step(Bucket(D=2, P=24, F=1), prefill=[Row([1, 2, 3], 0, tokens)])[2:22]
    specs = model.family.specs(model.arch, 1)
    params = assemble_all(specs, model.tensors.__getitem__, jnp.float32)
    stream = LayerStream(model.arch, [tokens])
    stream.enter(params["embed"])
    for i in range(model.arch.L):
        stream.pass_layer(i, params["layers"][i])
    x_TD = stream.batches[0].x_BSD[0, : len(tokens)]
    y_TD = normed(model.arch.norm, x_TD, params["final_norm"])
    got = model.family.logits(model.arch, params, y_TD, Axes())
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())
    inputs = layer_pass(model.arch, 0, params["layers"][0], stream.batches[0].x_BSD)[1]
    assert {k: v.shape[-1] for k, v in inputs.items()} == {
        "qkv": 64,
        "o": 64,
        "gate_up": 64,
        "down": 96,
    }


def test_activations_beyond_a_static_scale_are_counted(tmp_path: Path) -> None:
    """Scales of half the largest activation, and of twice it."""
    wide = Model(tmp_path / "wide", CONFIG, np.float32)
    wide.single()
    stream = LayerStream(wide.arch, TEXTS)
    params = assemble_all(wide.family.specs(wide.arch, 1), wide.tensors.__getitem__, jnp.float32)
    stream.enter(params["embed"])
    most = float(stream.stats(0, params["layers"][0])["qkv"].most_D.max())
    for factor in (0.5, 2.0):
        path = tmp_path / f"static {factor}"
        made = Model(path, CONFIG, np.float32)
        for name in [n for n in made.tensors if n.endswith("_proj.weight")]:
            w = made.tensors.pop(name)
            scale = np.abs(w).max() / 448
            made.tensors[name] = (w / scale).astype(ml_dtypes.float8_e4m3fn)
            made.tensors[f"{name}_scale"] = np.array([scale], np.float32)
            limit = factor * most if "layers.0.self_attn" in name else 1e6
            made.tensors[name.removesuffix("weight") + "input_scale"] = np.array(
                [limit / 448], np.float32
            )
        section = {"quant_method": "fp8", "activation_scheme": "static"}
        made.write_json("config.json", {**made.config, "quantization_config": section})
        made.single()
        found = {one.product: one for one in drift(loadable(path), TEXTS)}
        assert len(found) == 8
        assert found["0.qkv"].most == pytest.approx(1 / factor, rel=0.01)
        assert (found["0.qkv"].over > 0) is (factor < 1)
        assert found["1.down"].over == 0


def test_a_model_without_static_scales_has_no_drift(tmp_path: Path) -> None:
    Model(tmp_path / "wide", CONFIG, np.float32).single()
    with pytest.raises(ConfigError, match="no static scales"):
        drift(loadable(tmp_path / "wide"), TEXTS)
