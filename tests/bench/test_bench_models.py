"""The dummy models: complete, seeded, and readable by the libraries the engines use."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from bench import models
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.weights.loader import load
from jserve.weights.source import resolve

TINY = dataclasses.replace(
    models.SHAPES["llama-60m"], layers=2, hidden=64, heads=2, kv_heads=1, ffn=96, head_dim=32
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write(tmp_path_factory.mktemp("models") / "tiny", TINY, seed=1)


def test_sizes_of_the_two_models() -> None:
    assert models.n_params(models.SHAPES["llama-60m"]) == pytest.approx(59e6, rel=0.01)
    # 2.08 GB in bf16
    assert models.n_params(models.SHAPES["llama-1b"]) == pytest.approx(1.04e9, rel=0.005)


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = models.write(tmp_path / "again", TINY, seed=1)
    other = models.write(tmp_path / "other", TINY, seed=2)
    digests = [
        hashlib.sha256((f / "model.safetensors").read_bytes()).hexdigest()
        for f in (folder, again, other)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_weights_match_the_config(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert {n: t.shape for n, t in tensors.items()} == dict(models.tensors(TINY))
    assert {str(t.dtype) for t in tensors.values()} == {"bfloat16"}
    up = tensors["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    assert up.std() == pytest.approx(64**-0.5, rel=0.05)
    embed = tensors["model.embed_tokens.weight"].astype(np.float32)
    assert not embed[: models.FIRST_WORD].any(), "greedy decoding must never pick these"
    assert embed[models.FIRST_WORD :].any(axis=1).all()


def test_every_word_of_the_tokenizer_is_plain_text_and_reachable(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocab == models.VOCAB
    rng = np.random.default_rng(0)
    for i in [models.FIRST_WORD, models.VOCAB - 1, *rng.integers(models.FIRST_WORD, 32000, 300)]:
        text = tokenizer.decode([int(i)])
        assert 2 <= len(text) <= 5
        assert text.isascii()
        assert tokenizer.encode(text, add_special_tokens=False).ids == [i]
    text = "Grüße, abc 12 – 日本 xyz"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_facts_are_read_from_the_headers(folder: Path) -> None:
    facts = models.facts(folder)
    assert facts["name"] == "tiny"
    assert facts["head_params"] == 32000 * 64
    assert facts["head_params"] + facts["body_params"] == models.n_params(TINY)
    assert facts["weight_bytes"] == pytest.approx(2 * models.n_params(TINY), rel=0.01)


def test_experts_have_their_names_and_are_counted_as_far_as_a_token_chooses_them(
    tmp_path: Path,
) -> None:
    shape = dataclasses.replace(TINY, experts=4, chosen=2)
    folder = models.write(tmp_path / "moe", shape)
    source = resolve(str(folder))
    family = family_for(source.config)
    assert family.name == "granite_moe"
    load(family, family.arch(source.config), source, make_mesh(1), ShardRules(), jnp.bfloat16)
    facts = models.facts(folder)
    idle = 2 * 2 * 3 * 96 * 64  # of two layers two experts of three matrices
    assert facts["body_params"] + facts["head_params"] == models.n_params(shape) - idle
    assert facts["read_bytes"] == facts["weight_bytes"] - 2 * idle
    (folder / "model.safetensors").unlink()
    assert models.facts(folder)["body_params"] == facts["body_params"]


def test_a_folder_with_weights_is_not_overwritten(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        models.write(folder, TINY, seed=9)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_facts_of_a_broken_folder_name_it(folder: Path, tmp_path: Path, broken: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(b"" if file.name == broken else file.read_bytes())
    with pytest.raises(ValueError, match=tmp_path.name):
        models.facts(tmp_path)


@pytest.mark.slow
def test_transformers_loads_and_generates(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["head_dim"] == 32
    out = model.generate(torch.tensor([[300, 301, 302]]), max_new_tokens=8, do_sample=False)
    assert (out[0, 3:] >= models.FIRST_WORD).all()
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == models.VOCAB


def test_a_model_without_weights_says_what_it_would_have(tmp_path: Path) -> None:
    whole = models.write(tmp_path / "a" / "m", TINY, seed=1)
    empty = models.write(tmp_path / "b" / "m", TINY, weights=False)
    assert not list(empty.glob("*.safetensors"))
    told, read = models.facts(empty), models.facts(whole)
    header = read["weight_bytes"] - told["weight_bytes"]
    assert 0 < header < 8192
    assert told | {"weight_bytes": 0, "read_bytes": 0} == read | {
        "weight_bytes": 0,
        "read_bytes": 0,
    }
    untied = models.write(
        tmp_path / "c" / "m", dataclasses.replace(TINY, tied=False), weights=False
    )
    table = TINY.vocab * TINY.hidden * 2
    assert models.facts(untied)["weight_bytes"] == told["weight_bytes"] + table


def test_the_8b_shape_has_the_parameters_of_llama() -> None:
    assert models.n_params(models.SHAPES["llama-8b"]) == 8_030_261_248
