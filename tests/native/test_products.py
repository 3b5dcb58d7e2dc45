"""Every level's products against float64 of the rounded operands, in every form that the number of rows selects."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.native.library import LEVELS, Library
from tests.native.direct import Guarded, exact, multiply, operands

ROWS = (*range(1, 41), 64, 65, 128, 161)
SHAPES = ((1, 1), (5, 7), (16, 64), (37, 33), (40, 96))
"""(N, K): odd and even, below, at and beyond a vector."""
APART = 2e-6
"""Largest error over the largest result."""


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= APART * max(np.abs(want).max(), 1.0)


@pytest.fixture(params=LEVELS)
def each(request: pytest.FixtureRequest, kernels: Library) -> str:
    if request.param not in kernels.levels():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_any_number_of_rows(kernels, each, shape):
    for M in ROWS:
        x, w = operands(M, *shape)
        close(multiply(kernels, each, x, w), exact(x, w))


@pytest.mark.parametrize("shape", [(2, 1), (10, 33), (74, 160), (400, 64)])
def test_gate_and_up_with_silu(kernels, each, shape):
    for M in (1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 100, 128, 193):
        x, w = operands(M, *shape)
        close(multiply(kernels, each, x, w, fused=True), exact(x, w, fused=True))


def test_silu_of_large_numbers_neither_overflows_nor_vanishes(kernels, each):
    x, w = np.ones((1, 2), np.float32), operands(1, 64, 2)[1]
    w[:32, 0], w[:32, 1] = np.linspace(-120, 120, 32), 0
    close(multiply(kernels, each, x, w, fused=True), exact(x, w, fused=True))


def test_sizes_at_which_forms_change(kernels, each):
    """Weights of more chunks than one, packed rows beyond what stays near, the last chunk not whole, one row of x and
    weight rows too long to be read one after the other."""
    sizes = ((1, 1037, 520), (7, 517, 300), (16, 530, 161), (100, 133, 1700), (545, 37, 300))
    for M, N, K in (*sizes, (1, 19, 2075)) if each != "plain" else ((7, 131, 300),):
        x, w = operands(M, N, K)
        close(multiply(kernels, each, x, w), exact(x, w))


@pytest.mark.parametrize("M", [3, 8, 12, 20, 50, 150])
def test_rows_of_zeros_give_zeros_and_leave_the_others(kernels, each, M):
    x, w = operands(M, 40, 96)
    dead = np.random.default_rng(M).permutation(M)[: M // 2 + 1]
    x[dead], x[dead[0], 0] = 0.0, -0.0
    w[3] = np.inf
    alive = np.setdiff1d(np.arange(M), dead)
    for fused in (False, True):
        got = multiply(kernels, each, x, w, fused=fused)
        assert (got[dead] == 0).all()
        whole = multiply(kernels, each, x[alive].copy(), w, fused=fused)
        assert np.array_equal(got[alive], whole, equal_nan=True), "they cost and change nothing"
    x[:] = 0
    assert (multiply(kernels, each, x, w) == 0).all()


@pytest.mark.parametrize("K", [1, 63, 64, 130])
def test_a_row_lives_by_any_of_its_values(kernels, each, K):
    w = operands(1, 8, K)[1]
    x = np.eye(K, dtype=np.float32)
    close(multiply(kernels, each, x, w), exact(x, w))


@pytest.mark.parametrize("M", [1, 4, 8, 9, 17, 40])
def test_what_is_not_finite_stays_in_its_row(kernels, each, M):
    x, w = operands(M, 33, 75)
    clean = multiply(kernels, each, x, w)
    for bad in (np.nan, np.inf):
        x[M // 2, 74] = bad
        got = multiply(kernels, each, x, w)
        others = np.arange(M) != M // 2
        assert not np.isfinite(got[M // 2]).any()
        assert np.array_equal(got[others], clean[others])
    x, w = operands(M, 33, 75)
    w[32, 74] = np.nan
    got = multiply(kernels, each, x, w)
    assert np.isnan(got[:, 32]).all()
    assert np.array_equal(got[:, :32], clean[:, :32])


@pytest.mark.parametrize("M", [1, 4, 8, 9, 17, 40, 65])
def test_what_is_not_finite_in_gate_and_up_stays_in_its_row(kernels, each, M):
    """In x its row, in the weights of the gate or of up a column."""
    n = 37
    x, w = operands(M, 2 * n, 75)
    clean = multiply(kernels, each, x, w, fused=True)
    others = np.arange(M) != M // 2
    for bad in (np.nan, np.inf, -np.inf):
        x[M // 2, 74] = bad
        got = multiply(kernels, each, x, w, fused=True)
        assert not np.isfinite(got[M // 2]).any()
        assert np.array_equal(got[others], clean[others])
    x, w = operands(M, 2 * n, 75)
    for row, k in ((n - 1, 74), (n + 20, 0)):
        kept, w[row, k] = w[row, k], np.nan
        got = multiply(kernels, each, x, w, fused=True)
        assert np.isnan(got[:, row % n]).all()
        unharmed = np.arange(n) != row % n
        assert np.array_equal(got[:, unharmed], clean[:, unharmed])
        w[row, k] = kept


@pytest.mark.parametrize("M", [1, 2, 7, 9, 33, 64])
def test_nothing_beyond_the_end_of_a_buffer_is_touched(kernels, each, M):
    memory = Guarded()
    for N, K in ((1, 1), (3, 31), (9, 33), (130, 65), (21, 129)):
        x, w = (memory.like(a) for a in operands(M, 2 * N, K))
        for fused in (False, True):
            y = memory.like(np.zeros((M, N if fused else 2 * N), np.float32))
            close(multiply(kernels, each, x, w, fused=fused, out=y), exact(x, w, fused=fused))
