"""Every fault of a model directory: refused (or survived) at load, naming file and tensor."""

from __future__ import annotations

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.weights.hf import dtype_name, read_generation_config
from jserve.weights.loader import load
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.weights.weights_kit import BF16, LLAMA, Model

INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"
SHARD1, SHARD2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def start(path: Path, **options: Any) -> Any:
    """What a server does before its port opens."""
    source = resolve(str(path))
    scheme = scheme_of(source.config, BF16)
    family = quantised(family_for(source.config), scheme)
    arch = family.arch(source.config)
    how = options | {"scheme": scheme}
    return load(family, arch, source, make_mesh(2), ShardRules(), BF16, **how)


def drop(name: str) -> Any:
    return lambda m: (m.tensors.pop(name), m.single())


def reshape(name: str, shape: tuple[int, ...]) -> Any:
    return lambda m: (m.tensors.update({name: np.resize(m.tensors[name], shape)}), m.single())


def retype(name: str, dtype: Any) -> Any:
    def make(m: Model) -> None:
        m.tensors[name] = np.zeros(m.tensors[name].shape, dtype)
        m.single()

    return make


def cut(name: str, size: int) -> Any:
    """Two shards, one truncated to ``size`` bytes (from its end if negative)."""

    def make(m: Model) -> None:
        m.sharded(2)
        path = m.path / name
        os.truncate(path, size + (path.stat().st_size if size < 0 else 0))

    return make


def reindex(change: Any) -> Any:
    """Change the parsed index of two good shards."""

    def make(m: Model) -> None:
        m.sharded(2)
        index = json.loads((m.path / INDEX).read_text())
        m.write_json(INDEX, change(index) or index)

    return make


def index_text(text: str) -> Any:
    return lambda m: (m.sharded(2), (m.path / INDEX).write_text(text))


def point(shard: Any, tensor: str = Q) -> Any:
    return reindex(lambda index: index["weight_map"].update({tensor: shard}))


def config(**changes: Any) -> Any:
    return lambda m: (m.single(), m.write_json("config.json", m.config | changes))


def config_text(data: bytes) -> Any:
    return lambda m: (m.single(), (m.path / "config.json").write_bytes(data))


def outside(m: Model) -> None:
    """The index points at a good shard outside the directory."""
    m.sharded(2)
    (m.path / SHARD1).rename(m.path.parent / "x.safetensors")
    text = (m.path / INDEX).read_text()
    (m.path / INDEX).write_text(text.replace(SHARD1, "../x.safetensors"))


def same_file(m: Model) -> None:
    point("copy.safetensors")(m)
    (m.path / "copy.safetensors").symlink_to(m.path / SHARD1)


def nan(m: Model) -> None:
    m.tensors[Q][:] = np.nan
    m.single()


def pickled(m: Model) -> None:
    (m.path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))


class Trap:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("UNPICKLED",)


