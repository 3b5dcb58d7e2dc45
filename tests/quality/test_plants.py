"""The gate that ships, on the engine: it lets a form through, and planted faults turn it red."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import build
from jserve.config import EngineConfig
from jserve.model import quant
from jserve.model.quant import QTensor
from jserve.quality.gate import Failure, bounds_of, failures, read_gate
from jserve.quality.run import QualityWish, judge
from jserve.quality.texts import shipped
from jserve.weights import loader
from jserve.weights.offline.job import quantize
from jserve.weights.offline.wish import Wish
from jserve.weights.safetensors import SafetensorsFile
from jserve.weights.safetensors_writer import write_safetensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SMALL = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "compile_cache": "",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reference is kept for all tests."""
    return tmp_path_factory.mktemp("references")


def judged(directory: Path, reference: str = "", **options: Any) -> tuple[dict, list[Failure]]:
    """The report, and the bounds of the shipped gate that do not hold; those of answers left out."""
    wish = QualityWish(directory=directory, questions=False, reference=reference)
    report = judge(EngineConfig.of(**SMALL, **options), wish, lambda *_: None)
    gate = shipped("gate.json")
    bounds = bounds_of(read_gate(gate), gate, report["form"])
    about = {"mean_kl", "p99_kl", "same_top", "ln_ppl_ratio", "worst_layer"}
    return report, failures(report["metrics"], {k: v for k, v in bounds.items() if k in about})


def names(failed: list[Failure]) -> set[str]:
    return {failure.metric for failure in failed}


@pytest.fixture(scope="module")
def green(directory: Path) -> dict:
    report, failed = judged(directory, quantization="int8")
    assert not failed
    return report


def test_int8_is_as_near_as_it_was_simulated(green: dict) -> None:
    assert green["form"] == "int8"
    assert green["metrics"]["mean_kl"]["value"] < 1.2 * 0.00026


def test_a_scale_per_tensor_of_activations_is_red(
    green: dict, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def per_tensor(x_TBG: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        scale_TB = jnp.full(x_TBG.shape[:2], jnp.max(jnp.abs(x_TBG)) / 127)
        return jnp.round(x_TBG / scale_TB[..., None]).astype(jnp.int8), scale_TB

    monkeypatch.setattr(quant, "rounded", per_tensor)
    jax.clear_caches()
    try:
        report, failed = judged(directory, quantization="int8")
    finally:
        jax.clear_caches()
    assert "mean_kl" in names(failed), report["metrics"]


def test_doubled_scales_of_one_layer_are_red_and_named(
    green: dict, directory: Path, tmp_path: Path
) -> None:
    source = str(build.shipped())
    out = quantize(source, tmp_path / "out", Wish(scheme="int8"), [])
    path = out / "model-00003-of-00006.safetensors"
    file = SafetensorsFile(path)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    for name in tensors:
        if "down_proj" in name and name.endswith("weight_scale"):
            tensors[name] *= 2
    write_safetensors(path, tensors)
    report, failed = judged(directory, source, model=str(out))
    assert {"mean_kl", "worst_layer"} <= names(failed)
    assert report["layers"][0]["product"] == "2.down"


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_scales_that_are_not_repeated_with_kv_heads_are_red(
    green: dict, directory: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Over four devices the two kv heads are kept twice each: 0 0 1 1. Planted: their scales as 0 1 0 1."""
    real = loader.load

    def load(*args: Any, **how: Any) -> Any:
        params = real(*args, **how)
        for layer in params["layers"]:
            qkv: QTensor = layer["qkv"]
            assert qkv.shape[0] == 4
            moved = qkv.scale.at[:, -2:].set(qkv.scale[jnp.array([0, 2, 0, 2]), -2:])
            scale = jax.device_put(moved, qkv.scale.sharding)
            layer["qkv"] = replace(qkv, scale=scale)
        return params

    if planted:
        monkeypatch.setattr(loader, "load", load)
    report, failed = judged(directory, quantization="int8", tensor_parallel_size=4)
    assert report["tensor_parallel_size"] == 4
    assert ("mean_kl" in names(failed)) is planted, report["metrics"]
