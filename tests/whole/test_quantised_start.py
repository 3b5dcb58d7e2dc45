"""What an engine says of quantised weights as it starts: bytes, paths, and activations that stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jserve import build
from jserve.config import EngineConfig
from jserve.sizing import plan as sizing
from tests.weights.test_weights_quant import FORMATS, Written
from tests.whole.conftest import SMALL_OPTIONS

SLOW = pytest.mark.slow
OPTIONS = SMALL_OPTIONS | {"load_format": "auto", "max_model_len": 128, "page_size": 16}


def started(path: Path, **options: Any) -> dict[str, Any]:
    """The facts of an engine that was started with these weights."""
    return build.engine(EngineConfig.of(**OPTIONS | {"model": str(path)} | options))[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("modelopt nvfp4", 1),
        pytest.param("nvfp4", 1, marks=SLOW),
        pytest.param("mxfp4", 1, marks=SLOW),
        pytest.param("pack-quantized", 0, marks=SLOW),
    ],
)
def test_what_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, said: int
) -> None:
    """One line where a format of 4-bit floats was made for activations of 4 bits, too."""
    model = Written(tmp_path, FORMATS[name])
    with caplog.at_level("INFO", logger="jserve"):
        facts = started(model.path)
    lines = [r.getMessage() for r in caplog.records if "activations stay" in r.getMessage()]
    assert len(lines) == said
    assert all("weights alone, activations stay in float32" in line for line in lines)
    method = FORMATS[name].config["quant_method"]
    assert f"quantization {method}: 0.0" in caplog.text
    form = FORMATS[name].form.split()[0]
    assert set(facts["form_bytes"]) == {form, "float32"}
    assert facts["paths"] == {form: {"xla-widened": [2, facts["paths"][form]["xla-widened"][1]]}}
    planned = sizing.plan(str(tmp_path), "cpu", (64,), EngineConfig.of(**OPTIONS))[0]
    assert (planned.form_bytes, planned.paths) == (facts["form_bytes"], facts["paths"])
