"""Requests that change the residual stream: a text run with the same change, at any batch and chunking; KV apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import LLM, SamplingParams, functional, steering, tap
from jserve.config import EngineConfig
from jserve.errors import BadRequest, ConfigError
from jserve.model import features
from jserve.model.features import register_feature
from jserve.model.hand import step_model
from jserve.model.step import make_step
from jserve.model.view import Bucket, buffer_size
from jserve.sched.cache import handles as caching
from jserve.sched.scheduler import Scheduler
from jserve.types import Request
from tests.fleet.fakes import LIMITS
from tests.whole.conftest import SMALL_OPTIONS

POINT = "blocks.0.hook_resid_post"
D = 32
RNG = np.random.default_rng(3)
CALM = RNG.standard_normal(D).astype(np.float32)
OTHER = RNG.standard_normal(D).astype(np.float32)
PROMPT = " ".join(["the quick brown fox jumps over the lazy dog"] * 3)
"""Longer than a chunk of prefill."""


def made(mode: str = "add", **rest: Any) -> Any:
    return steering("mood", POINT, vectors={"calm": CALM}, mode=mode, **rest)


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_REGISTERED", {})
        register_feature(made(most=2))
        register_feature(steering("fixed", POINT, vectors={"calm": CALM}, mode="replace"))
        register_feature(steering("less", POINT, vectors={"calm": CALM}, mode="project"))
        register_feature(tap("seen", POINT))
        options = {**SMALL_OPTIONS, "max_num_seqs": 4}
        with LLM(str(tiny_dir), **options, dtype="float32", page_size=16) as engine:
            yield engine


def params(n: int = 6, **extra: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=n, ignore_eos=True, logprobs=0, extra_args=extra
    )


def drawn(out: Any) -> tuple[list[int], np.ndarray]:
    (answer,) = out.outputs
    logprobs = [
        at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    return list(answer.token_ids), np.array(logprobs)


def expected(llm: LLM, out: Any, changed: Any) -> np.ndarray:
    """Log-probabilities of the drawn tokens in one pass over the whole text whose stream ``changed`` changes."""
    model = functional.model(json.loads((Path(llm.config.model.model) / "config.json").read_text()))
    ids = jnp.array([*out.prompt_token_ids, *out.outputs[0].token_ids])
    weights = llm._engine.runner.params  # type: ignore[attr-defined]
    run = jax.jit(partial(functional.forward, model), static_argnames="taps")
    _, found = run(weights, ids, jnp.zeros_like(ids), taps=(POINT,))
    stream = found[POINT]
    x_TD = run(weights, ids, jnp.zeros_like(ids), add={POINT: changed(stream) - stream})
    logits = functional.unembed(model, weights, x_TD)
    logprobs = jax.nn.log_softmax(logits)
    first = len(out.prompt_token_ids) - 1
    at = jnp.arange(first, len(ids) - 1)
    return np.asarray(logprobs[at, ids[first + 1 :]])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steered_and_plain_rows_share_steps_and_no_kv(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, together = llm._engine.runner, []  # type: ignore[attr-defined]
    launch = runner.launch

    def noted(plan: Any) -> Any:
        params = [row.choice.request.params for row in plan.rows]
        together.append({*(name for one in params for name in (one.extra_args or {"plain": 0}))})
        return launch(plan)

    monkeypatch.setattr(runner, "launch", noted)
    along = CALM / np.linalg.norm(CALM)
    cases = {
        "plain": ({}, lambda x: x),
        "named": ({"mood": ["calm", 2.0]}, lambda x: x + 2 * CALM),
        "two": ({"mood": ["calm", 1.0, OTHER.tolist(), -1.5]}, lambda x: x + CALM - 1.5 * OTHER),
        "given": ({"mood": [OTHER.tolist(), 1.0]}, lambda x: x + OTHER),
        "fixed": ({"fixed": ["calm", 1.5]}, lambda x: jnp.broadcast_to(1.5 * CALM, x.shape)),
        "less": ({"less": ["calm", 1.0]}, lambda x: x - jnp.outer(x @ along, along)),
    }
    asked = [params(**extra) for extra, _ in cases.values()]
    outs = llm.generate([PROMPT] * len(cases), asked, use_tqdm=False)
    assert {"plain", "mood"} in together, "a steered row and a plain one in one step"
    assert max(together, key=len) >= {"mood", "fixed", "less"}, "and rows of three ways to steer"
    assert llm._engine.runner.programs.late_compiles == 0  # type: ignore[attr-defined]
    for out, (name, (_, changed)) in zip(outs, cases.items(), strict=True):
        _, logprobs = drawn(out)
        np.testing.assert_allclose(logprobs, expected(llm, out, changed), atol=1e-4, err_msg=name)
    again = llm.generate([PROMPT] * len(cases), asked, use_tqdm=False)
    for one, two in zip(outs, again, strict=True):
        assert drawn(one)[0] == drawn(two)[0]
        assert two.num_cached_tokens > 0, "the second time its own prefix is there"
    (fresh,) = llm.generate([PROMPT], params(mood=["calm", 2.5]), use_tqdm=False)
    assert fresh.num_cached_tokens == 0, "of another strength there is none"
    alone = [llm.generate([PROMPT], each, use_tqdm=False)[0] for each in asked]
    assert [drawn(out)[0] for out in alone] == [drawn(out)[0] for out in outs]
    (both,) = llm.generate([PROMPT], params(mood=["calm", 2.0], seen=True), use_tqdm=False)
    np.testing.assert_array_equal(drawn(both)[0], drawn(outs[1])[0])
    assert len(both.outputs[0].extra["seen"]) == 6
    assert "mood" not in both.outputs[0].extra


def within(n: int, start: int, stop: int) -> np.ndarray:
    """float32[n, 1]: 1 at positions ``start`` to before ``stop``."""
    at = np.arange(n)
    return ((at >= start) & (at < stop)).astype(np.float32)[:, None]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parts_of_a_text_are_steered_and_others_are_not(llm: LLM) -> None:
    """Side by side, and again with what is cached of each."""
    n = len(llm.generate([PROMPT], params(1), use_tqdm=False)[0].prompt_token_ids)
    along = CALM / np.linalg.norm(CALM)
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "prompt": (
            {"mood": ["calm", 2.0, "prompt"]},
            lambda x: x + within(len(x), 0, n) * 2 * CALM,
        ),
        "drawn": ({"mood": ["calm", 2.0, "drawn"]}, lambda x: x + within(len(x), n, 99) * 2 * CALM),
        "two": (
            {"mood": ["calm", 1.0, "3:20", OTHER.tolist(), -1.5, f"{n + 2}:"]},
            lambda x: x + within(len(x), 3, 20) * CALM - 1.5 * within(len(x), n + 2, 99) * OTHER,
        ),
        "fixed": (
            {"fixed": ["calm", 1.5, ":4"]},
            lambda x: jnp.where(within(len(x), 0, 4) > 0, 1.5 * CALM, x),
        ),
        "less": (
            {"less": ["calm", 1.0, "drawn"]},
            lambda x: x - within(len(x), n, 99) * jnp.outer(x @ along, along),
        ),
        "plain": ({}, lambda x: x),
    }
    asked = [params(24, **extra) for extra, _ in cases.values()]
    programs = llm._engine.runner.programs  # type: ignore[attr-defined]
    for again in (False, True):
        compiled = programs.late_compiles  # by the passes over whole texts
        outs = llm.generate([PROMPT] * len(cases), asked, use_tqdm=False)
        assert programs.late_compiles == compiled
        for out, (name, (_, changed)) in zip(outs, cases.items(), strict=True):
            want = expected(llm, out, changed)
            np.testing.assert_allclose(drawn(out)[1], want, atol=1e-4, err_msg=name)
            assert not again or out.num_cached_tokens > 0, name
    first = outs[0]
    longer = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    (out,) = llm.generate({"prompt_token_ids": longer}, asked[0], use_tqdm=False)
    want = expected(llm, out, lambda x: x + within(len(x), 0, len(longer)) * 2 * CALM)
    np.testing.assert_allclose(drawn(out)[1], want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        True,
        "calm",
        ["calm"],
        ["angry", 1.0],
        ["calm", float("nan")],
        ["calm", "much"],
        ["calm", True],
        [[1.0] * (D - 1), 1.0],
        [[float("inf")] * D, 1.0],
        ["calm", 1.0] * 3,
        [],
        ["calm", 1.0, "prompt", "prompt"],
        ["prompt", 1.0],
        ["calm", 1.0, "answer"],
        ["calm", 1.0, "9:9"],
        ["calm", 1.0, "-3:"],
        ["calm", 1.0, "1:2:3"],
        ["calm", 1.0, "0:99999999999"],
    ],
)
def test_what_is_asked_is_checked(llm: LLM, asked: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        llm.generate("x", SamplingParams(extra_args={"mood": asked}))
    assert caught.value.field == "extra_args.mood"


def test_all_that_changes_kv_is_in_its_name() -> None:
    asked = ["calm", 2.0]
    one = made()
    others = [
        made("project"),
        steering("mood", "blocks.1.hook_resid_pre", vectors={"calm": CALM}),
        steering("mood", POINT, vectors={"calm": OTHER}),
    ]
    names = [feature.kv_name(asked, 9) for feature in (one, *others)]
    parts = [["calm", 2.5], *([*asked, where] for where in ("prompt", "drawn", "2:9", "2:", ":8"))]
    names += [one.kv_name(each, 9) for each in parts] + [one.kv_name([*asked, "prompt"], 10)]
    assert len({*names}) == len(names)
    assert one.kv_name([CALM.tolist(), 2.0], 10) == names[0] == made().kv_name([*asked, ":"], 9)
    assert one.kv_name([*asked, ":9"], 4) == one.kv_name([*asked, "prompt"], 9)


def test_a_name_that_a_request_came_with_is_not_taken() -> None:
    limits = replace(LIMITS, kv_names={"echo": lambda asked, n_prompt: f"{asked}/{n_prompt}"})
    scheduler = Scheduler(limits, EngineConfig.of(max_num_seqs=2, max_num_batched_tokens=32))
    plain = Request(id="a", prompt_ids=(1,), params=SamplingParams(), kv_name="echo:1")
    assert scheduler.with_kv_name(plain).kv_name == ""
    asked = replace(plain, params=SamplingParams(extra_args={"echo": 2}))
    assert scheduler.with_kv_name(asked).kv_name == "echo:2/1"


def test_with_a_named_cache_the_name_counts_its_tokens_too() -> None:
    limits = replace(LIMITS, kv_names={"echo": lambda asked, n_prompt: f"{asked}/{n_prompt}"})
    scheduler = Scheduler(limits, EngineConfig.of(max_num_seqs=2, max_num_batched_tokens=32))
    asked = SamplingParams(extra_args={"echo": 2}, max_tokens=2)
    first = Request(id="made", prompt_ids=tuple(range(16)), params=asked, cache="c")
    caching.create(scheduler, first, 60.0, 0.0)
    scheduler.submit(replace(first, id="user", prompt_ids=tuple(range(16, 32))), 0.0)
    (seq,) = scheduler.groups["user"]
    assert (seq.n_prompt, seq.request.kv_name) == (32, "echo:2/32")


@pytest.mark.parametrize(
    "options",
    [
        {"vectors": {"a": [1.0, float("nan")]}},
        {"vectors": {"a": [1.0], "b": [1.0, 2.0]}},
        {"vectors": {"a": [1.0]}, "mode": "multiply"},
        {"vectors": {"prompt": [1.0]}},
        {"vectors": {"a:b": [1.0]}},
        {},
    ],
)
def test_what_is_registered_is_checked(options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        steering("mood", POINT, **options)
    assert caught.value.field == "mood"


def test_a_plain_program_has_nothing_of_it_and_points_are_checked(tiny_dir: Path) -> None:
    model = step_model(json.loads((tiny_dir / "config.json").read_text()))
    plain = Bucket(D=2, P=0, F=0)

    def text(bucket: Bucket) -> str:
        buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
        step = jax.jit(make_step(model, bucket), donate_argnums=1)
        return step.lower(model.abstract_params(), model.abstract_state(), buf).as_text()

    before = text(plain)
    assert text(plain.with_also(made())) != before
    assert text(plain) == before
    for point in ("blocks.0.hook_mlp_out", "hook_embed", "blocks.9.hook_resid_pre"):
        with pytest.raises(ConfigError) as caught:
            text(plain.with_also(steering("wrong", point, width=D)))
        assert caught.value.field == "wrong"
    with pytest.raises(ConfigError, match="values"):
        text(plain.with_also(steering("wide", POINT, width=D + 1)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_several_devices_it_is_the_same(llm: LLM, tiny_dir: Path) -> None:
    asked = [params(), params(mood=["calm", 2.0])]
    want = llm.generate([PROMPT] * 2, asked, use_tqdm=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_REGISTERED", {})
        register_feature(made(most=2))
        with LLM(str(tiny_dir), **SMALL_OPTIONS, dtype="float32", tensor_parallel_size=2) as two:
            got = two.generate([PROMPT] * 2, asked, use_tqdm=False)
    for one, other in zip(want, got, strict=True):
        assert drawn(one)[0] == drawn(other)[0]
        np.testing.assert_allclose(drawn(one)[1], drawn(other)[1], atol=1e-4)
