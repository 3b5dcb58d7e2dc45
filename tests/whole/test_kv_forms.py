"""KV of 8 and 4 bits with a scale for each token and head: however requests are run, each gets what it gets alone."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any

import pytest

from jserve.kv_layout import KV_FORMS
from jserve.model.features import SCORE
from jserve.model.view import Bucket
from tests.whole import drafters, equal
from tests.whole.test_equalities import check_workload, compare

WIDE = {"head_dim": 16}
OF = {
    "int8": {"kv_cache_dtype": "int8_per_token_head"},
    "int4": {"kv_cache_dtype": "int4_per_token_head"},
    "int4, a layer skipped": {
        "kv_cache_dtype": "int4_per_token_head",
        "kv_cache_dtype_skip_layers": "1",
    },
    "e4m3, a layer skipped": {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": "0"},
    "int8 on ref": {"kv_cache_dtype": "int8_per_token_head", "attention_backend": "ref"},
    "int4, rotated": {"kv_cache_dtype": "int4_per_token_head", "kv_cache_rotate": True},
    "int4 on dense": {"kv_cache_dtype": "int4_per_token_head", "attention_backend": "dense"},
}


@pytest.mark.slow
def test_one_way_of_running_equals_alone() -> None:
    options = OF["int4, a layer skipped"]
    runner = equal.make_runner(buckets=equal.LARGEST, model=WIDE, **options)
    check_workload(runner, 4001, any_bucket=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF)
def test_any_way_of_running_equals_alone(name: str) -> None:
    """A token's KV is rounded once, whoever computes it and whenever."""
    runner = equal.make_runner(model=WIDE, **OF[name])
    for seed in range(4000, 4008):
        check_workload(runner, seed)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("name", ["int8", "int4, a layer skipped"])
def test_devices_give_what_one_gives(name: str, tp: int) -> None:
    """On eight devices each of the four kv heads lies twice, with its scales."""
    one, several = (equal.make_runner(n, model=WIDE, **OF[name]) for n in (1, tp))
    for seed in range(4100, 4104):
        check_workload(one, seed, several)


@pytest.mark.slow
@pytest.mark.parametrize("form", KV_FORMS)
@pytest.mark.parametrize("kind", ["draft", "eagle3"])
def test_drafts_change_no_token(kind: str, form: str) -> None:
    """A drafter's layers have the form of the others."""
    options = {"model": WIDE, "kv_cache_dtype": form}
    wide = Bucket(D=8, P=64, F=8, J=4, n_draft=3, features=(SCORE,))
    plain = equal.make_runner(**options)
    device: Any = drafters.Watching(
        equal.make_runner(1, partial(drafters.MAKERS[kind], tree=()), (wide,), **options)
    )
    for seed in range(4200, 4206):
        rng = random.Random(seed)
        requests = equal.draw_requests(rng, f"f{seed}")
        way = dataclasses.replace(equal.Way.draw(rng), drafts=False, random_buckets=False)
        compare(equal.run(device, requests, way, rng), equal.alone(plain, requests))
    assert device.stood > (50 if kind == "draft" else 0)


@pytest.mark.slow
def test_they_are_not_what_float32_gives() -> None:
    """Otherwise none of this shows anything."""
    plain, four = (equal.make_runner(model=WIDE, **o) for o in ({}, OF["int4"]))
    assert four.memory.page_bytes * 5 < plain.memory.page_bytes
    with pytest.raises(AssertionError):
        check_workload(plain, 4000, four)
