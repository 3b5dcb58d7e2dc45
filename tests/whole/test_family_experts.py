"""Every family with experts on different devices: the tokens of one device, before, while and after experts move."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest

from jserve.model.moe_places import n_routed
from jserve.runner.runner import ModelRunner
from jserve.sched.scheduler import Scheduler
from tests.model.test_parity import CASES
from tests.whole import equal
from tests.whole.test_equalities import compare

MESHES = {"tp 2": (1, 2), "tp 4": (1, 4), "ep 2": (2, 1), "ep 4": (4, 1), "mixed": (2, 2)}
"""Groups of devices with different experts, devices of a group."""
IN_ALL = ("gpt-oss", "llama4", "deepseek-v3")
"""Biases and sink logits, few layers of experts beside dense ones, groups and latents."""
IN_TWO = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe-shared", "deepseek-v2")
RUNS = [
    *((case, mesh) for case in IN_ALL for mesh in MESHES),
    *((case, mesh) for case in IN_TWO for mesh in ("ep 4", "mixed")),
]
MOVES_EVERY = 4
"""Steps from one order of experts to the next."""


@lru_cache(maxsize=2)
def plain(case: str) -> ModelRunner:
    return equal.runner_of(*CASES[case], buckets=equal.LARGEST)


def spread(case: str, ep: int, tp: int) -> ModelRunner:
    """With as many spare slots as fill all devices, and at least one on each."""
    options = {}
    if ep > 1:
        E = n_routed(plain(case).model.arch)[1]
        options = {"enable_eplb": True, "num_redundant_experts": -E % ep or ep}
    return equal.runner_of(*CASES[case], buckets=equal.LARGEST, tp=tp, ep=ep, **options)


def moving(device: ModelRunner, rng: np.random.Generator) -> Callable[[Scheduler], None]:
    """Every few steps the loads are others."""
    size, steps = n_routed(device.model.arch), iter(range(10**6))

    def between(scheduler: Scheduler) -> None:
        if next(steps) % MOVES_EVERY == 0:
            device.rebalance_experts(rng.integers(1, 1000, size))

    return between


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mesh"), RUNS)
def test_every_mesh_draws_what_one_device_draws(case: str, mesh: str) -> None:
    device = spread(case, *MESHES[mesh])
    eplb = device._experts
    assert (eplb is not None) == (MESHES[mesh][0] > 1)
    for part, seed in (("before", 7000), ("while", 7001), ("after", 7002)):
        rng = random.Random(seed)
        requests = equal.draw_requests(rng, f"{case}-{seed}")
        alone = equal.alone(plain(case), requests)
        way = dataclasses.replace(equal.Way.draw(rng), random_buckets=False)
        moves = part == "while" and eplb is not None
        between = moving(device, np.random.default_rng(seed)) if moves else None
        before = device.counters().get("expert_moves_total", 0)
        truth = {key: answer[0] for key, answer in alone.items()}
        compare(equal.run(device, requests, way, rng, truth, between=between), alone)
        if moves:
            assert device.counters()["expert_moves_total"] - before > 4
            assert eplb.slot_LS.tolist() != eplb._initial().tolist(), "other places than at first"