ONE = "model.safetensors"
LAST = "model.layers.1.self_attn.v_proj.weight"
# name: (what to break, file at fault, tensor at fault, part of the message)
FAULTS: dict[str, tuple[Any, str, str | None, str]] = {
    "truncated shard": (cut(SHARD2, -10), SHARD2, LAST, "truncated"),
    "shard cut in its header": (cut(SHARD1, 200), SHARD1, None, "truncated"),
    "missing tensor": (drop(Q), ONE, Q, "missing"),
    "missing lm_head, not tied": (drop("lm_head.weight"), ONE, "lm_head.weight", "missing"),
    "wrong shape": (reshape(Q, (64, 31)), ONE, Q, "(64, 31), the config asks for (64, 32)"),
    "transposed": (reshape(Q, (32, 64)), ONE, Q, "(32, 64)"),
    "vocabulary rows": (
        reshape("model.embed_tokens.weight", (63, 32)),
        ONE,
        "model.embed_tokens.weight",
        "(63, 32), the config asks for (64, 32)",
    ),
    "lm_head rows": (reshape("lm_head.weight", (65, 32)), ONE, "lm_head.weight", "(65, 32)"),
    "integer weights": (retype(Q, np.int8), ONE, Q, "dtype int8"),
    "float8 weights": (retype(Q, ml_dtypes.float8_e4m3fn), ONE, Q, "dtype float8"),
    "NaN weights": (nan, ONE, Q, "NaN"),
    "shard missing": (
        lambda m: (m.sharded(2), (m.path / SHARD2).unlink()),
        SHARD2,
        None,
        "missing",
    ),
    "shard outside": (outside, INDEX, "", "not a plain file name"),
    "shard absolute": (point("/etc/passwd"), INDEX, Q, "not a plain file name"),
    "shard ..": (point(".."), INDEX, Q, "not a plain file name"),
    "shard with backslash": (point("..\\x.safetensors"), INDEX, Q, "not a plain file name"),
    "shard with NUL": (point("a\0.safetensors"), INDEX, Q, "not a plain file name"),
    "shard is a pickle": (point("pytorch_model.bin"), INDEX, Q, "not a safetensors file"),
    "shard is a number": (point(7), INDEX, Q, "not a file name"),
    "shard listed twice": (same_file, INDEX, None, "listed twice"),
    "tensor not in its shard": (
        point(SHARD2, "lm_head.weight"),
        SHARD2,
        "lm_head.weight",
        "puts it",
    ),
    "tensor listed twice": (
        index_text(f'{{"weight_map": {{"a": "{SHARD1}", "a": "{SHARD2}"}}}}'),
        INDEX,
        "a",
        "listed twice",
    ),
    "index without a map": (reindex(lambda i: {"metadata": {}}), INDEX, None, "weight_map"),
    "index with an empty map": (reindex(lambda i: {"weight_map": {}}), INDEX, None, "weight_map"),
    "index with a list": (reindex(lambda i: {"weight_map": [1]}), INDEX, None, "weight_map"),
    "index not JSON": (index_text('{"weight_map": {'), INDEX, None, "not JSON"),
    "index is a list": (index_text("[]"), INDEX, None, "not a JSON object"),
    "only pickled weights": (pickled, "pytorch_model.bin", None, "save them as safetensors"),
    "no weights": (lambda m: None, ONE, None, "no *.safetensors"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_broken_weights_are_refused(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, file, tensor, says = FAULTS[case]
    model = Model(tmp_path / "m", LLAMA)
    make(model)
    with pytest.raises(WeightsError) as caught:
        start(model.path)
    error = caught.value
    field = str(model.path / file)
    assert error.field is not None
    if tensor == "":
        assert error.field.startswith(f"{field}:")
    else:
        assert error.field == (f"{field}:{tensor}" if tensor else field)
        assert tensor is None or tensor in error.message
    assert says.lower() in error.message.lower()
    assert file in error.message or case == "no weights"
    assert "\n" not in error.message
    assert not (tmp_path / "UNPICKLED").exists()


CONFIG_FAULTS: dict[str, tuple[Any, str | None, str]] = {
    "missing": (lambda m: (m.single(), (m.path / "config.json").unlink()), None, "No such file"),
    "a directory": (
        lambda m: (m.single(), (m.path / "config.json").unlink(), (m.path / "config.json").mkdir()),
        None,
        "directory",
    ),
    "truncated": (config_text(b'{"architectures": ["Llama'), None, "not JSON"),
    "empty": (config_text(b""), None, "not JSON"),
    "not UTF-8": (config_text(b'{"a": "\xff\xfe"}'), None, "not JSON"),
    "a list": (config_text(b"[]"), None, "not a JSON object"),
    "too deep": (config_text(b"[" * 200_000), None, "not JSON"),
    "huge number": (config_text(b'{"a": ' + b"9" * 10_000 + b"}"), None, "not JSON"),
    "no architecture": (config(architectures=None), "architectures", "missing"),
    "architecture is a number": (config(architectures=3), "architectures", ""),
    "unknown architecture": (config(architectures=["FooForCausalLM"]), "architectures", "FooFor"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads", "at least 1"),
    "heads are text": (config(num_attention_heads="8"), "num_attention_heads", "integer"),
    "heads are true": (config(num_attention_heads=True), "num_attention_heads", "integer"),
    "kv heads do not divide": (config(num_key_value_heads=3), "num_key_value_heads", "divide"),
    "head_dim odd": (config(head_dim=7), "head_dim", ""),
    "rope_theta NaN": (config(rope_theta=float("nan")), "rope_theta", "finite"),
    "rope_theta negative": (config(rope_theta=-1.0), "rope_theta", ""),
    "quantised": (
        config(quantization_config={"quant_method": "hqq"}),
        "quantization_config.quant_method",
        "only auto-round, awq",
    ),
    "no vocabulary": (config(vocab_size=None), "vocab_size", "missing"),
}


@pytest.mark.parametrize("case", CONFIG_FAULTS)
def test_broken_config_is_refused(tmp_path: Path, case: str) -> None:
    make, key, says = CONFIG_FAULTS[case]
    model = Model(tmp_path / "m", LLAMA)
    make(model)
    with pytest.raises(ConfigError) as caught:
        start(model.path)
    assert caught.value.field == (key or str(model.path / "config.json"))
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_head_dim_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", LLAMA)
    config(head_dim=16)(model)
    with pytest.raises(WeightsError, match=r"o_proj.*\(32, 64\), the config asks for \(32, 128\)"):
        start(model.path)


# ---- what is survived --------------------------------------------------------------------------


def test_extra_tensors_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(tmp_path / "m", LLAMA)
    model.tensors["model.layers.0.extra.weight"] = np.zeros(3, np.float32)
    model.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    model.single()
    with caplog.at_level(logging.WARNING):
        start(model.path)
    (record,) = [r.getMessage() for r in caplog.records if r.name.startswith("jserve")]
    assert "1 unused tensors: model.layers.0.extra.weight" in record


def test_lm_head_beside_tied_embeddings_is_fine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(tmp_path / "m", LLAMA | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in model.tensors
    model.tensors["lm_head.weight"] = np.zeros((64, 32), BF16)
    model.single()
    with caplog.at_level(logging.WARNING):
        params = start(model.path)
    assert not [r for r in caplog.records if r.name.startswith("jserve")]
    assert "lm_head" not in params


@pytest.mark.parametrize("text", ["{", "[]", "", '"x"', "\xff"])
def test_broken_generation_config_is_ignored(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(tmp_path / "m", LLAMA).single()
    (model.path / "generation_config.json").write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert resolve(str(model.path)).generation == {}
    assert any("generation_config.json" in r.getMessage() for r in caplog.records)
    start(model.path)


def test_good_generation_config_is_read(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_generation_config(tmp_path) == {"temperature": 0.6}


def test_code_in_the_directory_is_never_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model(tmp_path / "m", LLAMA).single()
    trap = f"open({str(tmp_path / 'RAN')!r}, 'w')"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py", "sitecustomize.py"):
        (model.path / name).write_text(trap)
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "configuration_evil.C"}
    model.write_json("config.json", model.config | {"auto_map": auto_map})
    (model.path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    start(model.path)
    assert not (tmp_path / "RAN").exists()
    assert not (tmp_path / "UNPICKLED").exists()


def test_refusal_comes_before_any_weight_is_read(tmp_path: Path) -> None:
    """A missing tensor at the end is found before the first parameter is put on a device."""
    model = Model(tmp_path / "m", LLAMA)
    del model.tensors["model.norm.weight"]
    model.single()
    loaded: list[Any] = []
    with pytest.raises(WeightsError):
        start(model.path, progress=lambda *step: loaded.append(step))
    assert not loaded


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float32"}, "float32"),
        ({}, "float32"),
    ],
)
def test_dtype_name(given: dict[str, Any], name: str) -> None:
    assert dtype_name(given) == name


def test_dtype_name_refuses_others() -> None:
    for value in ("int8", "float8_e4m3fn", ["bfloat16"], 16):
        with pytest.raises(ConfigError) as caught:
            dtype_name({"dtype": value})
        assert caught.value.field == "dtype"
