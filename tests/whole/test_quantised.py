"""The old equalities with quantised weights: however requests are run, each gets what it gets alone."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any

import pytest

from jserve.model.features import SCORE
from jserve.model.view import Bucket
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.load import LoadedDrafter
from tests.whole import drafters, equal, quantised
from tests.whole.test_equalities import check_workload, compare
from tests.whole.test_speculation import KINDS, check


@pytest.mark.slow
def test_one_way_of_running_equals_alone() -> None:
    weights, _, _ = quantised.CASES["int8"]
    check_workload(
        equal.make_runner(buckets=equal.LARGEST, weights=weights), 5000, any_bucket=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", quantised.CASES)
def test_any_way_of_running_equals_alone(name: str) -> None:
    """Batched, chunked, cached, preempted for want of pages, with drafts, and in every bucket."""
    for seed in range(5000, 5010):
        check_workload(quantised.runner(name), seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", quantised.CASES)
def test_drafts_of_the_host_and_preemptions_change_nothing(name: str) -> None:
    for seed, kind in zip((5103, 5104, 5106), KINDS, strict=True):
        check(quantised.runner(name), kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize(
    "name", [n for n in quantised.CASES if n not in quantised.ROUNDED and "order" not in n]
)
def test_devices_give_what_one_gives(name: str, tp: int) -> None:
    """Shards below a group, too. Dynamic scales of shared inputs are per device, so those forms agree only roughly."""
    weights, model, _ = quantised.CASES[name]
    several = equal.make_runner(tp, model=model, weights=weights)
    for seed in range(5200, 5202):
        check_workload(quantised.runner(name), seed, several)


def wide_draft(model: Any, arch: Any, params: Any, mesh: Any, tree: Any) -> LoadedDrafter:
    """A draft model in float32, of the weights that the target was quantised from: most drafts are right."""
    family, _, own = equal.drawn({**equal.TINY, **model}, mesh, equal.ShardRules())
    drafter = draft_model(family, arch, arch)
    return LoadedDrafter(drafter=drafter, params=own, n_draft=3, tree=tree)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [(), drafters.TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["draft", "eagle3", "medusa"])
@pytest.mark.parametrize("name", ["int8", "int4", "int4, head too"])
def test_drafters_over_a_quantised_target_change_no_token(name: str, kind: str, tree: Any) -> None:
    weights, model, _ = quantised.CASES[name]
    maker = partial(wide_draft, model) if kind == "draft" else drafters.MAKERS[kind]
    wide = Bucket(D=8, P=64, F=8, J=4, n_draft=3, tree=tree, features=(SCORE,))
    made = equal.make_runner(1, partial(maker, tree=tree), (wide,), model=model, weights=weights)
    device: Any = drafters.Watching(made)
    for seed in range(5300, 5306):
        rng = random.Random(seed)
        requests = equal.draw_requests(rng, f"q{seed}")
        way = dataclasses.replace(equal.Way.draw(rng), drafts=False, random_buckets=False)
        wanted = equal.alone(quantised.runner(name), requests)
        compare(equal.run(device, requests, way, rng), wanted)
    assert device.stood > (50 if kind == "draft" else 0)


@pytest.mark.slow
def test_they_are_not_what_float32_gives() -> None:
    """Otherwise none of this shows anything."""
    plain = equal.make_runner()
    with pytest.raises(AssertionError):
        check_workload(plain, 5000, quantised.runner("int4"))
