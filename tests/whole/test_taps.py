"""Values at points of the model, for requests that ask: those of a pass over the whole text, at any batch and
chunking; programs of others are untouched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import LLM, SamplingParams, functional, tap
from jserve.errors import BadRequest, ConfigError
from jserve.model import features
from jserve.model.features import register_feature
from jserve.model.hand import step_model
from jserve.model.step import make_step
from jserve.model.view import Bucket, buffer_size
from tests.whole.conftest import SMALL_OPTIONS

POINTS = ("blocks.0.hook_mlp_out", "blocks.1.hook_resid_post")
PROMPTS = ["the fox", " ".join(["the quick brown fox jumps over the lazy dog"] * 3)]
"""One of them longer than a chunk of prefill."""


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_REGISTERED", {})
        register_feature(tap("probe", *POINTS))
        register_feature(
            tap("size", "blocks.1.hook_resid_post", reduce=lambda x_PD: (x_PD**2).sum())
        )
        with LLM(str(tiny_dir), **SMALL_OPTIONS) as made:
            yield made


def asked(*names: str, **rest: Any) -> SamplingParams:
    extra = dict.fromkeys(names, True)
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=extra, **rest)


def whole(llm: LLM, out: Any) -> np.ndarray:
    """float32[tokens, points, D] of the text in one pass."""
    model = functional.model(json.loads((Path(llm.config.model.model) / "config.json").read_text()))
    ids = jnp.array([*out.prompt_token_ids, *out.outputs[0].token_ids])
    params = llm._engine.runner.params
    run = jax.jit(partial(functional.forward, model), static_argnames="taps")
    _, found = run(params, ids, jnp.zeros_like(ids), taps=POINTS)
    first = len(out.prompt_token_ids) - 1
    return np.stack([found[name][first:-1] for name in POINTS], axis=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_values_are_those_of_the_whole_text_at_any_batch_and_chunking(llm: LLM) -> None:
    params = [asked("probe"), asked("probe", "size"), asked()]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert llm._engine.runner.programs.late_compiles == 0  # type: ignore[attr-defined]
    for out in outs[:2]:
        found = np.array(out.outputs[0].extra["probe"], np.float32)
        np.testing.assert_allclose(found, whole(llm, out), rtol=1e-4, atol=1e-4)
    size = np.array(outs[1].outputs[0].extra["size"])
    want = (np.array(outs[1].outputs[0].extra["probe"])[:, 1] ** 2).sum(axis=1)
    np.testing.assert_allclose(size, want, rtol=1e-4)
    assert "size" not in outs[0].outputs[0].extra
    assert not outs[2].outputs[0].extra
    assert outs[2].outputs[0].token_ids == outs[0].outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_asked_is_checked(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="probe"):
        llm.generate("x", SamplingParams(extra_args={"probe": "all"}))


def test_a_plain_program_has_nothing_of_it(tiny_dir: Path) -> None:
    """The lowered step is the same text whether or not a tap is registered; only the tapped bucket's differs."""
    model = step_model(json.loads((tiny_dir / "config.json").read_text()))
    plain = Bucket(D=2, P=0, F=0)

    def text(bucket: Bucket) -> str:
        buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
        step = jax.jit(make_step(model, bucket), donate_argnums=1)
        return step.lower(model.abstract_params(), model.abstract_state(), buf).as_text()

    probe = tap("probe", *POINTS)
    before = text(plain)
    register_feature(probe)
    try:
        assert text(plain) == before
        assert text(plain.with_also(probe)) != before
    finally:
        features._REGISTERED.pop("probe")
    with pytest.raises(ConfigError, match="names no point") as caught:
        text(plain.with_also(tap("wrong", "blocks.9.hook_mlp_out")))
    assert caught.value.field == "wrong"
