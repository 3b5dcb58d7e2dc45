"""Layers of several reaches on the real runner in float32: with pages of groups it draws what it draws with pages of
all layers, whatever the chunks, hits and preemptions."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import jax
import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.model.arch import Arch, resized
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.types import Request
from tests.kv.test_groups import (
    a_hit_without_the_last_window,
    given_back_one_token_early,
    the_page_of_another_group,
)
from tests.kv.test_real_reuse import BUCKETS, Z, text, tokens_of
from tests.kv.test_real_window import all_of
from tests.runner.harness import ARCH, OPTIONS, make_runner

W = 20
SHORT = {"max_prefill_chunk": 8}
"""So that a window is given back long before the context of 128 tokens ends, and its columns are used again."""


def _chunked(arch: Arch) -> Arch:
    """Windows as chunks of attention."""
    layers = [
        dataclasses.replace(x, attn=dataclasses.replace(x.attn, window=0, chunk=x.attn.window))
        for x in arch.layers
    ]
    return dataclasses.replace(arch, layers=tuple(layers))


KINDS = {
    "gemma3": resized(ARCH, windows=(W, W, 0)),
    "gpt-oss": resized(ARCH, windows=(W, 0, W, 0), sink_logits=True),
    "padded": resized(ARCH, windows=(W, 0, 0, W, W)),
    "llama4": _chunked(resized(ARCH, windows=(W, W, W, 0))),
    "two windows": resized(ARCH, windows=(40, 12)),
}
GROUPS = {
    "gemma3": [1, 2],
    "gpt-oss": [1, 1],
    "padded": [1, 2],
    "llama4": [1, 3],
    "two windows": [1, 1],
}
ALL = [pytest.param(k, marks=() if k == "gemma3" else pytest.mark.slow) for k in KINDS]
PROMPTS = [text(n, seed=n) for n in (3, 41, 70, 25, 64, 1)]
N = 50


@lru_cache(maxsize=4)
def runner(kind: str, kv_groups: str = "on") -> ModelRunner:
    return make_runner(BUCKETS, strict=True, arch=KINDS[kind], kv_groups=kv_groups, **SHORT)


def engine_of(device: ModelRunner, *, n_pages: int = 0, overlap: int = 1, **options) -> Engine:
    device.programs.seal()
    limits = dataclasses.replace(device.limits, n_pages=n_pages or device.limits.n_pages)
    config = EngineConfig.of(**OPTIONS | SHORT | options)
    return Engine(Scheduler(limits, config), device, overlap=overlap)


@lru_cache(maxsize=8)
def expected(kind: str) -> list[list[int]]:
    """The tokens with pages of all layers."""
    return all_of(engine_of(runner(kind, "off")), PROMPTS, N)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_the_pool_has_as_many_arrays_as_a_group_has_layers(kind):
    device, groups = runner(kind), runner(kind).model.dims.groups
    assert [reach.n_groups for reach in device.limits.reaches] == GROUPS[kind]
    assert len(device.state.kv) == groups.n_arrays
    assert groups.n_groups * groups.n_arrays == KINDS[kind].L + groups.n_padding
    held = sum(x.nbytes for x in jax.tree.leaves(device.state.kv))
    assert held == device.memory.kv_bytes == device.limits.n_pages * device.memory.page_bytes
    assert runner(kind, "off").model.dims.groups is None
    first, *others = device.limits.group_columns
    assert first == 128 // Z > max(others)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("options", [{}, {"max_prefill_chunk": 3}, {"prefix_caching": False}])
def test_groups_and_chunks_change_no_token(kind, options):
    engine = engine_of(runner(kind), **options)
    assert all_of(engine, PROMPTS, N) == expected(kind)
    engine.scheduler.resources.check()


@pytest.mark.parametrize("kind", [case for case in ALL if case.values[0] != "llama4"])
def test_preemption_changes_no_token(kind):
    """Not of chunks (llama4): admission counts them at their largest, so nobody is preempted."""
    device = runner(kind)
    n_pages = 2 + engine_of(device).scheduler.resources.demand.most(128)
    engine = engine_of(device, n_pages=n_pages)
    assert all_of(engine, PROMPTS, N) == expected(kind)
    assert engine.scheduler.resources.n_preemptions > 0
    engine.scheduler.resources.check()


@pytest.mark.parametrize("kind", ALL)
def test_cached_equals_cold(kind):
    """Of a prompt whose windows slid far before its end, and of its first tokens."""
    prompt = text(97, seed=5)
    cold = {n: tokens_of(engine_of(runner(kind)), prompt[:n], "c") for n in (60, 89, 97)}
    engine = engine_of(runner(kind))
    for n in (97, 60, 89, 97):
        drawn, n_computed = tokens_of(engine, prompt[:n], f"w{n}-{engine.scheduler.n_steps}")
        assert drawn == cold[n][0], n
    assert n_computed == 1 + (97 - 1) % Z, "the whole prefix was found"
    # Whatever no window reads may be evicted: a hit of the whole is one still.
    cache = engine.scheduler.resources.cache
    cache.evict(
        sum(n * part.tree.n_nodes for n, part in zip(cache.groups, cache.parts, strict=True)) // 3
    )
    assert tokens_of(engine, prompt, "again")[0] == cold[97][0]
    engine.scheduler.resources.check()


def scored(engine: Engine, prompts: list[list[int]], n: int) -> list[tuple[int, float]]:
    """Greedy tokens and their log-probabilities, one prompt after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=1)
    found = []
    for i, prompt in enumerate(prompts):
        number = f"{engine.scheduler.n_steps}-{i}"
        engine.submit(Request(id=number, prompt_ids=tuple(prompt), params=params))
        for out in engine.drain():
            assert out.error is None
            found += [(entry.token, entry.logprob) for entry in out.logprobs or ()]
    return found


def life(kind: str) -> list[tuple[int, float]]:
    """Chunks that end within pages, long answers, and a hit of a prefix whose window is gone."""
    whole = text(97, seed=5)
    engine = engine_of(runner(kind), max_prefill_chunk=5, overlap=0)
    found = scored(engine, [whole], 8)
    slid = (97 - W + 1) // Z
    engine.scheduler.resources.cache.evict(GROUPS[kind][1] * slid)
    return found + scored(engine, [whole[:60], *PROMPTS[1:4]], 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [given_back_one_token_early, a_hit_without_the_last_window, the_page_of_another_group],
    ids=lambda bug: bug.__name__,
)
def test_a_planted_bug_changes_what_is_drawn(bug, monkeypatch):
    without = life("gemma3")
    assert without == life("gemma3")
    bug(monkeypatch)
    assert without != life("gemma3")


@pytest.mark.parametrize("kind", ALL)
def test_no_step_copies_the_pool(kind):
    device = runner(kind)
    array = device.state.kv[0][0].nbytes
    for bucket in device.programs.buckets:
        assert device.programs.memory(bucket).temp_size_in_bytes < array


@pytest.mark.parametrize(
    ("arch", "options", "words"),
    [
        (ARCH, {}, "equally far"),
        (KINDS["two windows"], {"attention_sinks": 4}, "attention_sinks"),
    ],
)
def test_what_needs_pages_of_all_layers_is_named(arch, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        make_runner(BUCKETS, arch=arch, kv_groups="on", **options)
    assert caught.value.field == "kv_groups"
