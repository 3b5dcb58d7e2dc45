"""Manifests of programs: what is listed, what differs, and that of a tiny model as the repository keeps it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jserve.cli import app
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.sizing.manifest import differences, manifest, read

KEPT = Path(__file__).with_name("manifest.json")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "n_pages": 40,
    "page_size": 8,
    "kernels": "xla",
    "prompt_logprobs": False,
}
"""Few programs, and nothing in them that depends on the machine."""


def made(
    tmp_path: Path, *, compiled: bool = False, model: Any = TINY, **options: Any
) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = EngineConfig.of(**OPTIONS | options)
    return manifest(str(tmp_path), config, lambda *_: None, compiled=compiled) | {"model": "tiny"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return made(tmp_path_factory.mktemp("tiny"))


def test_the_programs_are_those_that_the_repository_keeps(plain: dict[str, Any]) -> None:
    """A step that lowers to another text does so on purpose. Then write the file anew:
    ``python -m tests.sizing.test_manifest``."""
    assert list(differences(read(KEPT), plain)) == []


def test_the_same_engine_has_the_same_manifest(plain: dict[str, Any], tmp_path: Path) -> None:
    assert list(differences(plain, made(tmp_path))) == []


@pytest.mark.slow
def test_what_changes_is_named(plain: dict[str, Any], tmp_path: Path) -> None:
    wider = list(differences(plain, made(tmp_path, model={**TINY, "rope_theta": 5e5})))
    assert wider == [f"{name}: another program" for name in plain["programs"]]
    found = list(differences(plain, made(tmp_path, tensor_parallel_size=2)))
    assert any("all-reduce float32" in line for line in found)
    assert not any("another program" in line for line in found)
    fewer = copy.deepcopy(plain)
    name, _ = fewer["programs"].popitem()
    assert list(differences(plain, fewer)) == [f"{name}: gone"]
    assert list(differences(fewer, plain)) == [f"{name}: added"]
    other = copy.deepcopy(plain)
    other["made_by"]["jax"], other["programs"][name]["text"] = "9.9", "0"
    [line] = differences(plain, other)
    assert line.startswith("made_by: ")


@pytest.mark.slow
def test_a_layout_has_its_name_and_its_collectives(tmp_path: Path) -> None:
    """dp: those of one group. Of mode auto only XLA knows them."""
    rules = {"kv_heads": "x", "ffn": ["x", "y"], "vocab": ["x", "y"]}
    by_axes = {"mesh": {"dp": 2, "x": 2, "y": 2}, "rules": rules}
    found = made(tmp_path, sharding=by_axes)
    laid = "x=2,y=2 vocab:x+y kv_heads:x ffn:x+y ffn_expert:x+y"
    assert found["sharding"] == laid
    sums = {line for p in found["programs"].values() for line in p["collectives"]}
    assert any(line.endswith("over x") for line in sums)
    assert any(line.endswith("over x,y") for line in sums)
    narrow = made(tmp_path, sharding={**by_axes, "sums": "weights"})
    told = list(differences(found, narrow))
    assert any(line.startswith("sharding: ") and "sums:weights" in line for line in told)
    auto = {"mesh": {"x": 2}, "mode": "auto", "rules": {"kv_heads": "x", "embed": "x"}}
    one = made(tmp_path, sharding=auto)
    assert one["sharding"].startswith("x=2 kv_heads:x embed:x auto")
    assert all(not p["collectives"] for p in one["programs"].values())


SMALL = [
    f"--{name.replace('_', '-')}={value}"
    for name, value in OPTIONS.items()
    if name != "prompt_logprobs"
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_write_and_compare(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def ran(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*words])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        return done.exit_code, done.stdout

    files = [str(tmp_path / name) for name in ("one.json", "two.json")]
    split = ["--sharding", "tp=2"]
    for file, more in zip(files, ([], split), strict=True):
        words = ["compile", str(tmp_path), "--out", file, *SMALL, "--no-prompt-logprobs", *more]
        code, told = ran(*words)
        assert (code, file in told) == (0, True)
        programs = read(Path(file))["programs"].values()
        assert all(p["flops"] > 0 for p in programs)
    assert ran("manifest", "diff", files[0], files[0]) == (0, "")
    code, told = ran("manifest", "diff", *files)
    assert code == 1
    assert 'sharding: "tp=1" -> "tp=2 vocab:tp' in told
    assert "all-reduce float32" in told


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["compile", "MODEL", "--sharding", "tp=16"], "sharding.mesh"),
        (
            ["compile", "MODEL", "--sharding", '{"mesh":{"x":3},"rules":{"ffn":"x"}}'],
            "sharding.rules.ffn",
        ),
        (["manifest", "diff", "nothing.json", "nothing.json"], "nothing.json"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(
    words: list[str], name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    places = {"MODEL": str(tmp_path)}
    done = CliRunner().invoke(app, [places.get(word, word) for word in words])
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert name in done.output + str(done.exception)


@pytest.mark.slow
def test_figures_and_their_changes(tmp_path: Path) -> None:
    one = made(tmp_path, compiled=True)
    assert all(p["flops"] > 0 and p["bytes"] > 0 for p in one["programs"].values())
    two = made(tmp_path, compiled=True, model={**TINY, "intermediate_size": 128})
    assert all("flops" in line and "%" in line for line in differences(one, two))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "programs": {"a": 1}}', '{"format": 2, "programs": {}}']
)
def test_a_file_that_is_no_manifest_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.field == str(path)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        KEPT.write_text(json.dumps(made(Path(folder)), indent=1) + "\n")
