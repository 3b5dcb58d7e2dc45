"""The shipped model under many shardings of eight forced devices, in float32: what one device says."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from jserve import LLM, SamplingParams
from tests.runner.test_layouts import ALL, WIDTH, XY
from tests.whole.test_shipped import OPTIONS, PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SPECS: dict[str, dict[str, Any]] = {
    "one axis": {"mesh": {"tp": 2}},
    "kv repeated": {"mesh": {"tp": 4}},
    "dp": {"mesh": {"dp": 2, "tp": 4}},
    "split logits": {"mesh": {"tp": 4}, "logits": "split"},
    "sums of weights": {"mesh": {"tp": 4}, "sums": "weights"},
    "split residual": {"mesh": {"tp": 4}, "residual": "split"},
    "two axes": {"mesh": XY, "rules": {**ALL, "kv_heads": "y", "vocab": "x"}},
    "2D": {"mesh": XY, "rules": {**WIDTH, "vocab": "y"}},
    "all that is split": {
        "mesh": {"dp": 2, "x": 2, "y": 2},
        "rules": {**WIDTH, "vocab": "y"},
        "logits": "split",
        "residual": "split",
    },
    "auto, heads": {"mesh": XY, "mode": "auto", "rules": {**ALL, "kv_heads": "y"}},
    "auto, 2D": {"mesh": XY, "mode": "auto", "rules": {"kv_heads": "y", "ffn": "y", "embed": "x"}},
    "auto, by path": {
        "mesh": XY,
        "mode": "auto",
        "rules": {"kv_heads": "y", "vocab": "x"},
        "params": {"layers/.*/down": [None, ["x", "y"]]},
    },
}
TOLERANCE = 1e-5
"""Of a log-probability, and of its size: sums over devices are added in another order."""


def answers(**options: Any) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """(tokens, log-probabilities of prompts and answers): greedy, sampled and cut."""
    common: dict[str, Any] = {"max_tokens": 24, "logprobs": 0, "prompt_logprobs": 0}
    asked = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, seed=7, **common),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=11, **common),
    ]
    with LLM(**{**OPTIONS, "prompt_logprobs": True}, **options) as llm:
        found = llm.chat(PROMPTS, asked, use_tqdm=False)
    entries = [e for out in found for e in (*out.prompt_logprobs[1:], *out.outputs[0].logprobs)]
    likely = [one.logprob for entry in entries for one in entry.values()]
    return [out.outputs[0].token_ids for out in found], np.array(likely)


@lru_cache(maxsize=1)
def alone() -> tuple[list[tuple[int, ...]], np.ndarray]:
    return answers()


@pytest.mark.parametrize("name", SPECS)
def test_a_sharding_answers_as_one_device_does(name: str) -> None:
    tokens, likely = answers(sharding=SPECS[name])
    assert tokens == alone()[0]
    np.testing.assert_allclose(likely, alone()[1], rtol=TOLERANCE, atol=TOLERANCE)
