"""The search for a row's bound in the Mosaic interpreter: the set it leaves against float64 and a sort."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench.candidates.sample_threshold import ref, sample_threshold
from bench.candidates.sample_threshold.hopper import CANDIDATES, FIRST, LINE
from pallas_kernels.launch import interpreter
from tests.pallas_kernels.rows import LIMITS, LOGITS, logits

V = 3300  # neither whole tiles nor whole lines
TUNE = {"stages": 2, "lines": 4}


def bound(x: np.ndarray, limits: Any, kernel: Any = None, **tune: int) -> np.ndarray:
    """The kernel's answer for rows of logits; ``limits`` a tuple a row."""
    t, k, p, m = zip(*limits, strict=True)
    floats = (jnp.asarray(a, jnp.float32) for a in (t, p, m))
    temperature, top_p, min_p = floats
    args = (jnp.asarray(x), temperature, jnp.asarray(k, jnp.int32), top_p, min_p)
    if kernel is not None:
        return np.asarray(kernel(*args))
    return np.asarray(sample_threshold(*args, tune={**TUNE, **tune}, interpret=interpreter()))


def check(x: np.ndarray, got: float, limits: tuple[float, int, float, float]) -> None:
    """What ``got`` keeps is the set of the limits, but for masses within 1e-5 of top_p."""
    temperature, k, p, min_p = limits
    values = np.unique(x[np.isfinite(x)].astype(np.float64))[::-1]
    if min_p:
        # The kernel's own floor is float32: a value within rounding of it may fall either way.
        floor = values[0] + temperature * np.log(np.float32(min_p))
        values = values[values >= floor - 1e-5 * (abs(floor) + 1)]
    counts = np.array([(x >= v).sum() for v in values])
    if 0 < k < x.size:
        enough = np.flatnonzero(counts >= k)
        values = values[: enough[0] + 1] if enough.size else values
    weight = np.array([(x == v).sum() for v in values])
    mass = np.cumsum(weight * np.exp((values - values[0]) / temperature))
    edges = {len(values) - 1}
    if p < 1:
        want, before = p * mass[-1], np.concatenate([[0], mass[:-1]])
        edges = set(np.flatnonzero((mass >= want * (1 - 1e-5)) & (before < want * (1 + 1e-5))))
    kept = (x >= got).sum()
    assert np.isfinite(got)
    assert kept in {(x >= values[j]).sum() for j in edges}, (kept, len(values))


@pytest.mark.parametrize("kind", LOGITS)
def test_every_limit(kind: str) -> None:
    x = np.stack([logits(kind, V, i) for i in range(len(LIMITS))])
    for row, got, limits in zip(x, bound(x, LIMITS.values()), LIMITS.values(), strict=True):
        check(row, float(got), limits)


@pytest.mark.parametrize("kind", LOGITS)
def test_ref(kind: str) -> None:
    x = np.stack([logits(kind, V, i) for i in range(len(LIMITS))])
    for row, got, limits in zip(
        x, bound(x, LIMITS.values(), ref.sample_threshold), LIMITS.values(), strict=True
    ):
        if np.isfinite(got):
            check(row, float(got), limits)
        else:
            assert limits[1] >= np.isfinite(row).sum() or limits[1:] == (0, 1.0, 0.0)


@pytest.mark.parametrize(("V", "tune"), [(7, {}), (512, {}), (4096, {"lines": 16, "stages": 3})])
def test_sizes_of_vocabularies(V: int, tune: dict[str, int]) -> None:
    limits = [LIMITS["few"], LIMITS["nucleus"], LIMITS["everything at once"]]
    x = np.stack([logits("normal", V, i) for i in range(3)])
    for row, got, limit in zip(x, bound(x, limits, **tune), limits, strict=True):
        check(row, float(got), limit)


def test_the_bound_is_the_best_of_a_tile() -> None:
    """Each tile lies below the one before it, so a bound among the best of a tile is where skipping
    a tile too many, or one too few, moves it."""
    size = TUNE["lines"] * LINE
    rng = np.random.default_rng(size)
    x = np.sort(rng.standard_normal(V).astype(np.float32) * 3)[::-1].copy()
    for begin in range(0, V, size):
        rng.shuffle(x[begin : begin + size])
    ks = [begin + n for begin in range(0, V - size, size) for n in (0, 1, 2, 5) if begin + n > 1]
    masses = np.cumsum(np.exp(np.sort(x.astype(np.float64))[::-1]))
    limits = [(1.0, k, 1.0, 0.0) for k in ks]
    limits += [(1.0, 0, float(masses[k - 1] / masses[-1]), 0.0) for k in ks]
    for got, limit in zip(bound(np.stack([x] * len(limits)), limits), limits, strict=True):
        check(x, float(got), limit)


def test_the_bound_is_a_candidate_and_the_best_of_its_tile() -> None:
    """The next lower float is a logit too, which a search that passes over the candidate keeps."""
    size = TUNE["lines"] * LINE
    at = np.float32(6) * np.float32(1 / 5)  # the second pass begins with it: 0 is enough, 6 is not
    levels = (8.0, at, np.nextafter(at, np.float32(0)))
    x = np.repeat(np.array(levels, np.float32), size)
    limits = (1.0, size + 1, 1.0, 0.0)
    assert FIRST == (8, 2)
    assert CANDIDATES == 4
    assert (x >= bound(x[None], [limits])[0]).sum() == 2 * size


def test_rows_do_not_mix_and_bad_ones_end() -> None:
    """Rows of NaN, of nothing finite and of infinity give something; the row between is right."""
    x = np.stack([logits("peaked", V)] * 4)
    x[0], x[2], x[3, 5] = np.nan, -np.inf, np.inf
    limits = [LIMITS["everything at once"]] * 4
    check(x[1], float(bound(x, limits)[1]), limits[0])


def test_logits_so_large_that_the_way_from_the_lowest_float_is_none() -> None:
    x = logits("normal", V) * np.float32(1e33)
    limits = (1e33, 2900, 1.0, 0.0)  # more than lie within eight temperatures of the best
    check(x, float(bound(x[None], [limits])[0]), limits)


def test_one_is_the_largest_alone_even_among_ties() -> None:
    x = np.zeros((1, V), np.float32)
    x[0, [3, V - 1]] = 5.0
    assert (x[0] >= bound(x, [LIMITS["one token"]])[0]).sum() == 2


def test_what_is_refused() -> None:
    ones = jnp.ones(2)
    with pytest.raises(ValueError, match="bfloat16"):
        sample_threshold(jnp.zeros((2, 9), jnp.bfloat16), ones, ones, ones, ones)
    with pytest.raises(ValueError, match="limits of 3 rows"):
        sample_threshold(jnp.zeros((3, 9)), ones, ones, ones, ones)
