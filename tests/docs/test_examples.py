"""Every example runs, says what it is for and how it is started, and does what it says."""

from __future__ import annotations

import ast
import json
import math
import runpy
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from jserve.model import families
from tests.docs.pages import ROOT, posted

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CLIENTS = ("streaming_client", "structured_output", "tools")


def start(name: str, *args: str) -> None:
    """``python examples/NAME.py ARGS`` in this process."""
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="example")["main"](*args)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_it_is_short_and_says_how_it_is_started(path: Path) -> None:
    text = path.read_text()
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert len(text.splitlines()) <= 140
    assert path.stem in Path(__file__).read_text(), "no test runs it"


@pytest.mark.parametrize("name", CLIENTS)
def test_clients(name: str, url: str, capsys) -> None:
    start(name, url)
    said = capsys.readouterr().out
    signs = {"streaming_client": "first text", "structured_output": "days in", "tools": "add("}
    assert signs[name] in said


@pytest.mark.slow
def test_offline_batch(tiny_dir: Path, in_root: Callable, capsys) -> None:
    in_root(tiny_dir)
    start("offline_batch")
    assert [line[:12] for line in capsys.readouterr().out.splitlines()] == [
        "What is 2 + ",
        "What is 12 +",
        "What is 7 + ",
    ]


@pytest.mark.slow
def test_step_feature(tiny_dir: Path, in_root: Callable, capsys) -> None:
    in_root(tiny_dir)
    start("step_feature")
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(0 < float(line.split()[0]) < math.log(320) for line in lines)


def test_step_feature_over_http(url: str) -> None:
    asked = {"prompt": "the fox", "max_tokens": 8, "ignore_eos": True, "vllm_xargs": {"entropy": 1}}
    choice = json.load(posted(f"{url}/v1/completions", asked))["choices"][0]
    assert len(choice["extra"]["entropy"]) == 8
    assert all(0 < nats < math.log(320) for nats in choice["extra"]["entropy"])
    with pytest.raises(urllib.error.HTTPError) as caught:
        posted(f"{url}/v1/completions", {**asked, "vllm_xargs": {"entropy": "hot"}})
    assert json.load(caught.value)["error"]["param"] == "vllm_xargs.entropy"


@pytest.mark.slow
def test_own_family(neox_dir: Path, in_root: Callable, capsys) -> None:
    in_root(neox_dir)
    start("own_family", str(neox_dir))
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_sharded(capsys) -> None:
    start("sharded")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert len({line.split(": ")[1] for line in lines}) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_step_by_hand(in_root: Callable, capsys) -> None:
    in_root(None)
    start("step_by_hand")
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("entering layer") for line in lines[:6]] == [True] * 5 + [False]
    assert "".join(lines[5:]).strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_live_weights(in_root: Callable, capsys) -> None:
    in_root(None)
    start("live_weights")
    before, _, after = capsys.readouterr().out.splitlines()
    assert "in training" not in before
    assert after == "after: ' A model in training.'"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_probe(in_root: Callable, capsys) -> None:
    in_root(None)
    start("probe")
    lines = capsys.readouterr().out.splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert said["blocks.4.hook_resid_post"].startswith("'<think>'")
    assert said["steered by 0"].startswith("'<think>'")
    assert not said["steered by 4"].startswith("'<think>'")


MODULES = ("own_module", "own_linen", "own_equinox")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_other_libraries(name: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "own_equinox":
        pytest.importorskip("equinox")
    monkeypatch.setattr(families, "_FAMILIES", {**families._FAMILIES})
    monkeypatch.syspath_prepend(ROOT / "examples")
    if name == "own_linen":
        start("own_check", name)
    else:
        start(name)
    assert capsys.readouterr().out.count("24 tokens are those of the module's own loop") == 2


@pytest.mark.parametrize("name", MODULES)
def test_serving_a_module_takes_few_lines(name: str) -> None:
    tree = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    register = functions["register"]
    assert 0 < (register.end_lineno or 0) - register.lineno < 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_grpo_learns_and_does_so_again(in_root: Callable, capsys) -> None:
    in_root(None)
    curves = []
    for _ in range(2):
        start("grpo")
        lines = capsys.readouterr().out.splitlines()
        curves.append(lines)
    assert curves[0] == curves[1]
    *updates, end = curves[0]
    assert len(updates) == 20
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in [*updates, end]]
    assert max(rewards[-5:]) >= rewards[0] + 0.3
    assert all(float(line.rsplit(" ", 1)[1]) <= 1e-4 for line in updates)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CLIENTS)
def test_clients_of_the_shipped_model(name: str, shipped_url: str, capsys) -> None:
    start(name, shipped_url)
    assert capsys.readouterr().out
