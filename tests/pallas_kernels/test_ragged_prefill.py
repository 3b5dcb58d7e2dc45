"""Ragged prefill in the Mosaic interpreter against float64, and the reference against it too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launch import interpreter
from pallas_kernels.ragged_prefill import hopper, ragged_prefill, ref
from pallas_kernels.ragged_prefill.api import tile_of
from pallas_kernels.served import multiplied
from pallas_kernels.spec import AttentionSpec, Chunks
from tests.pallas_kernels.cases import LARGEST, PREFILL, B, attention, inputs

F8 = jnp.float8_e4m3fn

TUNE = {"block": 64, "stages": 2}


def run(
    spans: Any,
    *,
    G: int = 2,
    K: int = 1,
    H: int = 64,
    Z: int = 16,
    gap: int = 0,
    pad: int = 5,
    tune: dict[str, Any] | None = None,
    sinks: bool = False,
    kernel: Any = None,
    dtype: Any = jnp.bfloat16,
    scaled: bool = False,
    **variant: Any,
) -> None:
    """One call on fresh random inputs, compared token by token. ``gap`` tokens of nobody lie
    between the sequences, ``pad`` after them, all NaN."""
    data = inputs(spans, K=K, H=H, Z=Z, window=variant.get("window", 0), dtype=dtype)
    rng = np.random.default_rng([G, H, len(spans)])
    first = np.cumsum([0] + [c + gap for _, c in spans[:-1]]).astype(np.int32)
    P = int(first[-1]) + spans[-1][1] + pad
    q = np.full((P, K * G, H), np.nan, np.float32)
    for f, (_, count) in zip(first, spans, strict=True):
        part = rng.standard_normal((count, K * G, H))
        q[f : f + count] = np.asarray(jnp.asarray(part, multiplied(dtype)), np.float32)
    sinks_N = rng.standard_normal(K * G).astype(np.float32) if sinks else None
    scales = rng.uniform(0.3, 3, (2, K)).astype(np.float32) if scaled else np.ones((2, K))
    static: dict[str, Any] = dict(scale=H**-0.5, **variant)
    kwargs: dict[str, Any] = {"sinks_N": sinks_N}
    if scaled:
        kwargs["scales_2K"] = jnp.asarray(scales)
    if kernel is None:
        kernel = ragged_prefill
        static |= {"tune": {**TUNE, **(tune or {})}, "interpret": interpreter()}
    count = jnp.asarray([c for _, c in spans], jnp.int32)
    pages = data.pages
    chunks = Chunks(jnp.asarray(first), data.start, count)
    got = kernel(jnp.asarray(q), pages, chunks, AttentionSpec(**static), **kwargs)
    got = np.array(got, np.float32)
    assert got.shape == q.shape
    for r, (start, n) in enumerate(spans):
        for j in range(n):
            k, v = (x[r] * scales[i][:, None] for i, x in enumerate((data.dense_k, data.dense_v)))
            t = first[r] + j
            want = attention(q[t], k, v, start + j, scale=H**-0.5, sinks=sinks_N, **variant)
            error = 2e-2 * max(1, scales.max(), LARGEST * (dtype == jnp.int8))
            np.testing.assert_allclose(got[t], want, atol=error)
            got[t] = 0.0
    assert not got.any(), "tokens of nobody are not zero"


@pytest.mark.parametrize("case", PREFILL)
def test_ragged_chunks(case: str) -> None:
    run(PREFILL[case])


@pytest.mark.parametrize("window", [1, 20, 100])
def test_windows(window: int) -> None:
    run(((130, 30), (0, 40), (B - 1, 3)), window=window)


@pytest.mark.parametrize(("G", "K"), [(1, 2), (3, 1), (5, 1), (16, 1)])
def test_groups_share_tiles(G: int, K: int) -> None:
    """Odd groups too, where a token's heads may lie in two tiles."""
    run(((10, 45), (70, 7)), G=G, K=K, gap=3)


@pytest.mark.parametrize(
    ("H", "Z", "tune"),
    [
        (64, 64, {"block": 128}),
        (128, 32, {"stages": 3, "ping_pong": False}),
        (256, 64, {"ping_pong": False}),
    ],
)
def test_tunings_agree(H: int, Z: int, tune: dict[str, Any]) -> None:
    run(((100, 40),), H=H, Z=Z, tune=tune)


@pytest.mark.parametrize(
    ("H", "Z", "tune"),
    [(64, 16, {"raw_stages": 2}), (128, 64, {"block": 128}), (128, 32, {"ping_pong": False})],
)
def test_tunings_agree_in_eight_bits(H: int, Z: int, tune: dict[str, Any]) -> None:
    """Chunks that end within a block, so that values of nobody must be wiped."""
    run(((100, 40), (0, 3), (64, 1)), H=H, Z=Z, tune=tune, K=2, dtype=F8, scaled=True)


def test_eight_bits_of_every_kind() -> None:
    variant: Any = {"window": 50, "soft_cap": 3.0, "sinks": True}
    run(((200, 20), (0, 0), (30, 7)), dtype=F8, scaled=True, gap=2, **variant)


@pytest.mark.parametrize("window", [0, 50, 300])
def test_scores_ahead(window: int) -> None:
    """Rows of no plain block, of one and of several, whose ends are masked."""
    spans = ((400, 40), (0, 30), (130, 3), (0, 0))
    run(spans, tune={"ahead": True, "stages": 3}, window=window, gap=1)


@pytest.mark.parametrize("case", PREFILL)
def test_ref(case: str) -> None:
    run(PREFILL[case], kernel=ref.ragged_prefill, window=25, soft_cap=2.0, sinks=True, gap=2)


def test_every_row_of_every_sequence_is_in_one_tile() -> None:
    count = np.array([0, 1, 50, 43, 64, 0, 3], np.int32)
    pool = jnp.empty((1, 2, 16, 64), jnp.bfloat16)
    tile = tile_of(
        np.empty((int(count.sum()), 6, 64)), pool, len(count), AttentionSpec(scale=1.0, tune=TUNE)
    )
    work = hopper.plan(jnp.asarray(count), tile)
    n = int(work.n_1[0])
    assert n <= tile.tiles
    tiles = list(zip(np.asarray(work.row_I)[:n], np.asarray(work.skip_I)[:n], strict=True))
    want = {(f, s) for f, c in enumerate(count) for s in range(0, c * 3, hopper.ROWS_OF_TILE)}
    assert len(tiles) == len(set(tiles)) == len(want)
    assert set(tiles) == want


@pytest.mark.parametrize(
    ("q", "kv", "says"),
    [
        ((2, 4, 80), (3, 2, 16, 80), "head dimension 80"),
        ((2, 5, 64), (3, 2, 16, 64), "5 query heads"),
        ((2, 4, 64), (3, 2, 12, 64), "page size 12"),
    ],
)
def test_bad_shapes_are_named(q: Any, kv: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tile_of(np.empty(q), jnp.empty(kv, jnp.bfloat16), 2, AttentionSpec(scale=1.0))
