"""What ``jserve plan`` says of quantised weights: their forms and bytes, who multiplies them, and what stayed wide."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.sizing import plan as sizing, show
from tests.weights.test_weights_quant import CONFIG, FORMATS

OLD = jax.__version_info__ < (0, 11)
D, F, KV, L, V = 4096, 14336, 1024, 32, 128256
MATRICES = L * (D * (D + 2 * KV) + D * D + 3 * D * F)
"""Numbers of the matrices of Llama-3.1-8B's layers, and their rows."""
ROWS = L * (D + 2 * KV + D + 2 * F + D)
WIDE = 2 * (2 * V * D + (2 * L + 1) * D)
"""Bytes of embedding, head and norms in bfloat16."""


def planned(name: str = "llama-3.1-8b", device: str = "h200", **options: str) -> sizing.Plan:
    return sizing.plan(name, device, (), EngineConfig.of(**options))[0]


def text_of(plan: sizing.Plan) -> str:
    console = Console(width=show.WIDTH, record=True, file=io.StringIO())
    show.as_text(plan, console)
    return console.export_text()


BYTES = {
    "fp8": ("fp8", MATRICES + 4 * ROWS),
    "int8": ("int8", MATRICES + 4 * ROWS),
    "int8-weight-only": ("int8-weight-only", MATRICES + 4 * ROWS),
    "int4": ("int4", MATRICES // 2 + MATRICES // 128 * 4),
}


@pytest.mark.parametrize("asked", BYTES)
def test_bytes_of_each_form_and_of_what_stayed_wide(asked: str) -> None:
    form, n = BYTES[asked]
    assert planned(quantization=asked).form_bytes == {form: n, "bfloat16": WIDE}


def test_paths_are_said_by_form_and_tokens() -> None:
    four = planned(quantization="int4", kernels="xla")
    (few, many), of_four = ("xla-blocks", "xla-widened"), four.paths["int4"]
    assert list(four.paths) == ["int4"]
    assert of_four[few][1] <= 16 < of_four[many][0] < of_four[many][1]
    eight = planned(quantization="int8")
    least, most = eight.paths["int8"]["xla"]
    assert least == of_four[few][0]
    assert most == of_four[many][1]
    text = text_of(four)
    assert "int4 by" in text
    assert f"xla-blocks ({of_four[few][0]} to {of_four[few][1]} tokens)" in text
    assert "bfloat16 2.10" in text
    assert json.loads(show.as_json(four))["paths"] == four.paths


@pytest.mark.skipif(OLD, reason="the kernel needs jax 0.11")
def test_hopper_has_a_kernel_for_few_rows() -> None:
    found = planned(quantization="int4").paths["int4"]
    assert list(found) == ["quant_matmul", "xla-widened"]
    assert found["quant_matmul"][1] <= 64 < found["xla-widened"][0]
    assert "quant_matmul (" in text_of(planned(quantization="int4"))
    assert set(planned(device="b200", quantization="int4").paths["int4"]) == {
        "xla-blocks",
        "xla-widened",
    }


def test_a_kernel_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernels hopper: they are for GPUs") as e:
        planned(device="cpu", quantization="int4", kernels="hopper")
    assert e.value.field == "kernels"


def test_a_model_that_is_not_quantised_has_none() -> None:
    assert planned().paths == {}
    assert "bfloat16 by" not in text_of(planned())


@pytest.mark.parametrize("name", ["awq", "nvfp4", "fp8 static", "int-quantized", "pack 8 bits"])
def test_forms_of_a_checkpoint_are_read_from_its_config_alone(tmp_path: Path, name: str) -> None:
    config = CONFIG | {"quantization_config": dict(FORMATS[name].config), "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(str(tmp_path), "cpu", kernels="xla")
    (form,) = set(found.form_bytes) - {"bfloat16"}
    assert set(found.paths) == {form}
    widened = planned(str(tmp_path), "cpu", kernels="xla", quantization="none")
    assert set(widened.form_bytes) == {"bfloat16"}
    assert widened.paths == {}
