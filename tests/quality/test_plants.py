"""The gate that ships, on the engine: it lets a form through, and planted faults turn it red."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from jserve import build, build_runner
from jserve.config import EngineConfig
from jserve.quality.gate import Failure, bounds_of, failures, read_gate
from jserve.quality.run import QualityWish, judge
from jserve.quality.texts import shipped
from jserve.weights.offline.job import quantize
from jserve.weights.offline.wish import Wish
from tests.quality import mini_formats
from tests.weights import plants

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


def with_plant(
    patch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    *args: Any,
    **options: Any,
) -> tuple[dict, list[Failure]]:
    """``judged`` with a fault, in programs that are traced anew."""
    plant(patch)
    jax.clear_caches()
    try:
        return judged(*args, **options)
    finally:
        patch.undo()
        jax.clear_caches()


def test_a_scale_per_tensor_of_activations_is_red(
    green: dict, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, failed = with_plant(
        monkeypatch, plants.scale_per_tensor, directory, quantization="int8"
    )
    assert "mean_kl" in names(failed), report["metrics"]


@pytest.fixture(scope="module")
def of_format(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """Options that serve the shipped model in a format, which the gate lets through as it is."""

    @cache
    def made(name: str) -> dict[str, Any]:
        path = tmp_path_factory.mktemp("formats") / "mini"
        if name == "pack-quantized":
            wish = Wish(scheme="int4", config='{"group_size": 64}')  # what the gate's bounds are of
            options = {"model": str(quantize(str(build.shipped()), path, wish, []))}
        else:
            options = {"model": str(mini_formats.written(path, name))}
        if options["model"].endswith(".gguf"):
            template = build.shipped() / "chat_template.jinja"
            options |= {"tokenizer": str(build.shipped()), "chat_template": str(template)}
        report, failed = judged(directory, str(build.shipped()), **options)
        assert not failed, report["metrics"]
        return options

    return made


@pytest.mark.parametrize("name", ["fp8 rows", "mxfp4", "nvfp4", "fp8 static", "int8 static"])
def test_forms_that_no_option_makes_are_let_through(
    of_format: Callable[[str], dict], name: str
) -> None:
    """As their bounds were measured: rounded to the nearest."""
    of_format(name)


@pytest.mark.parametrize("name", plants.READ)
def test_a_fault_of_what_is_read_is_red(
    of_format: Callable[[str], dict],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    plant, fmt = plants.READ[name]
    options = of_format(fmt)
    report, failed = with_plant(monkeypatch, plant, directory, str(build.shipped()), **options)
    assert "mean_kl" in names(failed), report["metrics"]
    if name == "doubled scales of one layer":
        assert report["layers"][0]["product"] == "1.down"
        assert "worst_layer" in names(failed)


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_the_kv_scale_of_another_head_is_red(
    directory: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    plant = plants.kv_scale_of_another_head if planted else lambda patch: None
    report, failed = with_plant(monkeypatch, plant, directory, kv_cache_dtype="int8_per_token_head")
    assert ("mean_kl" in names(failed)) is planted, report["metrics"]


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_scales_that_are_not_repeated_with_kv_heads_are_red(
    green: dict, directory: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Over four devices the two kv heads are kept twice each: 0 0 1 1. Planted: their scales as 0 1 0 1."""
    if planted:
        monkeypatch.setattr(build_runner, "load", plants.with_swapped_kv_scales(build_runner.load))
    report, failed = judged(directory, quantization="int8", tensor_parallel_size=4)
    assert report["tensor_parallel_size"] == 4
    assert ("mean_kl" in names(failed)) is planted, report["metrics"]
