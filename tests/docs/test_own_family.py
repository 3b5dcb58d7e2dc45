"""The family of examples/own_family.py: transformers' tokens, on one device and on two, from ``LLM`` and
over HTTP; what it cannot honour is refused."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from jserve import LLM, EngineConfig, SamplingParams, cli
from jserve.commands import plan
from jserve.errors import ConfigError
from jserve.plugins import load_plugins
from tests.docs.neox import model_and_config
from tests.docs.pages import ROOT, posted
from tests.model.driver import Driver
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_serve import Server

EXAMPLE = ROOT / "examples" / "own_family.py"
PROMPT = np.random.default_rng(3).integers(3, 320, 39).tolist()
OPTIONS = {**SMALL_OPTIONS, "load_format": "auto"}


@pytest.fixture(scope="module")
def expected() -> tuple[np.ndarray, list[int]]:
    from tests.model import hf

    return hf.greedy(model_and_config()[0], PROMPT, 24)


@pytest.fixture
def family() -> Any:
    return runpy.run_path(str(EXAMPLE))["FAMILY"]


def test_same_logits_and_tokens_as_transformers(family: Any, expected: Any) -> None:
    from tests.model import hf

    model, config = model_and_config()
    get, in_memory = hf.weights(model), {"embed_out.weight": "lm_head.weight"}

    def weights(name: str) -> Any:
        return get(in_memory.get(name, name))

    driver = Driver(family, family.arch(config), weights, attn="xla")
    logits, tokens = driver.greedy(PROMPT, 24)
    assert np.abs(logits - expected[0]).max() < 2e-4 * np.ptp(expected[0])
    assert tokens == expected[1]
    assert len(set(tokens)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_plugin_serves_it(neox_dir: Path, expected: Any, tp: int) -> None:
    options = {**OPTIONS, "plugins": str(EXAMPLE), "tensor_parallel_size": tp}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(neox_dir), **options) as llm:
        [out] = llm.generate([PROMPT], params, use_tqdm=False)
    assert out.outputs[0].token_ids == expected[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plugin_serves_it_over_http(neox_dir: Path, expected: Any, tmp_path: Path) -> None:
    server = Server(neox_dir, tmp_path / "log", **OPTIONS, plugins=EXAMPLE, tp=2)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    answer = json.load(posted(f"{server.url}/v1/completions", {**body, "return_token_ids": True}))
    assert server.stop() == 0
    assert answer["choices"][0]["token_ids"] == expected[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_parallel_residual", False),
        ("hidden_act", "gelu_new"),
        ("tie_word_embeddings", True),
        ("clip_qkv", 8.0),
        ("num_key_value_heads", 2),
    ],
)
def test_what_it_cannot_honour_is_refused(family: Any, key: str, value: Any) -> None:
    config = model_and_config()[1]
    assert family.arch(config).ropes[0].rotary == 4
    with pytest.raises(ConfigError) as caught:
        family.arch({**config, key: value})
    assert caught.value.field == key


def test_without_its_plugin_it_is_refused_with_advice(neox_dir: Path) -> None:
    with pytest.raises(ConfigError, match="plugins"):
        LLM(str(neox_dir), **OPTIONS)


def test_plan_loads_plugins(neox_dir: Path, capsys: pytest.CaptureFixture) -> None:
    config = EngineConfig.of(model=str(neox_dir), plugins=str(EXAMPLE), max_model_len=128)
    plan(config, "h200", "64", None, compiled=False, as_json=True, console=None)
    assert json.loads(capsys.readouterr().out)


def test_simulate_and_convert_load_plugins(neox_dir: Path, tmp_path: Path) -> None:
    with_plugin = ["--plugins", str(EXAMPLE)]
    for line in (
        ["simulate", "n=1,prompt=8,output=2", "--roofline", str(neox_dir)],
        ["convert", str(neox_dir), str(tmp_path / "orbax")],
    ):
        done = CliRunner().invoke(cli.app, [*line, *with_plugin])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "orbax" / "config.json").exists()


def test_a_plugin_that_is_not_there_or_breaks_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("1 / 0\n")
    for name, why in ((str(tmp_path / "no.py"), "no file"), (str(bad), "ZeroDivisionError")):
        for _ in range(2):
            with pytest.raises(ConfigError, match=re.escape(why)) as caught:
                load_plugins([name])
            assert caught.value.field == "plugins"
    with pytest.raises(ConfigError, match="jserve_no_such_module"):
        load_plugins(["jserve_no_such_module"])


def test_a_file_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "once.py"
    file.write_text("import os\nos.environ['ONCE'] = os.environ.get('ONCE', '') + 'x'\n")
    monkeypatch.setenv("ONCE", "")
    load_plugins([str(file), str(file)])
    import os

    assert os.environ["ONCE"] == "x"
