"""Gate files, stored reports, and what a server makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.quant import Form, form_name
from jserve.quality.gate import METRICS, bounds_of, check_report, failures, read_gate
from jserve.quality.texts import shipped
from jserve.weights.quant.gguf import FORMS as GGUF
from jserve.weights.quant.scheme import quantised, scheme_of
from tests.weights.test_weights_quant import CONFIG, FORMATS

METRIC = {"value": 0.5, "low": 0.4, "high": 0.6}
IDENTITY = {"weights": "abc", "quantization": "int8", "kv_cache_dtype": "auto"}


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"bounds": {"mean_kk": 1}}, "mean_kk"),
        ({"forms": {"int8": {"accuracy": 1}}}, "forms.int8: 'accuracy'"),
        ({"bounds": {"mean_kl": "low"}}, "bounds.mean_kl must be a number"),
        ({"bounds": {"mean_kl": True}}, "bounds.mean_kl must be a number"),
        ({"limits": {}}, "'limits' is not one of bounds, forms"),
        ({"forms": []}, "forms must be an object"),
        ({"bounds": 3}, "bounds must be an object"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_bad_gate_file_is_refused_by_name(tmp_path: Path, value: Any, word: str) -> None:
    path = write(tmp_path / "gate.json", value)
    with pytest.raises(ConfigError, match=word) as caught:
        read_gate(path)
    assert caught.value.field == str(path)


def test_bounds_of_a_form_win_over_those_of_all(tmp_path: Path) -> None:
    given = {"bounds": {"mean_kl": 1, "same_top": 0.5}, "forms": {"int8": {"mean_kl": 0.1}}}
    path = write(tmp_path / "gate.json", given)
    found = read_gate(path)
    assert bounds_of(found, path, "int8") == {"mean_kl": 0.1, "same_top": 0.5}
    assert bounds_of(found, path, "int4") == {"mean_kl": 1.0, "same_top": 0.5}
    only = read_gate(write(path, {"forms": {"int8": {"mean_kl": 0.1}}}))
    with pytest.raises(ConfigError, match="no bound for the form int4"):
        bounds_of(only, path, "int4")


def test_several_forms_have_the_looser_bound_of_each_metric(tmp_path: Path) -> None:
    given = {
        "bounds": {"skills": 0.9},
        "forms": {
            "int8": {"mean_kl": 0.1, "same_top": 0.9, "worst_layer": 0.3},
            "int4": {"mean_kl": 0.4, "same_top": 0.95, "skills": 0.8},
            "none+kv-int8": {"mean_kl": 0.2, "same_top": 0.97},
            "fp8+int8": {"mean_kl": 0.3},
        },
    }
    found = read_gate(path := write(tmp_path / "gate.json", given))
    both = {"mean_kl": 0.4, "same_top": 0.9, "worst_layer": 0.3, "skills": 0.8}
    assert bounds_of(found, path, "int4+int8") == both
    kv = {"mean_kl": 0.2, "same_top": 0.9, "worst_layer": 0.3, "skills": 0.9}
    assert bounds_of(found, path, "int8+kv-int8") == kv
    assert bounds_of(found, path, "none+kv-int8") == {
        "mean_kl": 0.2,
        "same_top": 0.97,
        "skills": 0.9,
    }
    assert bounds_of(found, path, "fp8+int8") == {"mean_kl": 0.3, "skills": 0.9}
    only = read_gate(write(path, {"forms": {"int8": {"mean_kl": 0.1}}}))
    with pytest.raises(ConfigError, match="no bound for the form fp8"):
        bounds_of(only, path, "fp8+int8")


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4 experts", *GGUF])
def test_the_shipped_gate_has_bounds_for_every_form(name: str) -> None:
    """In its own words, as an engine gives them, for weights that jserve reads in this format."""
    path = shipped("gate.json")
    if name in FORMATS:
        scheme = scheme_of({"quantization_config": FORMATS[name].config}, jnp.float32)
        family = quantised(family_for(CONFIG), scheme)
        form = form_name(family.specs(family.arch(CONFIG), 1))
    else:
        form = Form(**GGUF.get(name, {"kind": "e2m1", "group": 32})).name
    assert {*bounds_of(read_gate(path), path, form)} == {*METRICS}
    for kv in ("fp8_e4m3", "int8_per_token_head", "int4_per_token_head"):
        assert {*bounds_of(read_gate(path), path, f"{form}+kv-{kv}")} >= {*METRICS} - {
            "worst_layer"
        }


def test_the_worse_end_of_the_interval_counts() -> None:
    found = {"mean_kl": METRIC, "same_top": METRIC}
    assert failures(found, {"mean_kl": 0.6, "same_top": 0.4}) == []
    failed = failures(found, {"mean_kl": 0.59, "same_top": 0.41})
    assert [str(f) for f in failed] == [
        "mean_kl 0.6 is above 0.59",
        "same_top 0.4 is below 0.41",
    ]


def test_what_was_not_measured_or_is_no_number_fails() -> None:
    nan = {"value": float("nan"), "low": float("nan"), "high": float("nan")}
    failed = failures({"mean_kl": nan, "same_top": nan}, dict.fromkeys(METRICS, 0.5))
    assert {f.metric for f in failed} == {*METRICS}
    assert "needle was not measured" in [str(f).partition(",")[0] for f in failed]


def report(**changes: Any) -> dict[str, Any]:
    gate = {"bounds": {"mean_kl": 0.7}, "failed": []}
    return {"identity": IDENTITY, "metrics": {"mean_kl": METRIC}, "gate": gate} | changes


def test_a_report_of_this_model_that_holds_is_taken(tmp_path: Path) -> None:
    check_report(write(tmp_path / "report.json", report()), IDENTITY)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (None, "is missing"),
        ("no json", "is no report"),
        ({"identity": IDENTITY, "metrics": {}}, "is no report"),
        (report(gate={"bounds": {}, "failed": []}), "has no bounds"),
        (report(identity=IDENTITY | {"weights": "xyz"}), "weights is 'xyz' there, 'abc' here"),
        (report(identity=IDENTITY | {"quantization": "int4"}), "quantization is 'int4' there"),
        (report(gate={"bounds": {"mean_kl": 0.5}, "failed": []}), "mean_kl 0.6 is above 0.5"),
    ],
)
def test_a_server_refuses_other_reports(tmp_path: Path, value: Any, word: str) -> None:
    path = tmp_path / "report.json"
    if value is not None:
        write(path, value)
    with pytest.raises(ConfigError, match=word) as caught:
        check_report(path, IDENTITY)
    assert caught.value.field == "quality_gate"
