"""Every command on the pages: it exists, takes those flags, and runs here or in the test that is named."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from jserve import LLM, SamplingParams, cli_options
from jserve.build import shipped
from jserve.cli import app
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from tests.docs.pages import ROOT, Block, blocks

PORT = "http://127.0.0.1:8000"
BLOCKS = blocks("sh", "bash")
COMMANDS = [(b, words) for b in BLOCKS for words in b.commands()]
ELSEWHERE = {"serve": "tests/whole/test_serve.py", "chat": "tests/docs/test_commands.py"}
"""Commands that do not end by themselves: other tests run them."""
RESEARCH = ("compile", "manifest", "replay")
"""Of a tiny model, in the order of the page."""
LONG = ("bench", "convert", "generate", "quality", "quantize", "run-batch", "simulate")
FILES = ("in.jsonl", "out.jsonl", "out/", "steps.json", "report.json")
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}


def of(name: str, *, slow: bool = False) -> list[Any]:
    """The commands that begin with ``name``, as parameters of a test."""
    marks = [pytest.mark.slow, pytest.mark.timeout(900)] if slow else []
    found = [(b, [name, *words[1:]]) for b, words in COMMANDS if words[0].split("/")[-1] == name]
    return [
        pytest.param(words, id=f"{b.where} {' '.join(words)[:40]}", marks=marks)
        for b, words in found
    ]


def jserve(*names: str) -> Callable[[Any], bool]:
    return lambda param: param.values[0][1] in names


def test_only_known_programs_are_called() -> None:
    known = {"curl", "jserve", "mkdocs", "pip", "pyright", "python", "python3", "ruff"}
    assert {words[0].split("/")[-1] for _, words in COMMANDS} <= known


@pytest.mark.parametrize("words", of("jserve"))
def test_jserve_takes_these_flags(words: list[str]) -> None:
    assert isinstance(parsed(words), EngineConfig)


def test_a_flag_that_does_not_exist_would_be_seen() -> None:
    with pytest.raises(Exception, match="max-num-seqz"):
        parsed(["jserve", "serve", "--max-num-seqz", "64"])
    with pytest.raises(ConfigError):
        parsed(["jserve", "serve", "--max-num-seqs", "-1"])


def parsed(words: list[str]) -> EngineConfig:
    """The options that a command gives; raises what the parser and ``EngineConfig`` say of a wrong name or value."""
    command: Any = typer.main.get_command(app)
    args = cli_options.spread(words[1:])
    while hasattr(command, "commands"):
        command = command.commands[args.pop(0)]
    given = command.make_context("jserve", args).params
    flat = {name.replace("__", "."): v for name, v in given.items() if v is not None}
    return EngineConfig.of(
        **{k: v for k, v in flat.items() if k in {*EngineConfig().flat(), "speculative"}}
    )


@pytest.mark.parametrize("words", of("jserve"))
def test_each_of_them_runs_in_some_test(words: list[str]) -> None:
    assert words[1] in ("env", "plan", *LONG, *RESEARCH, *ELSEWHERE)
    assert words[1] not in ELSEWHERE or words[1] in run_by(ELSEWHERE[words[1]])


def run_by(path: str) -> set[str]:
    """The commands that the tests of a file run: in a process of their own, or by the parser of the command line."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if not isinstance(node, ast.List):
            continue
        words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
        if "jserve.cli" in words:
            found.add(str(words[words.index("jserve.cli") + 1]))
    calls = re.findall(r"""(?:invoke\(app|run\(), \[?["'](\w+)["']""", (ROOT / path).read_text())
    return found | {*calls}


def test_a_command_that_no_test_runs_would_be_seen() -> None:
    assert "serve" in run_by(ELSEWHERE["serve"])
    assert not {"quality", "server", "chat"} & run_by(ELSEWHERE["serve"])


