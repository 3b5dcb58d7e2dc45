"""The text part of multimodal checkpoints is loaded under every prefix, and what sees images is left out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jserve.errors import WeightsError
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.weights.loader import load
from jserve.weights.source import resolve
from tests.weights.weights_kit import BF16, LLAMA, Model, same

TEXT = {k: v for k, v in LLAMA.items() if k not in ("architectures", "torch_dtype")} | {
    "sliding_window": 8
}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"hidden_size": 16},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
IMAGES = ("vision_tower.vision_model.head.weight", "multi_modal_projector.mm_soft_emb_norm.weight")


def loaded(model: Model, dtype: Any = BF16) -> Any:
    source = resolve(str(model.path))
    return load(model.family, model.arch, source, make_mesh(1), ShardRules(), dtype)


def assert_equal(got: Any, want: Any) -> None:
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert same(x, y), jax.tree_util.keystr(path)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_is_read(
    tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    want = loaded(Model(tmp_path / "plain", GEMMA).single())
    model = Model(tmp_path / "other", GEMMA)
    of_head = "" if prefix.startswith("model.") else "language_model."
    model.tensors = {
        (of_head if name.startswith("lm_head") else prefix) + name.removeprefix("model."): x
        for name, x in model.tensors.items()
    }
    model.tensors |= {name: np.zeros((2, 2), BF16) for name in IMAGES}
    assert_equal(loaded(model.single()), want)
    assert "2 tensors of images are not loaded" in caplog.text
    assert "unused" not in caplog.text


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    model = Model(tmp_path, GEMMA)
    model.tensors = {
        f"language_model.{name}": x
        for name, x in model.tensors.items()
        if name != "model.layers.1.mlp.up_proj.weight"
    }
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight: missing"):
        loaded(model.single())


@pytest.mark.parametrize("case", ["gemma3-of-a-multimodal-one", "llama4-of-a-multimodal-one"])
def test_what_transformers_writes_is_read(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.model import hf
    from tests.model.assembly import assemble_all
    from tests.model.more_cases import MORE

    architecture, switches = MORE[case]
    oracle, config = hf.tiny(architecture, **switches)
    oracle.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    family = family_for(source.config)
    arch = family.arch(source.config)
    assert arch == family.arch(config)
    got = load(family, arch, source, make_mesh(1), ShardRules(), np.float32)
    assert_equal(got, assemble_all(family.specs(arch, 1), hf.weights(oracle), np.float32))
    assert "unused" not in caplog.text
