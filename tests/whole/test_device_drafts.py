"""Drafters on the device under the real scheduler: however requests are run and whatever drafts for
them, each gets what it gets alone and undrafted. Pages are short, prefixes shared, chunks odd."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from jserve import LLM, SamplingParams, build, build_runner
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.runner.runner import ModelRunner
from jserve.sampling import StructuredOutputs
from tests.model.test_parity import CASES
from tests.whole import equal
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.drafters import TREE, Watching, drafting, drafting_of
from tests.whole.test_equalities import compare

SHAPES = {"draft": (), "eagle3": TREE}


def check_workload(
    plain: ModelRunner,
    kind: str,
    seed: int,
    tp: int = 1,
    *,
    preempts: bool = False,
    sharding: str | None = None,
    drafted: ModelRunner | None = None,
) -> Watching:
    """``drafted``: the runner that drafts, of another model than the tiny one."""
    rng = random.Random(seed)
    requests = equal.draw_requests(rng, f"d{seed}")
    alone = equal.alone(plain, requests)
    way = dataclasses.replace(equal.Way.draw(rng), drafts=False, random_buckets=False)
    device: Any = Watching(drafted or drafting(kind, SHAPES[kind], tp, sharding))
    compare(equal.run(device, requests, way, rng, preempts=preempts), alone)
    return device


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("draft", marks=pytest.mark.slow), "eagle3"])
def test_any_way_of_running_equals_alone(runner, kind: str) -> None:
    """Chunks, cache hits, preemption, overlap, penalties, logprobs, n, stops: six workloads."""
    stood = [check_workload(runner, kind, seed).stood for seed in range(300, 306)]
    assert sum(stood) > (100 if kind == "draft" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("draft", marks=pytest.mark.slow), "eagle3"])
def test_preempted_at_every_step_equals_alone(runner, kind: str) -> None:
    for seed in (400, 401):
        check_workload(runner, kind, seed, preempts=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "eagle3"])
def test_any_way_of_running_equals_alone_many(runner, kind: str) -> None:
    for seed in range(2000, 2060):
        check_workload(runner, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "eagle3"])
def test_sharded_equals_one_device(runner, kind: str) -> None:
    for seed in range(60, 64):
        check_workload(runner, kind, seed, tp=2)


SHARDINGS = {
    "split": {
        "mesh": {"tp": 2},
        "logits": "split",
        "residual": "split",
        "sums": "weights",
    },
    "2D": {
        "mesh": {"x": 2, "tp": 2},
        "rules": {"embed": "x", "kv_heads": "tp", "ffn": "tp", "vocab": "tp"},
        "residual": "split",
    },
    "auto": {"mesh": {"tp": 2}, "mode": "auto"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("kind", ["draft", "eagle3"])
def test_any_sharding_equals_one_device(runner, kind: str, name: str) -> None:
    sharding = json.dumps(SHARDINGS[name])
    stood = [check_workload(runner, kind, seed, sharding=sharding).stood for seed in (300, 301)]
    assert sum(stood) > (30 if kind == "draft" else 0)


FAMILIES = ("gemma2", "deepseek-v3", "gpt-oss", "llama4", "olmoe")
"""Scaled embeddings and capped logits, latents, sink logits, chunks, experts."""


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "tree"), [("draft", ()), ("draft", TREE), ("medusa", TREE), ("eagle3", TREE)], ids=str
)
def test_drafts_change_no_token_of_any_family(kind: str, tree: tuple[int, ...], case: str) -> None:
    """Where the target drafts a tree for itself, tokens that are drawn stand in its second branch: their KV moves."""
    plain, drafted = equal.runner_of(*CASES[case]), drafting_of(*CASES[case], kind, tree)
    devices = [check_workload(plain, kind, seed, drafted=drafted) for seed in range(300, 304)]
    assert sum(d.drafted for d in devices) > 50
    if kind == "draft":
        assert sum(d.stood for d in devices) > 50


OTHERS = (
    *("llama-gqa4", "mistral-window", "qwen2-window-yarn", "qwen3-bias-window", "gemma", "gemma3"),
    *("phi3-window-partial", "olmo2", "granite", "cohere2", "smollm3", "exaone4", "glm4"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "granite-moe-shared", "deepseek-v2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_a_draft_model_changes_no_token_of_other_families(case: str) -> None:
    plain, drafted = equal.runner_of(*CASES[case]), drafting_of(*CASES[case], "draft")
    devices = [check_workload(plain, "draft", seed, drafted=drafted) for seed in (301, 302)]
    assert sum(d.stood for d in devices) > 20


@pytest.mark.slow
def test_cached_prefixes_hold_what_the_drafter_needs(runner) -> None:
    """Prompts whose KV is all but found in the cache draft as well as those that computed it."""
    rng = random.Random(1)
    (request,) = [r for r in equal.draw_requests(rng, "c") if r.params.n == 1][:1]
    params = dataclasses.replace(
        request.params,
        temperature=0.0,
        max_tokens=16,
        stop_token_ids=(),
        logprobs=None,
        prompt_logprobs=None,
        seed=1,
    )
    prompt = tuple(rng.randrange(equal.V) for _ in range(60))
    asked = [
        dataclasses.replace(request, id=f"c{i}", params=params, prompt_ids=prompt) for i in range(4)
    ]
    way = dataclasses.replace(equal.PLAIN, prefix_caching=True, budget=64)
    device: Any = Watching(drafting("draft"))
    equal.run(device, asked, way, rng)
    assert device.drafted > 30
    assert device.stood == device.drafted


# --- through the door


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(tiny_dir) -> None:
    options = {"method": "draft", "model": str(build.shipped("jserve-mini-draft"))}
    with pytest.raises(ConfigError, match="vocab_size is 2048, the target's is 320") as caught:
        LLM(str(tiny_dir), **SMALL_OPTIONS, speculative=options)
    assert caught.value.field == "speculative.model"


def test_a_draft_model_that_is_not_there_is_refused(tiny_dir) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_dir), **SMALL_OPTIONS, speculative={"method": "draft"})
    assert caught.value.field == "speculative.model"


@pytest.mark.parametrize(("wished", "whole"), [(0, False), (1, True), (2, False)])
def test_an_option_says_how_the_devices_hold_a_drafter(tiny_dir, wished: int, whole: bool) -> None:
    options = {"method": "draft", "model": str(tiny_dir), "tensor_parallel_size": wished}
    config = EngineConfig.of(
        model=str(tiny_dir), **SMALL_OPTIONS, tensor_parallel_size=2, speculative=options
    )
    arch = family_for(equal.TINY).arch(equal.TINY | {"vocab_size": 320})
    given = (arch, make_mesh(2), ShardRules(), np.dtype(np.float32))
    made = build_runner.drafter_of(config, given, lambda *_: None)
    assert made.drafter.replicated == whole
    table = made.params["embed"]
    assert table.addressable_shards[0].data.shape[0] == (320 if whole else 160)


def test_devices_that_the_model_does_not_have_are_refused_before_anything_is_loaded(
    tiny_dir,
) -> None:
    options = {"method": "draft", "model": "nowhere", "draft_tensor_parallel_size": 4}
    for more in ({"tensor_parallel_size": 2}, {"mesh": make_mesh(2)}):
        with pytest.raises(ConfigError, match="on its 2 devices") as caught:
            LLM(str(tiny_dir), **SMALL_OPTIONS, **more, speculative=options)
        assert caught.value.field == "speculative.tensor_parallel_size"


@pytest.mark.slow
def test_the_shipped_pair_says_what_the_target_says_alone() -> None:
    """Greedy, seeded and penalised, all at once; the draft model is right more often than not."""
    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64,
               "max_model_len": 256, "compile_cache": "", "prompt_logprobs": False,
               "structured_outputs": False}  # fmt: skip
    asked = [
        "Hello! Who are you?",
        "What is 12 + 30?",
        "Tell me a story about a fox.",
        "Name a colour.",
    ]
    messages = [[{"role": "user", "content": text}] for text in asked]
    params = [
        SamplingParams(temperature=0, max_tokens=32),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32),
        SamplingParams(temperature=1.0, seed=4, max_tokens=48, repetition_penalty=1.1),
        SamplingParams(temperature=0, max_tokens=32, stop=["."]),
    ]
    drafter = {"method": "draft", "model": str(build.shipped("jserve-mini-draft")), "num_tokens": 3,
               "min_speed": 0.0}  # fmt: skip
    said = []
    for extra in ({}, {"speculative": drafter}):
        with LLM(**options, **extra) as llm:
            # Not by times: the machine may be busy.
            llm._engine.scheduler.speculation.fix(3 if extra else None)
            said.append([out.outputs[0].token_ids for out in llm.chat(messages, params)])
            counters = llm._engine.stats().values if extra else {}
    assert said[0] == said[1]
    drafted = sum(
        v for k, v in counters.items() if k.startswith("spec_decode_num_draft_tokens_total")
    )
    assert drafted > 0, counters


@pytest.mark.slow
def test_a_tree_of_the_shipped_head_is_an_option() -> None:
    """Greedy, seeded and under a grammar whose forced tokens cannot be drafted beside a tree."""
    options = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 32,
               "max_model_len": 256, "compile_cache": "", "prompt_logprobs": False}  # fmt: skip
    prompts = ["Hello! Who are you?", "What is 12 + 30?", "Tell me a story.", "Name a colour."]
    regex = StructuredOutputs(regex="(red|green) is (my favourite ){2}colour")
    params = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24, logprobs=1),
        SamplingParams(temperature=0, max_tokens=24, stop=["."]),
        SamplingParams(temperature=0, max_tokens=24, logprobs=1, structured_outputs=regex),
    ]
    drafter = {"method": "eagle3", "model": str(build.shipped("jserve-mini-eagle3")),
               "num_tokens": 5, "min_speed": 0.0}  # fmt: skip
    said, messages = [], [[{"role": "user", "content": text}] for text in prompts]
    for shape in ("", "auto"):
        extra = {"speculative": drafter | {"tree": shape}} if shape else {}
        with LLM(**options, **extra) as llm:
            drafting = llm._engine.scheduler.speculation
            drafting.fix(drafting.most or None)  # not by times: the machine may be busy
            found = llm.chat(messages, params, use_tqdm=False)
            said.append([out.outputs[0].token_ids for out in found])
            depths = llm._engine.scheduler.limits.draft_depths
            counters = llm._engine.stats().values
        if shape:
            assert len(depths) == 5 > max(depths) > 1
            tried = {k: v for k, v in counters.items() if "num_draft_tokens_total" in k}
            assert sum(tried.values()) > 0, counters
            places = [k for k in counters if "num_draft_tokens_per_pos_total" in k]
            assert 0 < len(places) <= max(depths)
    assert said[0] == said[1]


def test_a_tree_of_the_hosts_drafts_is_refused(tiny_dir) -> None:
    with pytest.raises(ConfigError, match="tree means nothing to method 'ngram'"):
        LLM(str(tiny_dir), **SMALL_OPTIONS, speculative={"method": "ngram", "tree": "auto"})
