"""The noise of draws: its distribution, what it depends on, and how often two distributions that share it
choose alike, against exact chances."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jserve.model.noise import _BELOW_ONE, _gumbel, _unit, gumbel
from jserve.sampling import SamplingParams
from tests.model.sample_reference import Context
from tests.model.sample_rig import draws_of, jitted, slots_of

N, P_MIN = 40_000, 1e-6
V = 40


def seeds(n: int) -> jax.Array:
    """uint32[n, 2]: 0, 1, 2 ..., the worst case for a hash."""
    return jnp.asarray(np.arange(n, dtype=np.int64).view(np.uint32).reshape(n, 2))


@lru_cache
def noise(pos: int = 3, purpose: int = 0) -> np.ndarray:
    """float32[N, V]"""
    return np.asarray(gumbel(seeds(N), jnp.full(N, pos, jnp.int32), V, purpose))


def uniform(gumbel_X: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-gumbel_X.astype(np.float64)))


@pytest.mark.parametrize("token", [0, 1, V - 1])
def test_a_tokens_noise_is_gumbel_distributed(token):
    assert stats.kstest(uniform(noise()[:, token]), "uniform").pvalue > P_MIN


def test_the_noise_of_all_tokens_of_one_draw_is_gumbel_distributed():
    many = np.asarray(gumbel(seeds(1) + 77, jnp.full(1, 5, jnp.int32), 128_256))
    assert stats.kstest(uniform(many[0]), "uniform").pvalue > P_MIN
    assert len(np.unique(many)) > 0.98 * many.size


@pytest.mark.parametrize(
    "other",
    [
        lambda: noise()[:, 1],
        lambda: noise()[:, 32],
        lambda: noise(4)[:, 0],
        lambda: noise(3, 1)[:, 0],
        lambda: np.roll(noise()[:, 0], 1),
        lambda: np.roll(noise()[:, 1], 1),
    ],
    ids=["next token", "token 32", "next position", "purpose", "next seed", "next of both"],
)
def test_noise_is_independent_across(other):
    """A table of both, eight by eight, in which the noise of neighbours is not seen."""
    u, v = uniform(noise()[:, 0]), uniform(other())
    grid = np.histogram2d(u, v, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(grid.ravel()).pvalue > P_MIN


def test_noise_depends_on_both_words_of_the_seed_and_not_on_the_vocabulary():
    seed_E2 = jnp.asarray([[5, 0], [0, 5], [5, 5]], jnp.uint32)
    pos_E = jnp.full(3, 9, jnp.int32)
    wide, narrow = (np.asarray(gumbel(seed_E2, pos_E, n)) for n in (300, 17))
    np.testing.assert_array_equal(wide[:, :17], narrow)
    assert len(np.unique(wide)) == wide.size


def test_no_bits_give_infinite_noise():
    ends = jnp.asarray([0, 1, 2, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1], jnp.uint32)
    u = np.asarray(_unit(ends))
    assert 0 < u.min() == 2.0**-32
    assert u.max() == np.float32(_BELOW_ONE) < 1
    assert np.all(np.diff(u) >= 0)
    assert np.isfinite(np.asarray(_gumbel(jnp.asarray(u)))).all()


def test_the_logarithms_are_right_everywhere():
    u = np.concatenate([np.linspace(0.001, 0.999, 9999), 2.0 ** -np.linspace(0.01, 32, 9999)])
    u = np.concatenate([u, 1 - 2.0 ** -np.arange(1.0, 25.0)]).astype(np.float32)
    want = -np.log(-np.log1p(-u.astype(np.float64)))
    np.testing.assert_allclose(np.asarray(_gumbel(jnp.asarray(u))), want, atol=2e-6, rtol=1e-6)


# --- coupling


def draws(logits_V: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """int32[N]: what the sampler draws from these logits at N seeds."""
    row = (SamplingParams(temperature=temperature), Context(prompt=[1, 2], output=[]))
    one, flags = draws_of([row])
    many = replace(jax.tree.map(lambda a: jnp.repeat(a, N, axis=0), one), seed_E2=seeds(N))
    raw_NV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (N, len(logits_V)))
    return np.asarray(jitted()["sample"](raw_NV, many, slots_of([row], len(logits_V)), flags)[0])


def agreement(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """The chance that both choose the same token: the sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    ratio_VV = np.maximum(p_V[None] / p_V[:, None], q_V[None] / q_V[:, None])
    return float((1 / ratio_VV.sum(1)).sum())


@pytest.mark.parametrize(("spread", "off"), [(0.5, 0.2), (2.0, 0.3), (3.0, 1.0), (4.5, 2.5)])
def test_two_distributions_agree_as_often_as_gumbel_coupling_does(spread, off):
    rng = np.random.default_rng(int(10 * spread + 100 * off))
    x_V = rng.normal(0, spread, V)
    y_V = x_V + rng.normal(0, off, V)
    p_V, q_V = (np.exp(z - np.logaddexp.reduce(z)) for z in (x_V, y_V))
    tv = 0.5 * np.abs(p_V - q_V).sum()
    want = agreement(p_V, q_V)
    assert (1 - tv) / (1 + tv) <= want <= 1 - tv
    one_N, two_N = draws(x_V), draws(y_V)
    slack = 5 * (want * (1 - want) / N) ** 0.5
    assert np.mean(one_N == two_N) == pytest.approx(want, abs=slack)
    for drawn_N, chance_V in ((one_N, p_V), (two_N, q_V)):
        group_V = np.where(chance_V * N > 10, np.arange(V), np.argmax(chance_V))
        seen, hoped = np.bincount(group_V[drawn_N]), np.bincount(group_V, chance_V) * N
        assert stats.chisquare(seen[hoped > 0], hoped[hoped > 0]).pvalue > P_MIN


def test_where_all_logits_are_equal_the_noise_decides():
    np.testing.assert_array_equal(draws(np.zeros(V)), np.argmax(noise(2), axis=1))
