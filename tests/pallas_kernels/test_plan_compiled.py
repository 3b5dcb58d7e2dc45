"""``jserve plan --compile``: its figures are those of the compiled step, and agree with the roofline's work."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from jserve.cli import app
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.shapes import SHAPES
from jserve.sizing import plan as sizing
from jserve.sizing.compiled import with_compiled

pytestmark = pytest.mark.usefixtures("h200")


def test_one_program_of_a_sharded_layer(tmp_path) -> None:
    """One layer of the 1B shape over two devices: the decode program of eight rows."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["llama-3.2-1b"] | {"num_hidden_layers": 1}))
    config = EngineConfig.of(
        tensor_parallel_size=2,
        max_num_seqs=8,
        max_model_len=4096,
        page_size=64,
        attention_backend="hopper",
    )
    found, laid = sizing.plan(str(path), "h200", (512,), config)
    at = [p.name for p in found.programs].index("step_D8_P0_F0_J1")
    found = dataclasses.replace(found, programs=found.programs[at : at + 1])
    laid = dataclasses.replace(laid, buckets=laid.buckets[at : at + 1])
    said = []
    program = with_compiled(found, laid, "h200", lambda *x: said.append(x)).programs[0]
    figures = program.compiled or {}
    c = found.collectives
    assert figures["collectives"] == {"all-reduce": c.all_reduces, "all-gather": c.all_gathers}
    assert figures["launches"] == 1
    assert 1 < figures["bytes_over_weights"] < 1.2
    # The roofline has attention, which XLA does not see, and no norms and sampling, which it does.
    attention = 4 * 32 * 64 * 8 * 512 / 2
    assert 1 < figures["flops"] / (program.flops - attention) < 1.15
    assert 0 < figures["temp_bytes"] < 64 << 20
    assert figures["spilled_bytes"] == 0
    assert said[-1] == ("compile", 1, 1)


@pytest.mark.slow
def test_one_program_that_drafts(tmp_path) -> None:
    """The same layer with itself for a draft model: what the drafter reads for each of its passes is what
    the plan says, and it is one graph still."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["llama-3.2-1b"] | {"num_hidden_layers": 1}))
    config = EngineConfig.of(
        max_num_seqs=8,
        max_model_len=4096,
        page_size=64,
        attention_backend="hopper",
        speculative={"method": "draft", "model": str(path), "num_tokens": 3},
    )
    found, laid = sizing.plan(str(path), "h200", (512,), config)
    at = [p.name for p in found.programs].index("step_D8_P0_F0_J4_n3")
    laid = dataclasses.replace(laid, buckets=laid.buckets[at : at + 1])
    found = dataclasses.replace(found, programs=found.programs[at : at + 1])
    program = with_compiled(found, laid, "h200", lambda *_: None).programs[0]
    figures = program.compiled or {}
    assert figures["launches"] == 1
    assert 1 < figures["bytes_over_weights"] < 1.2
    assert program.logits_bytes < figures["temp_bytes"] < 6 * program.logits_bytes


def test_a_device_without_a_description_is_refused() -> None:
    result = CliRunner().invoke(app, ["plan", "qwen3-0.6b", "--device", "b200", "--compile"])
    assert result.exit_code == 2
    found, laid = sizing.plan("qwen3-0.6b", "b200", (), EngineConfig())
    with pytest.raises(ConfigError, match="compile needs --device h200"):
        with_compiled(found, laid, "b200", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["tp=2", "dp=2,tp=2", '{"mesh": {"tp": 2}, "mode": "auto"}'])
def test_the_steps_of_a_sharding(tmp_path, spec) -> None:
    """``jserve bench shard --compile`` of one layer: collectives as traced, and those of XLA's partitioner."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["llama-3.2-1b"] | {"num_hidden_layers": 1}))
    words = ["--spec", spec, "--compile", "--dtype", "bfloat16", "--json"]
    done = CliRunner().invoke(app, ["bench", "shard", str(path), *words])
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)["specs"]
    assert len(row["compiled"]) == 2
    for i, figures in enumerate(row["compiled"]):
        n = sum(figures["collectives"].values())
        assert figures["launches"] == 1
        if "auto" in spec:  # with dense attention, which gathers the context
            assert n >= 3
            continue
        assert n == row["steps"][i]["collectives"]
        assert figures["spilled_bytes"] == 0
        assert 1 < figures["bytes_over_weights"] < 1.6
        assert 0 < figures["temp_bytes"] < 64 << 20
