"""``jserve quality`` and ``serve --quality-gate``: exit codes, and what is printed and written. No engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jserve import quant_commands, serve_commands
from jserve.build import located
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.quality import run
from jserve.quality.metrics import Metric
from jserve.quality.report import assembled, form_of, identity
from jserve.quality.run import QualityWish, judge, reference_config, served_form

CONFIG = EngineConfig.of(quantization="int8")


def made(config: EngineConfig = CONFIG) -> dict[str, Any]:
    return assembled(
        model={"model": "m", "form": "int8", "identity": identity(config, located(config))},
        reference={"model": "r"},
        text={"name": "t", "texts": 2, "tokens": 10},
        metrics={"mean_kl": Metric(0.1, 0.05, 0.2), "skills": Metric(1.0, 1.0, 1.0)},
        tallies={},
        layers=[("3.down", 0.7)],
        drift=[],
        notes=[],
    )


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "judge", lambda *_: made())


def run_quality(tmp_path: Path, bound: float, *, as_json: bool = False) -> tuple[int, str]:
    console = Console(record=True, file=(tmp_path / "stderr").open("w"), width=200)
    gate, report = tmp_path / "gate.json", tmp_path / "report.json"
    gate.write_text(json.dumps({"forms": {"int8": {"mean_kl": bound, "skills": 0.99}}}))
    asked = QualityWish(directory=tmp_path)
    code = quant_commands.quality(CONFIG, asked, gate, report, as_json=as_json, console=console)
    return code, console.export_text()


@pytest.mark.usefixtures("judged")
def test_a_bound_that_fails_is_named_and_the_exit_code_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run_quality(tmp_path, 0.15)
    assert code == 1
    assert "mean_kl 0.2 is above 0.15" in said
    out = capsys.readouterr().out
    assert "mean_kl" in out
    assert "3.down" in out
    with pytest.raises(ConfigError, match=r"mean_kl 0\.2 is above 0\.15"):
        serve_commands.serve(with_gate(tmp_path), Console())


def test_a_form_without_bounds_is_refused_before_it_is_judged(tmp_path: Path) -> None:
    gate = tmp_path / "gate.json"
    gate.write_text('{"forms": {"int4": {"mean_kl": 1}}}')
    asked = QualityWish(directory=tmp_path)
    with pytest.raises(ConfigError, match="no bound for the form int8"):
        quant_commands.quality(CONFIG, asked, gate, None, as_json=False, console=Console())


@pytest.mark.usefixtures("judged")
def test_a_report_that_holds_is_json_and_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_quality(tmp_path, 0.25, as_json=True)[0] == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "report.json").read_text())

    async def served(*_: Any) -> int:
        return 7

    monkeypatch.setattr(serve_commands, "_serve", served)
    assert serve_commands.serve(with_gate(tmp_path), Console()) == 7
    for changed in ({"quantization": "int4"}, {"kv_cache_dtype": "fp8_e4m3"}):
        with pytest.raises(ConfigError, match="is of another model"):
            serve_commands.serve(with_gate(tmp_path, **changed), Console())
    with pytest.raises(ConfigError, match="is missing"):
        serve_commands.serve(with_gate(tmp_path / "elsewhere"), Console())


def with_gate(directory: Path, **changed: Any) -> EngineConfig:
    gate = {"quality_gate": str(directory / "report.json"), "log_level": "error"}
    return EngineConfig.of(**{**CONFIG.flat(), **gate, **changed})


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        quant_commands.write_file(tmp_path / "nowhere" / "report.json", "")


def test_the_reference_is_the_model_without_quantisation(tmp_path: Path) -> None:
    given = {**CONFIG.flat(), "kv_cache_dtype": "fp8_e4m3", "dtype": "float32"}
    found = reference_config(EngineConfig.of(**given), "")
    assert (found.model.quantization, found.cache.kv_cache_dtype) == ("auto", "auto")
    assert found.model.dtype == "float32"


def test_a_quantised_checkpoint_needs_a_reference(tmp_path: Path) -> None:
    section = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    source = located(EngineConfig())
    config = json.dumps({**source.config, "quantization_config": section})
    for path in source.directory.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text(config)
    quantised = EngineConfig.of(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"is quantised \(fp8\); name the model") as caught:
        reference_config(quantised, "")
    assert caught.value.field == "reference"
    assert reference_config(quantised, str(source.directory)).model.model == str(source.directory)


def test_drift_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "Hello there"}\n')
    asked = QualityWish(directory=tmp_path, drift=tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match="no static scales") as caught:
        judge(EngineConfig(), asked, lambda *_: None)
    assert caught.value.field == "drift"


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, "none"),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, "fp8+kv-fp8_e4m3"),
        ({"quantization": "int4", "tensor_parallel_size": 4}, "int4+int8-weight-only"),
    ],
)
def test_the_form_is_known_by_headers(options: dict[str, Any], form: str) -> None:
    assert served_form(EngineConfig.of(**options)) == form


def test_forms_have_the_names_of_a_gate_file() -> None:
    assert form_of("int8", EngineConfig()) == "int8"
    assert form_of("none", EngineConfig.of(kv_cache_dtype="fp8_e4m3")) == "none+kv-fp8_e4m3"


@pytest.mark.parametrize(
    ("asked", "known_as"),
    [("auto", "auto"), ("awq", "auto"), ("none", "none"), ("w8a8_int8", "int8")],
)
def test_the_name_of_a_format_makes_no_other_model(asked: str, known_as: str) -> None:
    """It says of a checkpoint what it has anyway, so its report vouches for both."""
    config = EngineConfig.of(quantization=asked)
    assert identity(config, located(EngineConfig()))["quantization"] == known_as