@pytest.mark.parametrize("words", [p for p in of("jserve") if jserve("env", "plan")(p)])
def test_quick_ones_run(words: list[str], tmp_path: Path, monkeypatch) -> None:
    """Where they may leave files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    ran(words)


def test_a_simulation_runs() -> None:
    ran(next(p.values[0] for p in of("jserve") if jserve("simulate")(p)))


@pytest.mark.parametrize("words", [p for p in of("jserve", slow=True) if jserve(*LONG)(p)])
def test_long_ones_run(words: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    if {"trace.jsonl", "run.journal"} & set(words):
        pytest.skip("reads what a simulation or a server wrote; tests/sim/test_recorded.py does")
    (tmp_path / "in.jsonl").write_text(json.dumps(LINE) + "\n")
    model, files = str(shipped()), FILES
    places = {"path/to/hf-model": model, "my-model": model} | {f: str(tmp_path / f) for f in files}
    ran([places.get(word, word) for word in words])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_are_listed_and_a_journal_is_computed_again(
    tiny_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128}
    with LLM(str(tiny_dir), journal="run.journal", load_format="dummy", **small) as llm:
        llm.generate(["the fox", "a dog"], SamplingParams(max_tokens=8, logprobs=1))
    for param in of("jserve"):
        [words] = param.values
        if words[1] in RESEARCH:
            ran([str(tiny_dir) if word == "my-model" else word for word in words])
        if words[1] == "compile":
            (tmp_path / "other.json").write_bytes((tmp_path / "manifest.json").read_bytes())
    specs = ["--spec", "tp=1", "--spec", "tp=2", "--trace", "run.journal", "--live"]
    how = ["--load-format", "dummy", "--compile-cache", "", "--max-model-len", "128"]
    ran(["jserve", "bench", "shard", str(tiny_dir), *specs, *how, "--max-num-seqs", "2"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dialogue_runs(tiny_dir: Path) -> None:
    how = ["--load-format", "dummy", "--compile-cache", "", "--max-num-seqs", "2"]
    words = [str(tiny_dir), *how, "--max-model-len", "128", "--max-tokens", "4"]
    done = CliRunner().invoke(app, ["chat", *words], input="Hello\n/new\nHello\n/quit\nHello\n")
    assert done.exit_code == 0, done.output
    answers = done.stdout.strip("\n").split("\n")
    assert len(answers) == 2
    assert answers[0] == answers[1] != ""


def ran(words: list[str]) -> None:
    """In this process, without the plot: matplotlib is an extra."""
    if "--plot" in words:
        at = words.index("--plot")
        words = words[:at] + words[at + 2 :]
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", of("curl"))
def test_curl_gets_an_answer(words: list[str], url: str) -> None:
    words = [word.replace(PORT, url) for word in words]
    told = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stdout
    assert json.loads(told.stdout)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("words", of("pip"))
def test_what_is_installed_is_an_extra_of_ours_or_pinned_for_ci(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pins = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    for word in words[2:]:
        if extra := re.fullmatch(r"\.\[(\w+)\]", word):
            assert extra[1] in extras
        elif word.startswith("torch"):
            assert word in pins


@pytest.mark.parametrize("words", [*of("python"), *of("python3")])
def test_modules_tests_and_their_flags_exist(words: list[str]) -> None:
    if words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / w).exists() for w in words[3:] if w.startswith("tests"))
    elif words[1:3] != ["-m", "venv"]:
        script = words[1] if words[1] != "-m" else words[2].replace(".", "/") + ".py"
        text = (ROOT / script).read_text()
        missing = [w for w in words if w.startswith("--") and f'"{w}"' not in text]
        assert not missing


@pytest.mark.parametrize("words", of("mkdocs"))
def test_the_site_has_its_settings(words: list[str]) -> None:
    assert (ROOT / words[words.index("-f") + 1]).exists()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.where)
def test_what_is_not_run_has_a_reason(block: Block) -> None:
    assert block.mark != "slow", "commands are slow by what they are"
