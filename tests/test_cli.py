"""The command line as a user meets it: precedence of options, refusals in one line, exit codes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.flax import load_file, save_file
from typer.testing import CliRunner

from jserve import cli, cli_options, serve_commands
from jserve.config import EngineConfig, sections
from jserve.errors import ConfigError

run = CliRunner()


def test_what_is_left_to_the_device_differs_by_device():
    cpu, gpu = EngineConfig().on("cpu"), EngineConfig().on("gpu")
    assert (cpu.cache.page_size, cpu.scheduler.max_num_seqs) == (32, 32)
    assert (gpu.cache.page_size, gpu.scheduler.max_num_seqs) == (64, 256)
    assert cpu.scheduler.max_num_batched_tokens == 512
    assert gpu.scheduler.max_num_batched_tokens == 2048
    said = EngineConfig.of(page_size=16, max_num_seqs=5, max_num_batched_tokens=100)
    assert said.on("gpu") == said == said.on("cpu")


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "jserve.yaml"
    file.write_text("scheduler:\n  max-num-seqs: 3\n  overlap: 2\npage_size: 32\nport: 9\n")
    environ = {"JSERVE_MAX_NUM_SEQS": "4", "JSERVE_PAGE_SIZE": "64", "HOME": "/nowhere"}
    config = cli_options.resolve({"page_size": 128}, file, environ)
    assert config.cache.page_size == 128
    assert config.scheduler.max_num_seqs == 4
    assert config.scheduler.overlap == 2
    assert config.server.port == 9
    assert config.device == EngineConfig().device


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max_num_sqs: 3", "did you mean 'max_num_seqs'"),
        ("port: 70000", "port must be at most 65535"),
        ("overlap: [1]", "overlap must be int"),
        ("prefix_caching: maybe", "prefix_caching must be bool"),
        ("- a list", "must hold a mapping"),
        ("a: [", "jserve.yaml"),
    ],
)
def test_a_bad_file_is_refused_naming_the_option(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "jserve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=word):
        cli_options.resolve({}, file, {})


def test_served_names_from_a_file_from_the_environment_and_from_python(tmp_path: Path) -> None:
    file = tmp_path / "jserve.yaml"
    file.write_text("served_model_name: [a, b]\n")
    assert cli_options.resolve({}, file, {}).model.served_model_name == ("a", "b")
    environ = {"JSERVE_SERVED_MODEL_NAME": "c,d"}
    assert cli_options.resolve({}, file, environ).model.served_model_name == ("c", "d")
    for given in (["e", "f"], ("e", "f"), "e,f"):
        assert EngineConfig.of(served_model_name=given).model.served_model_name == ("e", "f")
    assert EngineConfig.of(served_model_name="").model.served_model_name == ()


def test_served_names_stand_behind_one_flag(tmp_path: Path) -> None:
    flag, model = "--served-model-name", str(tmp_path)
    for given, meant in (
        (["serve", model, flag, "a", "b"], ["serve", model, flag, "a", flag, "b"]),
        (["serve", flag, "a", "b", "--port", "9"], ["serve", flag, "a", flag, "b", "--port", "9"]),
        (["serve", f"{flag}=a", "b"], ["serve", f"{flag}=a", flag, "b"]),
        (["serve", flag, "a", model], ["serve", flag, "a", model]),
        (["serve", flag, "a", model, "--port", "9"], ["serve", flag, "a", model, "--port", "9"]),
        (["serve", flag, "a", flag, "b"], ["serve", flag, "a", flag, "b"]),
        (["serve", model, "--port", "9"], ["serve", model, "--port", "9"]),
        (["chat"], ["chat"]),
    ):
        assert cli_options.spread(given) == meant


def test_an_unknown_variable_is_reported_not_obeyed(capsys) -> None:
    assert cli_options.resolve({}, None, {"JSERVE_PROT": "1"}) == EngineConfig()
    assert "JSERVE_PROT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--tp", "2"], "tensor_parallel_size", 2),
        (["--block-size", "64"], "page_size", 64),
        (["--gpu-memory-utilization", "0.5"], "memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "prefix_caching", False),
        (["--enable-prefix-caching"], "prefix_caching", True),
        (["--max-num-queued-reqs", "7"], "max_waiting", 7),
        (["--sse-keep-alive-interval", "3"], "keep_alive_s", 3.0),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ("a", "b")),
    ],
)
def test_names_of_other_engines_are_taken(flags, name, value) -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @cli_options.with_options({})
    def take(config: EngineConfig) -> None:
        seen.append(config)

    assert run.invoke(app, flags).exit_code == 0
    assert seen[0].flat()[name] == value


def test_every_option_is_a_flag_of_serve() -> None:
    text = run.invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "400"}).output
    for name in EngineConfig().flat():
        if name != "model":
            assert f"--{name.replace('_', '-')}" in text, name


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (["serve", "--prt", "1"], "--port"),
        (["srve"], "serve"),
        (["serve", "--port", "x"], "port"),
        (["serve", "--port", "70000"], "port must be at most 65535"),
        (["serve", "/does/not/exist"], "/does/not/exist"),
        (["generate", "/does/not/exist", "-p", "x"], "/does/not/exist"),
        (["convert", "/does/not/exist", "/tmp/x"], "/does/not/exist"),
        (["serve", "--config", "/does/not/exist.yaml"], "/does/not/exist.yaml"),
        (["serve", "--load-format", "gguf"], "load_format must be one of"),
    ],
)
def test_bad_usage_is_one_clear_message_and_exit_code_2(line: list[str], word: str) -> None:
    result = run.invoke(cli.app, line, env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert word in result.output
    assert "Traceback" not in result.output


def test_a_full_scan_finds_one_bad_weight_before_anything_is_compiled(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(__file__).parent.parent / "checkpoints" / "jserve-mini", model)
    path, name = model / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name] = tensors[name].at[5, 7].set(np.nan)
    save_file(tensors, path)
    result = run.invoke(cli.app, ["generate", str(model), "--scan-nan", "full", "-p", "x"])
    assert result.exit_code == 2, result.output
    assert name in result.output
    assert "NaN" in result.output


def test_env_prints_facts_as_json() -> None:
    result = run.invoke(cli.app, ["env", "--json"])
    facts = json.loads(result.stdout)
    assert facts["backend"] == "cpu"
    assert facts["kernels"].startswith(("native, level ", "none: "))
    assert facts["jax"][0].isdigit()


def test_config_survives_its_flat_form() -> None:
    config = EngineConfig.of(page_size="32", api_key="a,b", prefix_caching="no", kv_memory_gb="0.5")
    assert EngineConfig.of(**config.flat()) == config
    assert config.server.api_key == ("a", "b")


LISTS = [n for n, value in EngineConfig().flat().items() if isinstance(value, tuple)]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    ("text", "items"),
    [("", ()), (",", ()), ("a", ("a",)), ("a,,b,", ("a", "b"))],
)
def test_empty_text_is_no_item_of_a_list(
    tmp_path: Path, name: str, text: str, items: tuple
) -> None:
    """As a variable, as what a flag gives (one text per use), and both ways in YAML."""
    listed = text.split(",")
    file = tmp_path / "jserve.yaml"
    configs = [
        cli_options.resolve({}, None, {f"JSERVE_{name.upper()}": text}),
        cli_options.resolve({name: listed}, None, {}),
    ]
    for value in (text, listed):
        file.write_text(json.dumps({name: value}))
        configs.append(cli_options.resolve({}, file, {}))
    assert [config.flat()[name] for config in configs] == [items] * 4


@pytest.mark.parametrize("value", [None, 7, {"a": "b"}, [None], [["a"]], [True]])
def test_what_is_no_list_of_texts_is_refused(value: object) -> None:
    for name in LISTS:
        with pytest.raises(ConfigError, match=f"{name} must be"):
            EngineConfig.of(**{name: value})


def test_every_option_has_one_line_of_help() -> None:
    import dataclasses

    for _, options in sections():
        for f in dataclasses.fields(options):
            assert 5 < len(f.metadata["help"]) < 90, f.name


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative.method": "ngram", "speculative.num_tokens": 4},
        {"speculative": '{"method": "ngram", "num_speculative_tokens": 4}'},
        {"speculative": "ngram", "speculative.num_tokens": "4"},
        {"speculative": '{"method": "suffix", "num-tokens": 4}', "speculative.method": "ngram"},
    ],
)
def test_speculative_options_come_together_or_one_by_one(flags) -> None:
    options = cli_options.resolve(flags, None, {}).speculative
    assert (options.method, options.num_tokens) == ("ngram", 4)


def test_layers_of_speculative_options_win_whole_names(tmp_path: Path) -> None:
    file = tmp_path / "jserve.yaml"
    file.write_text("speculative:\n  method: suffix\n  num-tokens: 3\n  suffix_min_match: 5\n")
    environ = {"JSERVE_SPECULATIVE_NUM_TOKENS": "6"}
    config = cli_options.resolve({"speculative": '{"method": "ngram"}'}, file, environ)
    options = config.speculative
    assert (options.method, options.num_tokens, options.suffix_min_match) == ("ngram", 6, 5)
    assert EngineConfig.of(**config.flat()) == config
    assert EngineConfig.of(speculative={"method": "ngram", "num_tokens": 2}).n_drafts == 2
    assert (
        EngineConfig.of(speculative_config={"method": "draft_model"}).speculative.method == "draft"
    )
    assert EngineConfig().n_drafts == 0


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("{", "speculative is not valid JSON"),
        ('{"methd": "ngram"}', "did you mean 'speculative.method'"),
        ('{"num_tokens": 99}', "speculative.num_tokens must be at most 15"),
        ("magic", "speculative.method must be one of off, ngram"),
        (["ngram"], "speculative must be a JSON object or a method"),
    ],
)
def test_a_bad_speculative_option_is_refused_naming_it(given, word) -> None:
    with pytest.raises(ConfigError, match=word):
        EngineConfig.of(speculative=given)


def test_run_batch_refuses_before_it_loads_anything(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    missing = run.invoke(cli.app, ["run-batch", str(tmp_path / "none"), "-o", str(target)])
    assert (missing.exit_code, target.exists()) == (2, False)
    source.write_text(line)
    same = run.invoke(cli.app, ["run-batch", str(source), "-o", str(source)])
    assert (same.exit_code, source.read_text()) == (2, line)


def test_run_batch_with_nothing_left_says_how_it_went(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"custom_id": "a", "method": "POST", "url": "/x", "body": {}}\n')
    for status, code in ((200, 0), (400, 1)):
        response = {"status_code": status, "request_id": "", "body": {}}
        target.write_text(json.dumps({"custom_id": "a", "response": response, "error": None}))
        done = run.invoke(cli.app, ["run-batch", str(source), "-o", str(target)])
        assert done.exit_code == code, done.output
        assert f"1 of 1 lines answered, {code} failed" in done.output


def test_a_batch_needs_no_key_and_has_room() -> None:
    config = cli.offline(EngineConfig.of(api_key="k", api_keys_file="keys.yaml", page_size=32))
    assert (config.server.api_key, config.server.api_keys_file) == ((), "")
    assert config.server.max_body_mb == 1024
    assert config.cache.page_size == 32


def test_the_options_of_health_and_readiness_reach_the_engine(monkeypatch) -> None:
    seen: dict = {}

    def engine(client, **options):
        seen.update(options)
        raise ConfigError("seen")

    monkeypatch.setattr("jserve.engine.async_engine.AsyncEngine", engine)
    given = {
        "ready_failed_steps": 2,
        "ready_nonfinite_share": 0.3,
        "ready_slowness": 4.0,
        "ready_step_s": 5.0,
    }
    config = EngineConfig.of(**given, max_restarts=1, stall_timeout_s=50.0)
    with pytest.raises(ConfigError, match="seen"):
        asyncio.run(serve_commands._serve(config, None, None))  # type: ignore[arg-type]
    limits = dataclasses.asdict(seen.pop("health"))
    assert {f"ready_{name}": value for name, value in limits.items()} == given
    assert seen == {"max_restarts": 1, "stall_timeout_s": 50.0}
