"""Taps and steering where the model lies on several devices, its residual stream whole or split over the tokens of
prompts: values and tokens of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest

from jserve.model import features
from jserve.model.feature import StepFeature
from jserve.model.features.steering import steering
from jserve.model.features.tap import tap
from jserve.model.view import Bucket
from jserve.sampling import SamplingParams
from jserve.types import RowPlan
from tests.runner import test_layouts
from tests.runner.harness import ARCH, Job, Live, Rig, prompts

POINTS = (
    "hook_embed",
    "blocks.0.hook_attn_out",
    "blocks.0.hook_mlp_out",
    "blocks.1.hook_resid_pre",
    "blocks.1.hook_resid_mid",
    "blocks.1.hook_resid_post",
    "ln_final.hook_normalized",
)
SPECS: dict[str, dict[str, Any]] = {
    "tp 2": {"mesh": {"tp": 2}},
    "split residual": {"mesh": {"tp": 2}, "residual": "split"},
    "split residual over 4, split logits": {
        "mesh": {"tp": 4},
        "residual": "split",
        "logits": "split",
    },
}
ONE: dict[str, Any] = {"mesh": {"tp": 1}}
CALM, OTHER = np.random.default_rng(3).standard_normal((2, ARCH.D)).astype(np.float32)


@lru_cache
def made() -> tuple[StepFeature, ...]:
    vectors = {"calm": CALM, "other": OTHER}
    return (
        steering("fixed", "blocks.0.hook_resid_post", vectors=vectors, mode="replace"),
        steering("less", "blocks.1.hook_resid_pre", vectors=vectors, mode="project"),
        steering("mood", "blocks.0.hook_resid_post", vectors=vectors, most=2),
        tap("probe", *POINTS, prompt=True),
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_REGISTERED", {f.name: f for f in made()})


class Asking(Rig):
    """A rig whose rows of prompts ask for values of their tokens."""

    def _prefill_row(self, live: Live, n: int) -> RowPlan:
        row = super()._prefill_row(live, n)
        asks = live.job.params.extra_args.get("probe") == "prompt"
        return msgspec.structs.replace(row, prompt_features=("probe",) if asks else ())


def jobs() -> list[Job]:
    asked: list[dict[str, Any]] = [
        {"probe": "prompt"},
        {"probe": "prompt", "mood": ["calm", 1.5, "other", -1.0, "2:5"]},
        {"probe": True, "fixed": ["calm", 2.0, "drawn"]},
        {"probe": True, "less": ["other", 1.0]},
        {},
    ]
    return [
        Job(prompt=p, params=SamplingParams(temperature=0.0, max_tokens=64, extra_args=extra))
        for p, extra in zip(prompts(5, seed=2, low=5), asked, strict=True)
    ]


def ran(spec: dict[str, Any]) -> tuple[list[list[int]], list[np.ndarray]]:
    """The tokens of each job, and the values of its tokens, those of the prompt first."""
    bucket = Bucket(D=6, P=48, F=4).with_also(*made())
    rig = Asking(test_layouts.runner(spec, (bucket,)), chunk=7, seed=1)
    tokens, values = rig.run(jobs()), []
    for live in rig.lives:
        found: list[Any] = []
        for result, r in live.rows:
            found += result.prompt_extra.get("probe", {}).get(r, ())
            if "probe" in live.job.params.extra_args:
                found += result.extra["probe"][r][: int(result.n_ok_R[r])]
        values.append(np.array(found, np.float32))
    return tokens, values


@lru_cache
def on_one_device() -> tuple[list[list[int]], list[np.ndarray]]:
    return ran(ONE)


@pytest.mark.parametrize(
    "name", [n if n == "split residual" else pytest.param(n, marks=pytest.mark.slow) for n in SPECS]
)
def test_values_and_steered_tokens_are_those_of_one_device(name: str) -> None:
    want, got = on_one_device(), ran(SPECS[name])
    assert got[0] == want[0]
    for job, mine, theirs in zip(jobs(), got[1], want[1], strict=True):
        asked = job.params.extra_args.get("probe")
        n = 0 if asked is None else job.n + (len(job.prompt) if asked == "prompt" else 0)
        assert mine.shape == theirs.shape == ((n, len(POINTS), ARCH.D) if n else (0,))
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-5)


def test_steering_changes_what_is_drawn() -> None:
    tokens, _ = on_one_device()
    bucket = Bucket(D=6, P=48, F=4).with_also(*made())
    rig = Rig(test_layouts.runner(ONE, (bucket,)))
    plain = rig.run([replace(job, params=SamplingParams(temperature=0.0)) for job in jobs()])
    assert [a == b for a, b in zip(tokens, plain, strict=True)] == [True, False, False, False, True]
