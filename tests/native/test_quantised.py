"""Every level's products with quantised weights against float64 of the stored numbers."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jserve.native.library import LEVELS, Library
from tests.native import quantised
from tests.native.direct import Guarded
from tests.native.quantised import Weights, exact, multiply, weights

ROWS = (*range(1, 41), 64, 65, 128)
FEW = {"avx2": 32, "avx512f": 32, "avx512_bf16": 8, "amx": 4}
"""Rows up to which a level widens numbers of groups in registers."""
FORMS = {
    "rounded": ("rounded", 0, ""),
    "int8": ("int8", 0, ""),
    "int8 with zeros": ("int8", 0, "zeros"),
    "int8 with shifts": ("int8", 0, "shifts"),
    "int8 by 16 with shifts": ("int8", 16, "shifts"),
    "int8 by 24 with shifts": ("int8", 24, "shifts"),
    "int8 by 32": ("int8", 32, "zeros"),
    "int8 by 32 with shifts": ("int8", 32, "shifts"),
    "e4m3": ("e4m3", 0, ""),
    "e4m3 by 16": ("e4m3", 16, ""),
    "int4": ("int4", 0, ""),
    "int4 by 32": ("int4", 32, ""),
    "int4 by 32 with zeros": ("int4", 32, "zeros"),
    "int4 by 64": ("int4", 64, ""),
    "int4 by 64 with zeros": ("int4", 64, "zeros"),
    "int4 by 96": ("int4", 96, "zeros"),
    "int4 by 128": ("int4", 128, ""),
    "int4 by 128 with zeros": ("int4", 128, "zeros"),
    "int4 by 256": ("int4", 256, "zeros"),
    "uint4 with shifts": ("uint4", 0, "shifts"),
    "uint4 by 16 with shifts": ("uint4", 16, "shifts"),
    "uint4 by 32 with shifts": ("uint4", 32, "shifts"),
    "uint4 by 128 with shifts": ("uint4", 128, "shifts"),
    "e2m1 by 16": ("e2m1", 16, ""),
    "e2m1 by 32": ("e2m1", 32, ""),
    "e2m1 by 128": ("e2m1", 128, ""),
}
"""Name -> kind, inputs of a scale (0: a row), whether zeros or shifts are taken off."""
ODD = ("rounded", "int8", "int8 with zeros", "int8 with shifts", "e4m3")
"""Those of any number of inputs."""
APART = 3e-6
"""Largest error over the largest result."""


@pytest.fixture(params=LEVELS)
def each(request: pytest.FixtureRequest, kernels: Library) -> str:
    if request.param not in kernels.levels():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def drawn(M: int, K: int) -> np.ndarray:
    """float32[M, K]."""
    return np.random.default_rng([M, K]).standard_normal((M, K), np.float32)


def made(form: str, N: int, K: int) -> Weights:
    kind, group, off = FORMS[form]
    return weights(kind, N, K, group=group, off=off)


@lru_cache(maxsize=64)
def kept(form: str, N: int, K: int) -> Weights:
    """For tests that do not change them."""
    return made(form, N, K)


def widens(w: Weights, level: str, M: int) -> bool:
    """Scales and shifts are widened into the weights, which are rounded."""
    groups, K = w.scale.shape[1], w.wide.shape[1]
    G = K // groups
    whole_blocks = groups == 1 or G % 32 == 0 or (G == 16 and K % 32 == 0)
    soon = w.kind in quantised.FOUR_BITS and G >= 64 and G % 32 == 0
    slow = level == "amx" and w.kind in quantised.FOUR_BITS and G % 32 != 0
    most = FEW.get(level, 0)
    few = 8 if slow else min(8, most) if soon else most
    in_registers = whole_blocks and few >= M
    return (groups > 1 or w.shift is not None) and not in_registers


def check(library: Library, level: str, x: np.ndarray, w: Weights, **how: Any) -> None:
    got, want = multiply(library, level, x, w, **how), exact(x, w, widened=widens(w, level, len(x)))
    if how.get("fused"):
        want = quantised.silu(want)
    elif w.kind == "rounded":
        assert np.array_equal(got, want), "integers are exact"
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= APART * max(np.abs(want).max(), 1.0)


def unit(form: str) -> int:
    """The fewest inputs of a form: whole groups, and whole blocks of numbers with four bits."""
    kind, group, _ = FORMS[form]
    blocks = kind in quantised.FOUR_BITS or group == 16
    return math.lcm(group or 32, 32) if blocks else group or 32


def sizes(form: str) -> list[tuple[int, int]]:
    if form in ODD:
        return [(5, 7), (37, 33), (40, 96), (8, 130), (3, 1)]
    return [(5, unit(form)), (13, unit(form) * 3), (9, unit(form) * 5)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_any_number_of_rows(kernels, each, form):
    for M in ROWS:
        for N, K in sizes(form)[: 3 if M < 20 else 2]:
            check(kernels, each, drawn(M, K), kept(form, N, K))


@pytest.mark.parametrize("form", FORMS)
def test_gate_and_up_with_silu(kernels, each, form):
    for M in (1, 2, 5, 8, 9, 17, 64, 65, 130):
        for N, K in sizes(form)[:2]:
            w = made(form, 2 * N, K)
            w.scale *= 2**-5
            w.shift = None if w.shift is None else w.shift * np.float32(2**-5)
            check(kernels, each, drawn(M, K), w, fused=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_sizes_of_several_chunks(kernels, each, form):
    """More chunks of weights than one, the last not whole; packed rows beyond what stays near."""
    long = 3 if unit(form) > 64 else 9
    for M, N, n in ((1, 1037, long), (7, 517, long), (100, 133, 3)):
        K = n * unit(form)
        check(kernels, each, drawn(M, K), kept(form, N, K))


@pytest.mark.parametrize("kind", ["int8", "e4m3", *quantised.FOUR_BITS])
def test_every_number_stands_for_itself(kernels, each, kind):
    """A row of x with a single one takes a column of the weights, and that exactly; a code that is no number is NaN."""
    half = kind in quantised.FOUR_BITS
    codes = np.arange(256, dtype=np.uint8)[:, None].repeat(32 if half else 64, 1)
    q = codes if half else codes.view(ml_dtypes.float8_e4m3fn if kind == "e4m3" else np.int8)
    w = Weights(kind, q, np.ones((256, 1), np.float32))
    for M in (1, 3, 12, 40):
        for k in (0, 5, 18, 31, 63):
            x = np.zeros((M, 64), np.float32)
            x[:, k] = 1
            np.testing.assert_array_equal(
                multiply(kernels, each, x, w), w.numbers[:, k][None].repeat(M, 0)
            )


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_zeros_give_zeros_and_leave_the_others(kernels, each, form):
    N, K = sizes(form)[1]
    for M in (3, 8, 12, 50):
        x, w = drawn(M, K), made(form, 2 * N, K)
        dead = np.random.default_rng(M).permutation(M)[: M // 2 + 1]
        x[dead] = 0.0
        w.scale[3] = np.inf
        alive = np.setdiff1d(np.arange(M), dead)
        for fused in (False, True):
            got = multiply(kernels, each, x, w, fused=fused)
            assert (got[dead] == 0).all()
            whole = multiply(kernels, each, x[alive].copy(), w, fused=fused)
            assert np.array_equal(got[alive], whole, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_stays_in_its_row(kernels, each, form):
    N, K = sizes(form)[1]
    for M in (1, 4, 9, 40):
        x, w = drawn(M, K), made(form, N, K)
        clean = multiply(kernels, each, x, w)
        for bad in (np.nan, np.inf):
            x[M // 2, K - 1] = bad
            got = multiply(kernels, each, x, w)
            others = np.arange(M) != M // 2
            assert not np.isfinite(got[M // 2][w.numbers[:, -1] != 0]).any()
            assert np.array_equal(got[others], clean[others])
        x, w = drawn(M, K), made(form, N, K)
        w.scale[N - 1, -1] = np.nan
        got = multiply(kernels, each, x, w)
        assert np.isnan(got[:, N - 1]).all()
        assert np.array_equal(got[:, : N - 1], clean[:, : N - 1])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_beyond_the_end_of_a_buffer_is_touched(kernels, each, form):
    for M in (1, 2, 7, 9, 33):
        memory = Guarded()
        for N, K in sizes(form):
            w = made(form, 2 * N, K)
            w.q, w.scale = memory.like(w.q), memory.like(w.scale)
            w.zero = None if w.zero is None else memory.like(w.zero)
            w.shift = None if w.shift is None else memory.like(w.shift)
            x = memory.like(drawn(M, K))
            for fused in (False, True):
                y = memory.like(np.zeros((M, N if fused else 2 * N), np.float32))
                multiply(kernels, each, x, w, fused=fused, out=y)
                assert np.array_equal(y, multiply(kernels, each, x.copy(), w, fused=fused))


@pytest.mark.parametrize("kind", quantised.FOUR_BITS)
def test_every_number_of_four_bits_has_its_value(kernels, each, kind):
    """At every place of a block."""
    for M in (1, 3, 16):
        w = weights(kind, 16, 64)
        w.q[:] = np.arange(16)[:, None] * 17
        w.scale[:] = 0.5
        x = np.zeros((M, 64), np.float32)
        for k in range(64):
            x[:] = 0
            x[:, k] = 3
            got = multiply(kernels, each, x, w)
            assert np.array_equal(got, np.tile(1.5 * quantised.FOUR_BITS[kind], (M, 1)))


def test_every_number_of_e4m3_has_its_value(kernels, each):
    """Subnormal ones too, and what is not a number."""
    for M in (1, 3, 16):
        w = weights("e4m3", 256, 33)
        w.q.view(np.uint8)[:] = 0
        w.q.view(np.uint8)[:, 5] = np.arange(256)
        w.scale[:] = 1
        x = np.ones((M, 33), np.float32)
        got = multiply(kernels, each, x, w)
        assert np.array_equal(got, np.tile(w.numbers[:, 5], (M, 1)), equal_nan=True)
        assert np.isnan(got[:, [0x7F, 0xFF]]).all()


def test_extremes_of_integers_are_exact(kernels, each):
    """The largest sums, and the number that has no opposite."""
    for M in (1, 5, 20):
        w = weights("rounded", 17, 500)
        w.q[:] = -128
        w.q[3] = 127
        x = np.tile(np.where(np.arange(500) % 7, 1.0, -1.0).astype(np.float32), (M, 1))
        x[-1] = 1e-30
        check(kernels, each, x, w)
