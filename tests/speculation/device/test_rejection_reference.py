"""The judge of distributions sees what goes wrong in rejection samplers (Leviathan et al., 2023).

jserve has none: it compares drafts with the target's own draws. So the textbook algorithm is written out
here, right and with each of its usual faults, and judged as ``test_speculation_distribution`` judges ours."""

from __future__ import annotations

import numpy as np
import pytest

from tests.speculation.device.test_distribution import LAST, P_MIN, N, V, p_value, target

FAULTS = (
    "accept always",
    "residual not renormalised",
    "drafts filtered otherwise",
    "bonus from the draft",
)
TOP = 6


def chances(temperature: float) -> np.ndarray:
    """float64[V, V]: the token after each token, of the likeliest ``TOP``."""
    x = target().astype(np.float64) / temperature
    x[x < np.sort(x, axis=1)[:, -TOP, None]] = -np.inf
    p = np.exp(x - x.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def unfiltered(temperature: float) -> np.ndarray:
    p = np.exp(target().astype(np.float64) / temperature)
    return p / p.sum(1, keepdims=True)


def draw(rng: np.random.Generator, p_NV: np.ndarray) -> np.ndarray:
    sums = np.cumsum(p_NV, axis=1)
    return (rng.random((len(p_NV), 1)) * sums[:, -1:] >= sums).sum(1).clip(max=V - 1)


def rejection(fault: str = "") -> np.ndarray:
    """int[N, 2]: two tokens of each row; one draft, from a hotter copy of the target."""
    rng = np.random.default_rng(3)
    p_VV, q_VV = chances(1.0), chances(1.6)
    drafted_VV = unfiltered(1.6) if fault == "drafts filtered otherwise" else q_VV
    p_NV, q_NV = np.tile(p_VV[LAST], (N, 1)), np.tile(q_VV[LAST], (N, 1))
    draft_N = draw(rng, np.tile(drafted_VV[LAST], (N, 1)))
    row = np.arange(N)
    with np.errstate(divide="ignore", invalid="ignore"):
        share_N = np.where(q_NV[row, draft_N] > 0, p_NV[row, draft_N] / q_NV[row, draft_N], 1.0)
    stands_N = (rng.random(N) < share_N) | (fault == "accept always")
    residual_NV = p_NV if fault == "residual not renormalised" else np.maximum(p_NV - q_NV, 0)
    first_N = np.where(stands_N, draft_N, draw(rng, residual_NV))
    bonus_VV = q_VV if fault == "bonus from the draft" else p_VV
    second_N = np.where(stands_N, draw(rng, bonus_VV[first_N]), draw(rng, p_VV[first_N]))
    return np.stack([first_N, second_N], 1)


def joint() -> np.ndarray:
    p_VV = chances(1.0)
    return p_VV[LAST][:, None] * p_VV


def test_the_textbook_algorithm_passes() -> None:
    assert p_value(rejection(), joint()) > P_MIN


@pytest.mark.parametrize("fault", FAULTS)
def test_each_of_its_faults_is_seen(fault: str) -> None:
    assert p_value(rejection(fault), joint()) < P_MIN
