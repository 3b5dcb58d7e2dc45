"""Every family on 2 and 4 devices against one: fused tensors, norms over all heads and repeated kv heads among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.family import check_layout
from jserve.model.hand import Row
from jserve.model.mesh import make_mesh, mesh_of
from jserve.model.moe_places import n_routed
from jserve.model.shard import Axes, ShardRules
from jserve.model.view import Bucket
from jserve.sharding import Sharding
from tests.model.driver import Driver
from tests.model.test_expert_parallel import ARCH, FAMILY

CASES = (
    *("llama-gqa4", "mistral-window", "qwen2-window-yarn", "qwen3-bias-window"),
    *(
        "gemma",
        "gemma2",
        "gemma3",
        "phi3-longrope",
        "olmo2",
        "granite",
        "cohere2",
        "smollm3",
        "exaone4",
        "glm4",
    ),
    *("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe", "granite-moe-shared"),
    *("gpt-oss", "llama4", "deepseek-v2", "deepseek-v3"),
)
BUCKET = Bucket(D=2, P=40, F=1)
FEWER = {
    "gemma3": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "cohere2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt-oss": {"num_hidden_layers": 2},
    "deepseek-v3": {"num_hidden_layers": 2},
}
"""One layer of each kind where ``test_parity`` has more."""
QUICK = ("gemma3", "phi3-longrope", "deepseek-v3")
"""A norm on each head, fused tensors, latents: what splits differently from Llama."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_devices_agree(case: str) -> None:
    """Two kv heads, so four devices hold each of them twice."""
    logits = of_case(case)
    one = logits(1)
    for tp in (2, 4):
        got = logits(tp)
        assert np.abs(got - one).max() < 1e-5 * np.ptp(one), f"{tp} devices"
        assert got.argmax(-1).tolist() == one.argmax(-1).tolist(), f"tokens of {tp} devices"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [c if c in ("gpt-oss", "cohere2") else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
)
def test_a_residual_stream_split_over_tokens_agrees(case: str) -> None:
    logits = of_case(case)
    one, split = logits(1), logits(4, residual="split")
    assert np.abs(split - one).max() < 1e-5 * np.ptp(one)


@pytest.mark.parametrize(
    "case",
    [
        c if c == "cohere2" else pytest.param(c, marks=pytest.mark.slow)
        for c in CASES[: CASES.index("mixtral")]
    ],
)
def test_a_residual_stream_split_over_its_width_agrees(case: str) -> None:
    logits = of_case(case)
    one = logits(1)
    for residual in ("whole", "split"):
        split = logits(2, x=2, residual=residual)
        assert np.abs(split - one).max() < 1e-5 * np.ptp(one), residual


def test_experts_read_the_residual_stream_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(FAMILY, ARCH, Axes(embed="x"))
    assert caught.value.field == "sharding.rules.embed"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[CASES.index("mixtral") :])
def test_devices_with_different_experts_agree(case: str) -> None:
    """As many redundant experts as fill the slots up."""
    logits = of_case(case)
    one = logits(1)
    for ep, tp in ((2, 1), (4, 1), (2, 2)):
        got = logits(tp, ep)
        assert np.abs(got - one).max() < 1e-5 * np.ptp(one), f"{ep} groups of {tp}"
        assert got.argmax(-1).tolist() == one.argmax(-1).tolist(), f"tokens of {ep} groups of {tp}"
    assert np.abs(logits(2, 2, residual="split") - one).max() < 1e-5 * np.ptp(one)


def of_case(case: str) -> Callable[..., np.ndarray]:
    """(devices of a group, groups) -> the logits of one prompt."""
    from tests.model import hf
    from tests.model.test_parity import CASES as OF

    model, config = hf.tiny(OF[case][0], **OF[case][1] | FEWER.get(case, {}))
    family = family_for(config)
    arch, get = family.arch(config), hf.weights(model)
    prompt = np.random.default_rng(1).integers(0, 128, 39).tolist()

    def logits(tp: int, ep: int = 1, x: int = 1, residual: str = "whole") -> np.ndarray:
        mesh = make_mesh(tp, ep=ep)
        spare = -n_routed(arch)[1] % ep if ep > 1 else 0
        rules = replace(ShardRules.of_mesh(mesh.shape, spare), residual=residual)
        if x > 1:
            mesh = mesh_of(Sharding(mesh=(("x", x), ("tp", tp))))
            rules = replace(rules, embed="x")
        driver = Driver(family, arch, get, attn="ref", mesh=mesh, rules=rules)
        return driver.step(BUCKET, prefill=[Row(list(range(1, 17)), 0, prompt)])[2:41]

    return logits
