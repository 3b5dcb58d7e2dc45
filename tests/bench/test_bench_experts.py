"""The benchmarks of experts and of loading, each run to its end in a tiny form: what its record holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from bench import compile_time, experts, loading, loading_forms
from jserve.model import native
from jserve.model.arch import Moe, Router

needs_kernels = pytest.mark.skipif(
    not native.available("cpu", jnp.bfloat16)[0], reason="bench.experts measures native kernels"
)

SHIPPED = Path(__file__).parents[2] / "checkpoints/jserve-mini"


def lines_of(file: Path, kind: str) -> list[dict[str, Any]]:
    """Of a record, whose head says what it is and where it ran."""
    record = json.loads(file.read_text())
    assert (record["format"], record["kind"]) == (1, kind)
    assert record["machine"]["cpu"]
    assert record["options"]
    return record["lines"]


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(("form", "each"), [("bfloat16", 2.0), ("int4", 0.5 + 4 / 32)])
def test_bytes_are_of_the_experts_that_tokens_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, each: float
) -> None:
    """``each``: bytes of a weight."""
    small = 256, Moe(E=8, X=2, F=512, router=Router(normalise=True))
    monkeypatch.setattr(experts, "SHAPES", {"8/2": small})
    monkeypatch.setattr(experts, "COPIES_BYTES", 1 << 20)
    file = tmp_path / "experts.json"
    asked = ["--tokens", "1,64", "--turns", "1", "--form", form, "--json", str(file)]
    assert experts.main(asked) == 0
    one, many = lines_of(file, "experts")
    assert [line["tokens"] for line in (one, many)] == [1, 64]
    assert [line["met"] for line in (one, many)] == [2, 8], "X of one token, all of many"
    for line in (one, many):
        assert line["mb"] == pytest.approx(line["met"] * 3 * 256 * 512 * each / 1e6, abs=0.06)
        assert min(line[f"{side}_ms"] for side in ("native", "xla", "dense")) > 0
        assert line["of_dense"] == pytest.approx(line["native_ms"] / line["dense_ms"], abs=0.02)


@pytest.mark.slow
def test_ways_over_devices_are_timed_beside_their_loads(tmp_path: Path) -> None:
    """In a process of its own, which has four devices. It compares the outputs of the ways itself."""
    file = tmp_path / "devices.json"
    command = [sys.executable, "-m", "bench.experts_devices", "--tokens", "4,64", "--turns", "1"]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([*command, "--json", str(file)], check=True, env=env, timeout=240)
    lines = lines_of(file, "experts-devices")
    assert [(line["law"], line["tokens"]) for line in lines] == [
        *(("even", 4), ("even", 64)),
        *(("zipf", 4), ("zipf", 64)),
    ]
    for line in lines:
        assert min(line["tp_ms"], line["ep_ms"], line["eplb_ms"]) > 0
        assert line["ep_of_tp"] == pytest.approx(line["ep_ms"] / line["tp_ms"], abs=0.01)
        assert 1 <= line["load_ep"] <= 4
        assert line["load_eplb"] >= 1
    assert lines[-1]["load_eplb"] < lines[-1]["load_ep"], "uneven choices, many tokens"


@pytest.mark.slow
def test_both_models_compile_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_time, "SLOTS", 4)
    monkeypatch.setattr(compile_time, "CHUNK", 16)
    file = tmp_path / "compile.json"
    assert compile_time.main(["--layers", "1", "--rounds", "1", "--json", str(file)]) == 0
    [line] = lines_of(file, "compile_time")
    assert (line["layers"], line["programs"] > 1) == (1, True)
    assert line["ratio"] == pytest.approx(line["experts_s"] / line["dense_s"], rel=0.1)


def test_a_checkpoint_of_many_tensors_is_loaded_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64}
    monkeypatch.setattr(loading, "CONFIG", loading.CONFIG | few)
    monkeypatch.setattr(loading, "TENSORS_PER_FILE", 10)
    file = tmp_path / "loading.json"
    assert loading.main(["--rounds", "1", "--json", str(file)]) == 0
    lines = lines_of(file, "loading")
    assert [line["cold"] for line in lines] == [True, False]
    assert min(line[key] for line in lines for key in ("load_s", "read_s")) > 0
    options = json.loads(file.read_text())["options"]
    assert options["n_tensors"] == 3 + 2 * (9 + 3 * 4)
    assert options["n_bytes"] > 2 * 2 * 64 * 256, "embedding and head in bfloat16"


@pytest.mark.slow
def test_a_model_is_loaded_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "forms.json"
    assert loading_forms.main([str(SHIPPED), "--rounds", "1", "--json", str(file)]) == 0
    lines = {line["way"]: line for line in lines_of(file, "loading_forms")}
    whole = lines["own type"]["stays"]
    for scheme, most in (("int8", 0.6), ("int4", 0.4)):
        on_load, copy = lines[f"{scheme} on load"], lines[f"{scheme} copy"]
        assert on_load["stays"] == copy["stays"] < most * whole
        assert on_load["load_s"] > copy["load_s"] > 0
