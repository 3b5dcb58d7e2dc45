"""Families whose layers look back differently far, with pages of groups of layers: however requests are run, each gets
what it gets alone with pages of all layers, and windows give pages back meanwhile."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import lru_cache

import pytest

from jserve.runner.runner import ModelRunner
from jserve.sched.scheduler import Scheduler
from tests.model.test_parity import CASES
from tests.whole import equal
from tests.whole.test_equalities import compare

FAMILIES = {
    "gemma2": [1, 2],
    "gemma3": [1, 3],
    "cohere2": [1, 1],
    "smollm3": [2, 1],
    "exaone4": [1, 2],
    "gpt-oss": [1, 2],
    "llama4": [1, 3],
    "qwen2-moe": [3, 1],
    "qwen2-window-yarn": [1, 1],
    "qwen3-bias-window": [1, 1],
}
"""Case -> groups of layers that read all, and of those with windows or chunks."""
CHUNK = 8
"""Tokens of a chunk at which page tables of windows have fewer columns than a text has pages."""


@lru_cache(maxsize=4)
def runner(case: str, chunk: int = 0, tp: int = 1) -> ModelRunner:
    """With pages of groups; ``chunk`` 0: prompts may be computed whole."""
    options = {"kv_groups": "on", "max_prefill_chunk": chunk, "overlap": 2}
    made = equal.runner_of(*CASES[case], buckets=equal.LARGEST, tp=tp, **options)
    assert [reach.n_groups for reach in made.limits.reaches] == FAMILIES[case]
    full, *others = made.limits.group_columns
    assert full == 160 // 8
    assert all((columns < full) == bool(chunk) for columns in others)
    return made


@lru_cache(maxsize=2)
def ungrouped(case: str) -> ModelRunner:
    made = equal.runner_of(*CASES[case], buckets=equal.LARGEST, kv_groups="off")
    assert not made.limits.reaches
    return made


class Seen(Counter):
    """What became of the sequences of a workload: pages given back, found in the cache, preemptions."""

    def __call__(self, scheduler: Scheduler) -> None:
        resources = scheduler.resources
        resources.check()
        for seq in resources.running:
            full, *windows = seq.lease.parts
            assert not len(full.gone)
            self["back"] = max(self["back"], *(len(part.gone) for part in windows))
        self["hit"] = max(self["hit"], resources.n_hit)
        self["preempted"] = max(self["preempted"], resources.n_preemptions)


def check_workload(case: str, seed: int, device: ModelRunner, *, preempts: bool = False) -> Seen:
    """The tokens of any way of running that ``device`` can, against each request alone without groups."""
    rng, seen = random.Random(seed), Seen()
    requests = equal.draw_requests(rng, f"{case}-{seed}")
    alone = equal.alone(ungrouped(case), requests)
    truth = {key: answer[0] for key, answer in alone.items()}
    way = dataclasses.replace(equal.Way.draw(rng), overlap=seed % 3, random_buckets=False)
    if device is not runner(case):
        way = dataclasses.replace(way, chunk=rng.choice((1, 3, 7, CHUNK)))
    pages = max(way.n_pages, 2 + device.limits.reaches[0].n_groups * 60)
    way = dataclasses.replace(way, n_pages=pages)
    got = equal.run(device, requests, way, rng, truth, preempts=preempts, between=seen)
    compare(got, alone)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_groups_change_no_token_however_requests_are_run(case: str) -> None:
    """Whole prompts and chunks, hits, preemptions, drafts, overlap."""
    total: Counter[str] = Counter()
    for seed in range(6000, 6003):
        for device in (runner(case), runner(case, CHUNK)):
            total += check_workload(case, seed, device, preempts=seed % 2 == 1)
    assert total["back"] > 8
    assert total["hit"] > 0
    assert total["preempted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_groups_over_devices_draw_what_one_device_draws(case: str) -> None:
    total: Counter[str] = Counter()
    for seed in (6000, 6001):
        device = runner(case, CHUNK, tp=2)
        total += check_workload(case, seed, device, preempts=seed % 2 == 1)
    assert total["back"] > 3
