"""The real runner in float32 over layers of other kinds: latents, and chunks beside full layers, with sink logits.

How a text is cut, what is cached, and where pages have been changes no token."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.model.arch import resized
from jserve.model.families.deepseek_v3 import FAMILY as DEEPSEEK
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.view import Bucket
from jserve.runner.runner import ModelRunner
from jserve.sched.scheduler import Scheduler
from tests.kv.test_real_reuse import (
    BUCKETS,
    N_HOST,
    Z,
    check_hit_lengths,
    check_the_way_through_host_memory,
    engine_of,
    text,
    tokens_of,
)
from tests.runner.harness import ARCH, CONFIG, OPTIONS, Rig, jobs, make_runner

RANK, TURNED = 16, 4
LATENT = DEEPSEEK.arch(
    CONFIG
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 12,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": TURNED,
        "qk_nope_head_dim": 6,
        "v_head_dim": 10,
    }
)
first, second = resized(ARCH, sink_logits=True).layers
CHUNKED = dataclasses.replace(
    ARCH,
    layers=(dataclasses.replace(first, attn=dataclasses.replace(first.attn, chunk=20)), second),
)
KINDS = {"latent": (DEEPSEEK, LATENT), "chunked": (LLAMA, CHUNKED)}
PAGE_BYTES = 2 * (RANK + TURNED) * Z * 4
"""Of latents: two layers, one array each, float32."""


@lru_cache(maxsize=3)
def runner(kind: str, tp: int = 1) -> ModelRunner:
    family, arch = KINDS[kind]
    page = PAGE_BYTES if kind == "latent" else 4 * ARCH.K * Z * ARCH.H * 4
    gib = (N_HOST + 0.5) * page / 2**30
    return make_runner(BUCKETS, tp=tp, strict=True, host_memory_gb=gib, family=family, arch=arch)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_batches_change_no_token(kind):
    work = jobs(4, seed=3, temperature=0.0)
    alone = [Rig(runner(kind)).run([job])[0] for job in work]
    for chunk in (1, 7, -1):
        assert Rig(runner(kind), chunk=chunk, seed=chunk + 2).run(work) == alone, chunk
    assert len({t for tokens in alone for t in tokens}) > 8, "the model repeats itself"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(kind):
    family, arch = KINDS[kind]
    buckets = (*BUCKETS, Bucket(D=6, P=48, F=4, J=4))
    device = make_runner(buckets, family=family, arch=arch, max_drafts=3)
    work = jobs(3, seed=3, temperature=0.0)
    alone = {str(i): Rig(runner(kind)).run([job])[0] for i, job in enumerate(work)}

    def half_right(seq, most):
        coming = alone[seq.request.id][seq.n_output : seq.n_output + most]
        return coming[:2] + [(t + 1) % ARCH.V for t in coming[2:]]

    rig = Rig(device, drafter=half_right, chunk=-1, seed=5)
    assert rig.run(work) == list(alone.values())
    assert max(rig.accepted) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_cold_also_through_host_memory(kind):
    check_hit_lengths(runner(kind), 25)
    check_the_way_through_host_memory(runner(kind), overlap=1)


@pytest.mark.slow
def test_every_device_holds_all_latents():
    """So a page is as large on each of two devices as on one, and once in host memory."""
    one, two = runner("latent"), runner("latent", 2)
    assert one.memory.page_bytes == two.memory.page_bytes == PAGE_BYTES
    assert two.limits.n_host_pages == N_HOST
    check_the_way_through_host_memory(two, overlap=1)
    for n in (9, 30):
        drawn = [tokens_of(engine_of(device), text(n), "a")[0] for device in (one, two)]
        assert drawn[0] == drawn[1]


def test_latents_come_back_from_the_disk_as_they_went(tmp_path):
    family, arch = KINDS["latent"]
    options = {"host_memory_gb": (N_HOST + 0.5) * PAGE_BYTES / 2**30, "disk_gb": 0.01}

    def restarted():
        device = make_runner(BUCKETS, family=family, arch=arch, disk_dir=str(tmp_path), **options)
        return engine_of(device, n_pages=18, host=N_HOST)

    prompts = [text(41, seed=s) for s in range(3)]
    engine = restarted()
    cold = [tokens_of(engine, p, f"c{i}")[0] for i, p in enumerate(prompts)]
    engine.close()
    engine = restarted()
    assert [tokens_of(engine, p, f"w{i}") for i, p in enumerate(prompts)] == [
        (drawn, 1) for drawn in cold
    ]
    engine.close()


@pytest.mark.slow
def test_pages_behind_a_chunk_are_given_back():
    """Where every layer has chunks a text passes through a pool that is smaller than it, and draws what it draws
    where nothing is given back."""
    arch, options = resized(ARCH, chunk=20), {"n_pages": 11, "max_prefill_chunk": 4}
    device = make_runner(BUCKETS, strict=True, arch=arch, **options)
    assert device.limits.window == 20
    large = make_runner(BUCKETS, strict=True, arch=arch)
    kept = Engine(
        Scheduler(dataclasses.replace(large.limits, window=0), EngineConfig.of(**OPTIONS)), large
    )
    small = engine_of(device, **options)
    drawn = tokens_of(kept, text(90), "a", n=30)[0]
    assert tokens_of(small, text(90), "a", n=30)[0] == drawn
    assert drawn != tokens_of(engine_of(make_runner(BUCKETS)), text(90), "a", n=30)[0]
