"""A windowed model on the real runner in float32: with pages given back it draws what it draws with all
kept, whatever the chunks, preemptions and hits."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.model.arch import Rope, RopeScaling, resized
from jserve.model.attention import backend
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.mesh import make_mesh
from jserve.model.sinks import with_sinks
from jserve.model.view import Bucket
from jserve.runner.buckets import Ladder
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.types import Request
from tests import programs
from tests.kv.test_real_reuse import text, tokens_of
from tests.model.test_sinks import literal
from tests.runner import harness
from tests.runner.harness import ARCH, RULES, tiny_params

W = 20
OPTIONS = harness.OPTIONS | {"kv_groups": "off"}
"""With pages of all layers: ``test_real_groups`` has those of groups."""
WINDOWED = resized(ARCH, windows=(W, 12))
LADDER = Ladder(buckets=(Bucket(D=6, P=48, F=6),))


def windowed(**options: int) -> ModelRunner:
    mesh = make_mesh(1)
    config = EngineConfig.of(**OPTIONS | options)
    return ModelRunner(
        LLAMA,
        WINDOWED,
        tiny_params(mesh),
        mesh,
        config,
        rules=RULES,
        ladder=LADDER,
        strict=True,
        files=programs.kept(),
    )


@lru_cache(maxsize=2)
def runner(sinks: int = 0) -> ModelRunner:
    return windowed(attention_sinks=sinks)


def engine_of(device: ModelRunner, *, keep: bool = False, n_pages: int = 97, **options) -> Engine:
    """``keep``: the scheduler is told that layers see everything, so it keeps all pages."""
    device.programs.seal()  # the other runner of these tests was perhaps compiled since
    overlap = options.pop("overlap", 1)
    told = {"window": 0} if keep else {}
    limits = dataclasses.replace(device.limits, n_pages=n_pages, **told)
    config = EngineConfig.of(**OPTIONS | options)
    return Engine(Scheduler(limits, config), device, overlap=overlap)


def all_of(engine: Engine, prompts, n: int) -> list[list[int]]:
    """Greedy tokens of prompts that run together."""
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(id=f"r{i}", prompt_ids=tuple(prompt), params=params))
    found: list[list[int]] = [[] for _ in prompts]
    for out in engine.drain():
        assert out.error is None
        found[int(out.request_id[1:])] += out.token_ids
    return found


PROMPTS = [text(n, seed=n) for n in (3, 41, 70, 25, 64, 1)]


@lru_cache(maxsize=2)
def kept(sinks: int) -> tuple[tuple[int, ...], ...]:
    """The tokens when every page is kept."""
    return tuple(map(tuple, all_of(engine_of(runner(sinks), keep=True), PROMPTS, 50)))


@pytest.mark.slow
def test_the_limits_say_what_the_layers_see():
    assert (runner().limits.window, runner().limits.sinks) == (W, 0)
    assert runner(5).limits.sinks == 5


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sinks", [0, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 0},
        {"overlap": 2},
        {"max_prefill_chunk": 7},
        {"max_prefill_chunk": 1, "overlap": 2},
        {"n_pages": 22},
        {"n_pages": 17, "max_prefill_chunk": 9},
        {"n_pages": 30, "prefix_caching": False},
    ],
)
def test_release_changes_no_token(options, sinks):
    engine = engine_of(runner(sinks), **options)
    assert tuple(map(tuple, all_of(engine, PROMPTS, 50))) == kept(sinks)
    engine.scheduler.resources.check()
    if options.get("n_pages", 97) < 20:
        assert engine.scheduler.resources.n_preemptions > 0


SMALL = {"n_pages": 11, "max_prefill_chunk": 4}


@lru_cache(maxsize=1)
def small() -> ModelRunner:
    """A pool of 80 tokens under a context of 128."""
    return windowed(**SMALL)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("overlap", [0, 1])
def test_contexts_longer_than_the_pool_are_served(overlap):
    prompts = [text(n, seed=n) for n in (70, 90, 100)]
    expected = all_of(engine_of(runner(), keep=True), prompts, 28)
    device = small()
    pool = (device.limits.n_pages - 1) * device.limits.page_size
    assert pool < min(map(len, prompts)) + 28
    engine = engine_of(device, **SMALL, overlap=overlap)
    assert all_of(engine, prompts, 28) == expected
    engine.scheduler.resources.check()


def test_a_pool_below_a_window_of_pages_is_refused():
    mesh, arch = make_mesh(1), WINDOWED
    config = EngineConfig.of(**OPTIONS | SMALL | {"n_pages": 6})
    with pytest.raises(ConfigError, match="needs 7") as e:
        ModelRunner(LLAMA, arch, tiny_params(mesh), mesh, config, rules=RULES, ladder=LADDER)
    assert e.value.field == "n_pages"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sinks", [0, 5])
@pytest.mark.parametrize("n", [8, 15, 16, 17, 24, 40, 57, 72])
def test_hits_change_no_token_also_when_the_front_is_gone(n, sinks):
    whole = text(90, seed=4)
    cold, _ = tokens_of(engine_of(runner(sinks), keep=True), whole, "cold", n=10)
    engine = engine_of(runner(sinks), n_pages=23)
    tokens_of(engine, [*whole[:n], 1], "first", n=2)
    engine.scheduler.resources.cache.evict(max(0, (n - W) // 8))
    warm, n_new = tokens_of(engine, whole, "warm", n=10)
    assert warm == cold
    if sinks == 0:
        assert n_new <= 90 - (n // 8 - 1) * 8
    engine.scheduler.resources.cache.evict(6)
    again, n_new = tokens_of(engine, whole, "again", n=10)
    assert again == cold


def test_sinks_change_what_a_long_text_draws():
    assert kept(5) != kept(0)
    assert [a[: 16 - len(p)] for a, p in zip(kept(5), PROMPTS, strict=True) if len(p) < 12] == [
        a[: 16 - len(p)] for a, p in zip(kept(0), PROMPTS, strict=True) if len(p) < 12
    ], "before anything slid out there is nothing to see beside the window"


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        (ARCH, "every layer"),
        (resized(ARCH, windows=(W, 0)), "every layer"),
        (resized(WINDOWED, rope=Rope(scaling=RopeScaling(kind="dynamic"))), "dynamic"),
    ],
)
def test_sinks_are_refused_where_they_cannot_hold(arch, said):
    mesh, config = make_mesh(1), EngineConfig.of(**OPTIONS | {"attention_sinks": 4})
    with pytest.raises(ConfigError, match=said) as e:
        ModelRunner(LLAMA, arch, tiny_params(mesh), mesh, config, rules=RULES, ladder=LADDER)
    assert e.value.field == "attention_sinks"


def test_a_backend_without_sinks_refuses_them():
    plain = dataclasses.replace(backend("xla"), has_sinks=False)
    assert with_sinks(WINDOWED, plain, 0) == WINDOWED
    with pytest.raises(ConfigError, match="'xla'"):
        with_sinks(WINDOWED, plain, 4)


def _norm(x: np.ndarray, w: Any) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + WINDOWED.norm.eps) * np.asarray(w)


def _literal_layer(p: Any, x_SD: np.ndarray, window: int, sinks: int) -> np.ndarray:
    """One layer of the tiny model over a whole text, its attention as in ``tests.model.test_sinks``."""
    y_SKGH = np.einsum("kghd,sd->skgh", np.asarray(p["qkv"]), _norm(x_SD, p["attn_norm"]))
    q_SNH = y_SKGH[:, :, :-2].reshape(len(x_SD), ARCH.N, ARCH.H)
    k_SKH, v_SKH = y_SKGH[:, :, -2], y_SKGH[:, :, -1]
    o_SNH = [literal(q_SNH, k_SKH, v_SKH, at, window, sinks) for at in range(len(x_SD))]
    x_SD = x_SD + np.array(o_SNH).reshape(len(x_SD), -1) @ np.asarray(p["o"]).T
    gate_SF, up_SF = np.einsum("ifd,sd->isf", np.asarray(p["gate_up"]), _norm(x_SD, p["mlp_norm"]))
    return x_SD + gate_SF / (1 + np.exp(-gate_SF)) * up_SF @ np.asarray(p["down"]).T


@pytest.mark.parametrize("sinks", [0, 5])
def test_the_model_draws_what_the_paper_read_literally_draws(sinks):
    params, prompt = runner(sinks).params, text(30, seed=8)
    (drawn,) = all_of(engine_of(runner(sinks)), [prompt], 8)
    tokens = [*prompt, *drawn]
    x_SD = np.asarray(params["embed"])[tokens].astype(np.float64)
    for p, layer in zip(params["layers"], WINDOWED.layers, strict=True):
        x_SD = _literal_layer(p, x_SD, layer.attn.window, sinks)
    logits_SV = _norm(x_SD, params["final_norm"]) @ np.asarray(params["unembed"]).T
    assert logits_SV[len(prompt) - 1 : -1].argmax(-1).tolist() == drawn
