"""Taps and steering where the model lies on several devices, its residual stream whole, split over the tokens of
prompts, or over its width: values and tokens of one device."""

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
HEADS = tuple(f"blocks.{i}.attn.hook_{x}" for i in (0, 1) for x in ("q", "rot_q", "z"))
KEYS = tuple(f"blocks.{i}.attn.hook_{x}" for i in (0, 1) for x in ("k", "rot_k", "v"))
SPECS: dict[str, dict[str, Any]] = {
    "tp 2": {"mesh": {"tp": 2}},
    "split residual": {"mesh": {"tp": 2}, "residual": "split"},
    "split residual over 8, kv heads repeated, split logits": {
        "mesh": {"tp": 8},
        "residual": "split",
        "logits": "split",
    },
    "width": {
        "mesh": {"x": 2, "y": 2},
        "rules": {"embed": "x", "kv_heads": "y", "ffn": "y", "vocab": "y"},
    },
    "auto": {
        "mesh": {"x": 2, "y": 2},
        "mode": "auto",
        "rules": {"embed": "x", "kv_heads": "y", "ffn": "y", "vocab": "x"},
    },
}
TAPS = {
    "probe": (len(POINTS), ARCH.D),
    "heads": (len(HEADS), ARCH.N, ARCH.H),
    "keys": (len(KEYS), ARCH.K, ARCH.H),
}
"""Of each the shape of a token's values."""
ONE: dict[str, Any] = {"mesh": {"tp": 1}}
CALM, OTHER = np.random.default_rng(3).standard_normal((2, ARCH.D)).astype(np.float32)


@lru_cache
def made() -> tuple[StepFeature, ...]:
    vectors = {"calm": CALM, "other": OTHER}
    return (
        steering("fixed", "blocks.0.hook_resid_post", vectors=vectors, mode="replace"),
        steering("less", "blocks.1.hook_resid_pre", vectors=vectors, mode="project"),
        steering("mood", "blocks.0.hook_resid_post", vectors=vectors, most=2),
        tap("heads", *HEADS, prompt=True),
        tap("keys", *KEYS, prompt=True),
        tap("probe", *POINTS, prompt=True),
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_REGISTERED", {f.name: f for f in made()})


class Asking(Rig):
    """A rig whose rows of prompts ask for values of their tokens."""

    def _prefill_row(self, live: Live, n: int) -> RowPlan:
        row = super()._prefill_row(live, n)
        asks = [name for name in TAPS if live.job.params.extra_args.get(name) == "prompt"]
        return msgspec.structs.replace(row, prompt_features=tuple(asks))


def jobs() -> list[Job]:
    asked: list[dict[str, Any]] = [
        {"probe": "prompt", "heads": "prompt"},
        {"probe": "prompt", "keys": "prompt", "mood": ["calm", 1.5, "other", -1.0, "2:5"]},
        {"probe": True, "heads": True, "fixed": ["calm", 2.0, "drawn"]},
        {"probe": True, "keys": True, "less": ["other", 1.0]},
        {},
    ]
    return [
        Job(prompt=p, params=SamplingParams(temperature=0.0, max_tokens=64, extra_args=extra))
        for p, extra in zip(prompts(5, seed=2, low=5), asked, strict=True)
    ]


def ran(spec: dict[str, Any]) -> tuple[list[list[int]], list[dict[str, np.ndarray]]]:
    """The tokens of each job, and by tap the values of its tokens, those of the prompt first."""
    bucket = Bucket(D=6, P=48, F=4).with_also(*made())
    rig = Asking(test_layouts.runner(spec, (bucket,)), chunk=7, seed=1)
    tokens, values = rig.run(jobs()), []
    for live in rig.lives:
        asked = [name for name in TAPS if name in live.job.params.extra_args]
        values.append({name: np.array(found(live, name), np.float32) for name in asked})
    return tokens, values


def found(live: Live, name: str) -> list[Any]:
    of_tokens: list[Any] = []
    for result, r in live.rows:
        of_tokens += result.prompt_extra.get(name, {}).get(r, ())
        of_tokens += result.extra[name][r][: int(result.n_ok_R[r])]
    return of_tokens


@lru_cache
def on_one_device() -> tuple[list[list[int]], list[dict[str, np.ndarray]]]:
    return ran(ONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_values_and_steered_tokens_are_those_of_one_device(name: str) -> None:
    want, got = on_one_device(), ran(SPECS[name])
    assert got[0] == want[0]
    for job, mine, theirs in zip(jobs(), got[1], want[1], strict=True):
        assert mine.keys() == theirs.keys()
        for name, x in mine.items():
            of_prompt = job.params.extra_args[name] == "prompt"
            n = job.n + (len(job.prompt) if of_prompt else 0)
            assert x.shape == theirs[name].shape == (n, *TAPS[name])
            np.testing.assert_allclose(x, theirs[name], rtol=1e-4, atol=2e-5, err_msg=name)


def test_steering_changes_what_is_drawn() -> None:
    tokens, _ = on_one_device()
    bucket = Bucket(D=6, P=48, F=4).with_also(*made())
    rig = Rig(test_layouts.runner(ONE, (bucket,)))
    plain = rig.run([replace(job, params=SamplingParams(temperature=0.0)) for job in jobs()])
    assert [a == b for a, b in zip(tokens, plain, strict=True)] == [True, False, False, False, True]
