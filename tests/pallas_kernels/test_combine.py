"""Adding up partial sums in the Mosaic interpreter against float64: few slots and many, one row and several."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash import MASKED
from pallas_kernels.launch import interpreter
from pallas_kernels.paged_attention.api import tile_of
from pallas_kernels.paged_attention.combine import MANY_SPLITS, combine
from pallas_kernels.paged_attention.hopper import Tile, Work
from pallas_kernels.spec import AttentionSpec

PER = 4


def tile(*, splits: int, K: int = 1, G: int = 2, J: int = 1, H: int = 64) -> Tile:
    pool = jnp.empty((1, K, 16, H), jnp.bfloat16)
    tune = {"sms": splits * K, "teams": 1}
    spec = AttentionSpec(scale=1.0, tune=tune)
    found = tile_of(np.empty((1, J, K * G, H)), pool, spec)
    assert found.splits == splits
    return found


def work(slots: tuple[int, ...]) -> Work:
    """Rows of so many slots each, one after another on the line, of full splits."""
    cum = np.concatenate([[0], np.cumsum(slots)]).astype(np.int32) * PER
    none = jnp.zeros(len(slots), jnp.int32)
    return Work(jnp.asarray(cum), none, none, none, jnp.asarray([PER], jnp.int32))


def check(tile: Tile, slots: tuple[int, ...], *, sinks: bool = False, dtype: Any = jnp.float32):
    """Everything in slots of nobody and in rows that no query has is NaN."""
    rng, D, N = np.random.default_rng(len(slots)), len(slots), tile.heads
    o = np.full((D + tile.splits, tile.partial_rows, tile.H), np.nan, np.float32)
    logs = np.full(o.shape[:2], np.nan, np.float32)
    sink_N = rng.normal(0, 4, N).astype(np.float32) if sinks else None
    want = np.zeros((D, tile.J * N, tile.H))
    at = 0
    for r, n in enumerate(slots):
        mine = slice(r + at, r + at + n)
        for y in range(tile.J * N if n else 0):
            token, head = divmod(y, N)
            here = head // tile.G * tile.q_rows + token * tile.G + head % tile.G
            part = o[mine, here] = rng.standard_normal((n, tile.H))
            log = np.where(rng.random(n) < 0.2, MASKED, rng.normal(0, 6, n))
            log[0] = 1.0
            logs[mine, here] = log
            weight = 2.0 ** (log - log.max())
            rest = 2.0 ** (sink_N[head] - log.max()) if sink_N is not None else 0.0
            want[r, y] = weight @ part / (weight.sum() + rest)
        at += n
    assert at <= tile.splits
    sink = None if sink_N is None else jnp.asarray(sink_N)
    sums = (jnp.asarray(o), jnp.asarray(logs))
    got = np.asarray(combine(*sums, sink, work(slots), tile, dtype, interpreter()))
    assert got.dtype == dtype
    error = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=error, atol=error)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 10, 11, 33])
def test_a_row_of_many_slots_among_others(n: int) -> None:
    """Whole rounds, rounds with empty places, and the round of few."""
    check(tile(splits=n + 2), (0, n, 1, 0))


@pytest.mark.parametrize("n", [2, 3, 31, 34, 64, 67, 264])
def test_rounds_are_wider_where_few_heads_share_the_device(n: int) -> None:
    splits = max(n, MANY_SPLITS) + 2
    check(tile(splits=splits, G=1), (1, n, 0))


@pytest.mark.parametrize("H", [64, 128, 256])
def test_heads_of_all_sizes(H: int) -> None:
    check(tile(splits=12, K=2, G=3, H=H), (5, 2), sinks=True)


def test_rows_of_several_tokens_are_written_token_by_token() -> None:
    """Odd groups over two kv heads: partial sums lie by kv head, the result by token."""
    check(tile(splits=5, K=2, G=3, J=3), (0, 4), sinks=True, dtype=jnp.bfloat16)
