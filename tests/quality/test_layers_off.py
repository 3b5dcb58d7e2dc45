"""The error of single matrices: a planted one is found, and the layer pass computes what a step does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.hand import Row
from jserve.model.layer_pass import layer_pass
from jserve.model.norms import normed
from jserve.model.shard import Axes
from jserve.model.view import Bucket
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
