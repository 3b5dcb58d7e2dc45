"""Planted faults of readers, products and KV: the tests that guard them turn red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.kv_bytes import decode, encode
from jserve.model.mesh import make_mesh
from jserve.weights.loader import load
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.model.test_quant import test_a_row_does_not_depend_on_the_others as check_rows
from tests.weights import plants, test_weights_quant
from tests.weights.test_weights_gguf import CONFIG as GGUF_CONFIG, Written as Gguf
from tests.weights.test_weights_quant import FORMATS, RULES, Written, assert_equal, loaded, wide


def check_matrices(path: Path, name: str, tp: int = 1) -> None:
    """As the tests of the formats."""
    if name in FORMATS:
        model: Any = Written(path, FORMATS[name])
        params = loaded(model, tp)
    else:
        path.mkdir()
        kinds = {f"blk.{i}.{n}.weight": name for i in (0, 1) for n in ("ffn_down", "attn_output")}
        model = Gguf(path, "llama", GGUF_CONFIG, kinds)
        source = resolve(str(model.path))
        scheme = scheme_of(source.config, jnp.float32)
        how = (source, make_mesh(tp), RULES, jnp.float32)
        params = load(quantised(model.family, scheme), model.arch, *how, scheme=scheme)
    want = assemble_all(model.family.specs(model.arch, tp), model.wide.__getitem__, jnp.float32)
    assert_equal(wide(params), want)


@pytest.mark.parametrize("name", plants.READ)
def test_matrices_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, fmt = plants.READ[name]
    check_matrices(tmp_path / "as it is", fmt)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_matrices(tmp_path / "planted", fmt)


def test_scales_that_are_not_repeated_with_kv_heads_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_matrices(tmp_path, "int-quantized", 4)
    monkeypatch.setattr(test_weights_quant, "load", plants.with_swapped_kv_scales(load))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_matrices(tmp_path, "int-quantized", 4)


def test_a_scale_per_tensor_of_activations_shows_in_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_rows("int8 rounded")
    plants.scale_per_tensor(monkeypatch)
    jax.clear_caches()
    try:
        with pytest.raises(AssertionError):
            check_rows("int8 rounded")
    finally:
        jax.clear_caches()


def test_the_kv_scale_of_another_head_shows_in_what_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 32)).astype(np.float32)
    x[:, 1] *= 3

    def off() -> float:
        return float(np.abs(decode(encode(jnp.asarray(x), 36), 32) - x).max())

    assert off() < 0.05
    plants.kv_scale_of_another_head(monkeypatch)
    assert off() > 0.5
