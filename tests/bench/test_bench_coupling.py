"""The chances of ``bench.coupling`` against draws and closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from bench.coupling import gumbel, inverse, rejection


@pytest.fixture(scope="module")
def pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    p_V, q_V = (rng.dirichlet(np.full(150, 0.1)) for _ in range(2))
    q_V = 0.6 * p_V + 0.4 * q_V
    return p_V, q_V


def test_the_same_distribution_always_agrees_and_disjoint_ones_never(pair) -> None:
    p_V, _ = pair
    other_V = np.roll(np.eye(1, 150)[0], 7)
    for coupling in (gumbel, inverse, rejection):
        assert coupling(p_V, p_V) == pytest.approx(1.0)
        assert coupling(np.eye(1, 150)[0], other_V) == 0.0


def test_gumbel_agrees_with_draws(pair) -> None:
    p_V, q_V = pair
    noise_NV = np.random.default_rng(1).gumbel(size=(40_000, 150))
    with np.errstate(divide="ignore"):
        a_N, b_N = ((noise_NV + np.log(x_V)).argmax(1) for x_V in (p_V, q_V))
    assert gumbel(p_V, q_V) == pytest.approx((a_N == b_N).mean(), abs=0.01)


def test_inverse_agrees_with_draws(pair) -> None:
    p_V, q_V = pair
    draws_2N = np.random.default_rng(2).random((2, 40_000))

    def drawn(p_V: np.ndarray) -> np.ndarray:
        p_BX = np.pad(p_V, (0, -150 % 64)).reshape(-1, 64)
        block_N = np.searchsorted(np.cumsum(p_BX.sum(1)), draws_2N[0])
        within_NX = np.cumsum(p_BX[block_N], 1) / p_BX[block_N].sum(1, keepdims=True)
        return block_N * 64 + (within_NX < draws_2N[1][:, None]).sum(1)

    assert inverse(p_V, q_V) == pytest.approx((drawn(p_V) == drawn(q_V)).mean(), abs=0.01)


def test_no_coupling_beats_rejection_and_gumbel_keeps_its_bound(pair) -> None:
    p_V, q_V = pair
    tv = np.abs(p_V - q_V).sum() / 2
    assert rejection(p_V, q_V) == pytest.approx(1 - tv)
    assert (1 - tv) / (1 + tv) <= gumbel(p_V, q_V) <= 1 - tv
    assert inverse(p_V, q_V) <= 1 - tv
