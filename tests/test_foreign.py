"""Launch flags of other engines: one message about all of them, and advice that is true."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from jserve import cli, cli_options, foreign
from jserve.config import EngineConfig

run = CliRunner()


def flags_of(command: str) -> set[str]:
    found = typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    return {flag for param in found.params for flag in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize(
    "line",
    [
        ["serve", "m", "--enforce-eager", "--max_logprobs=20", "-ngl", "99", "--prt", "1", "--foo"],
        ["generate", "--enforce-eager", "-p", "x", "--max-logprobs", "3", "-ngl", "9", "--foo"],
    ],
)
def test_all_foreign_flags_are_answered_at_once(line: list[str]) -> None:
    result = run.invoke(cli.app, line, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    said = result.output.splitlines()
    assert said[0] == "error: not options of jserve:"
    named = [text.split(":")[0].strip() for text in said[1:]]
    assert named[:3] == ["--enforce-eager", "--max-logprobs", "-ngl"]
    assert "  --foo: no such option" in said
    assert "did you mean --port?" in result.output or "generate" in line


def test_a_misspelt_flag_alone_is_the_parsers() -> None:
    assert foreign.message(["--prt", "1"], {"--port"}) == ""
    assert foreign.message(["--", "--enforce-eager"], {"--port"}) == ""
    assert foreign.message(["--tensor_parallel_size", "2"], {"--tensor-parallel-size"}) == ""


def test_advice_names_flags_that_exist_and_answers_for_none_of_ours() -> None:
    ours = flags_of("serve")
    assert not ours & set(foreign.ADVICE)
    for flag, advice in foreign.ADVICE.items():
        named = set(re.findall(r"--[a-z][a-z.-]*[a-z]", advice))
        assert named <= ours, flag


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("dtype", "bf16", "bfloat16"),
        ("kv_cache_dtype", "fp8", "fp8_e4m3"),
        ("reasoning_parser", "qwen3", "think"),
        ("reasoning_parser", "deepseek_r1", "think"),
        ("tool_call_parser", "llama3_json", "llama3"),
    ],
)
def test_values_of_other_engines_that_mean_one_of_ours_are_taken(option, given, meant) -> None:
    assert EngineConfig.of(**{option: given}).flat()[option] == meant
    config = cli_options.resolve({option: given}, None, {})
    assert config.flat()[option] == meant
