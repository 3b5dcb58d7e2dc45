"""Quantisation with data: GPTQ, HQQ, scales of inputs and rotations, beside plain numpy and planted outliers."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.quant import LARGEST, Form, widened
from jserve.weights.quant.methods.gptq import gptq_numbers
from jserve.weights.quant.methods.rotation import rotation
from jserve.weights.quant.methods.scales import awq_scales, smooth_scales
from jserve.weights.quant.methods.stats import InputStats
from jserve.weights.quant.rounding import as_tensor, numbers_of, scales_of

RNG = np.random.default_rng(0)


def form(kind: str = "int4", group: int = 32, method: str = "mse") -> Form:
    return Form(kind=kind, group=group, method=method)


def rounded(w: np.ndarray, how: Form) -> np.ndarray:
    """What the numbers stand for."""
    made = as_tensor(jnp.asarray(w, jnp.float32), dataclasses.replace(how, dtype="float32"))
    return np.asarray(widened(made))


def stats_of(x_TD: np.ndarray) -> InputStats:
    kept = jnp.arange(len(x_TD)) < len(x_TD)
    return InputStats.empty(x_TD.shape[1]).with_more(jnp.asarray(x_TD), kept)


def correlated(n: int, D: int, *, outlier: float = 1.0) -> np.ndarray:
    x = RNG.standard_normal((n, D)) @ (RNG.standard_normal((D, D)) * 0.3 + np.eye(D))
    x[:, 3] *= outlier
    return x.astype(np.float32)


def plain_gptq(w: np.ndarray, scale: np.ndarray, hessian: np.ndarray, top: float) -> np.ndarray:
    """The recursion of the paper (OBQ in a fixed order), with an inverse that is updated column by column."""
    order = np.argsort(-np.diag(hessian), kind="stable")
    H = hessian[order][:, order] + 0.01 * np.diag(hessian).mean() * np.eye(len(order))
    left, s = w[:, order].astype(np.float64), scale[:, order]
    q = np.zeros_like(left)
    inverse = np.linalg.inv(H)
    for i in range(len(order)):
        q[:, i] = np.clip(np.round(left[:, i] / s[:, i]), -top - 1, top)
        off = (left[:, i] - q[:, i] * s[:, i]) / inverse[0, 0]
        left[:, i:] -= off[:, None] * inverse[0]
        inverse = (inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    found = np.zeros_like(q)
    found[:, order] = q
    return found


def test_gptq_is_the_recursion_of_the_paper_over_several_blocks() -> None:
    D = 160
    x, w = correlated(500, D), RNG.standard_normal((24, D)).astype(np.float32)
    how, hessian = form(), stats_of(x).hessian_DD
    scale = np.asarray(scales_of(jnp.asarray(w), how))
    q = gptq_numbers(w, scale, how, hessian)
    want = plain_gptq(w, scale.repeat(32, axis=1), hessian, LARGEST["int4"])
    assert (q == want).mean() > 0.995  # a tie in float32 may fall to the other side
    assert q.dtype == np.int8


def test_gptq_is_near_the_best_of_all_numbers_of_a_tiny_matrix() -> None:
    """Rounding up or down alone, over all choices: GPTQ comes closer to the best than the nearest numbers do."""
    D, how = 8, form(group=0)
    x = correlated(100, D)
    stats, won = stats_of(x), 0
    for seed in range(20):
        w = np.random.default_rng(seed).standard_normal((1, D)).astype(np.float32)
        scale = np.asarray(scales_of(jnp.asarray(w), how))
        low = np.floor(w / scale)
        ways = low + np.array(list(itertools.product((0, 1), repeat=D)))
        best = min(stats.error(way[None] * scale - w) for way in ways)
        near = stats.error(
            np.asarray(numbers_of(jnp.asarray(w), jnp.asarray(scale), how)) * scale - w
        )
        found = stats.error(gptq_numbers(w, scale, how, stats.hessian_DD) * scale - w)
        assert found >= best * 0.999 or np.abs(w / scale).max() > 7
        won += found <= near * 1.0001
    assert won >= 16


def test_gptq_takes_inputs_that_are_always_zero() -> None:
    x, w = correlated(50, 32), RNG.standard_normal((4, 32)).astype(np.float32)
    x[:, 5] = 0
    how = form()
    scale = np.asarray(scales_of(jnp.asarray(w), how))
    for seen in (x, np.zeros_like(x)):
        q = gptq_numbers(w, scale, how, stats_of(seen).hessian_DD)
        assert np.isfinite(q.astype(np.float32)).all()


def test_hqq_reduces_the_error_it_is_about_where_few_weights_are_large() -> None:
    w = RNG.standard_normal((64, 64)).astype(np.float32)
    w[RNG.random(w.shape) < 0.02] *= 8
    errors = {}
    for method in ("rtn", "mse", "hqq"):
        off = rounded(w, form(group=64, method=method)) - w
        errors[method] = (np.abs(off) ** 0.7).sum()
    assert errors["hqq"] < errors["mse"] < errors["rtn"]


def test_awq_protects_the_inputs_with_large_activations() -> None:
    x, w = correlated(300, 64, outlier=20.0), RNG.standard_normal((32, 64)).astype(np.float32)
    stats, how = stats_of(x), form()

    s_D = awq_scales(stats, stats.mean_D, [w], [lambda m: rounded(m, how)])
    plain, scaled = rounded(w, how) - w, rounded(w * s_D, how) / s_D - w
    assert s_D[3] > 2 * np.median(s_D)
    assert stats.error(scaled) < 0.8 * stats.error(plain)


def test_smoothquant_lowers_the_error_of_rounded_activations() -> None:
    x, w = correlated(300, 64, outlier=50.0), RNG.standard_normal((32, 64)).astype(np.float32)
    how = Form(kind="int8", rounded=True, method="rtn")

    def error(x: np.ndarray, w: np.ndarray) -> float:
        steps = np.abs(x).max(axis=1, keepdims=True) / 127
        y = np.round(x / steps) * steps @ rounded(w, how).T
        return float(((y - x @ w.T) ** 2).sum())

    s_D = smooth_scales(stats_of(x).most_D, [w], 0.5)
    assert error(x / s_D, w * s_D) < 0.3 * error(x, w)
    np.testing.assert_array_equal(smooth_scales(np.zeros(64, np.float32), [w], 0.5), np.ones(64))


@pytest.mark.parametrize("n", [64, 96])
def test_a_rotation_is_orthogonal_and_spreads_one_channel(n: int) -> None:
    turn = rotation(n, 0)
    np.testing.assert_allclose(turn @ turn.T, np.eye(n), atol=1e-12)
    np.testing.assert_array_equal(turn, rotation(n, 0))
    assert np.abs(turn[0]).max() < 0.95


def test_stats_of_parts_are_those_of_the_whole() -> None:
    x = correlated(40, 16)
    whole = stats_of(x)
    parts = InputStats.empty(16)
    for part in (x[:7], x[7:]):
        kept = jnp.arange(64) < len(part)
        padded = np.concatenate([part, np.full((64 - len(part), 16), 99, np.float32)])
        parts = parts.with_more(jnp.asarray(padded), kept)
    assert parts.n == whole.n == 40
    np.testing.assert_allclose(parts.hessian_DD, whole.hessian_DD, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(parts.mean_D, whole.mean_D, rtol=1e-5)
    halved = whole.divided(np.full(16, 2.0))
    np.testing.assert_allclose(halved.error(np.ones((1, 16))) * 4, whole.error(np.ones((1, 16))))
