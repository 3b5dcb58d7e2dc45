"""One table of ragged corner cases for all attention kernels, and inputs full of NaN.

A case is a list of (start, count) of rows: ``start`` keys lie in pages already, ``count`` tokens
are new. Everything that no row may see is NaN: the rest of the last page, all pages of nobody, page
ids beyond the length (out of range on purpose), and queries of padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.spec import Pages

Z0 = 16
B = 64
"""Keys of a block in every tuning."""
LARGEST = 3
"""How many times the unit of others the vectors of int8 are at most: their scales differ from token to token."""

DECODE: dict[str, tuple[tuple[int, int], ...]] = {
    "length 1": ((0, 1),),
    "nothing at all": ((0, 0), (0, 0)),
    "page and block borders": ((Z0 - 1, 1), (Z0, 1), (B - 2, 1), (B - 1, 1), (B, 1)),
    "empty rows among others": ((0, 0), (70, 1), (0, 0), (0, 0), (5, 1), (0, 0)),
    "one long, rest short": ((4 * B + 3, 1), (0, 1), (2, 1)),
    "short first, long last": ((1, 1), (3, 1), (5 * B - 1, 1)),
    "all equal": ((99, 1),) * 4,
}
VERIFY: dict[str, tuple[tuple[int, int], ...]] = {
    "fewer drafts than places": ((0, 3), (61, 3), (B - 1, 2), (126, 1), (0, 0)),
    "drafts across a split": ((2 * B - 1, 3), (3 * B - 2, 3)),
}
PREFILL: dict[str, tuple[tuple[int, int], ...]] = {
    "one token": ((0, 1),),
    "nothing at all": ((0, 0),),
    "a page, a block, one more": ((0, Z0), (0, B), (0, B + 1)),
    "late chunk": ((3 * B + 5, 40),),
    "prefixes of all kinds": ((B - 1, 2), (B, 1), (1, 70), (0, 0), (17, 30)),
}


@dataclass(frozen=True)
class Inputs:
    """Rows over a poisoned pool, and the dense keys and values [R, S, K, H] they stand for."""

    table: Any
    start: Any
    length: Any
    keys: Any
    values: Any
    scales: tuple[Any, ...]
    """float32[P, K, Z] of keys and of values, where these are int8."""
    dense_k: np.ndarray
    dense_v: np.ndarray

    @property
    def pages(self) -> Pages:
        return Pages(self.keys, self.values, self.table, *self.scales)


def inputs(
    spans: tuple[tuple[int, int], ...],
    *,
    K: int,
    H: int,
    Z: int,
    seed: int = 0,
    window: int = 0,
    dtype: Any = jnp.bfloat16,
) -> Inputs:
    """``window``: positions that no query of the row can see are NaN too; of int8, their scales."""
    rng = np.random.default_rng([seed, K, H, Z])
    start = np.array([s if c else 0 for s, c in spans], np.int32)
    length = np.array([s + c if c else 0 for s, c in spans], np.int32)
    M = int(-(-length.max() // Z)) + 1
    P = len(spans) * M + 1
    free = iter(rng.permutation(P - 1) + 1)
    table = np.full((len(spans), M), P + 7, np.int32)
    dense = rng.standard_normal((2, len(spans), M * Z, K, H), np.float32)
    stored = dense = jnp.asarray(dense, dtype if dtype != jnp.int8 else None)
    pools = np.full((2, P, K, Z, H), np.nan, np.float32)
    if dtype == jnp.int8:
        sizes = rng.uniform(0.01, LARGEST, (2, len(spans), M * Z, K, 1))
        stored, dense = rounded(np.asarray(dense) * sizes)
        pools = poisoned(rng, (2, P, K, Z), H)
    stored, dense = (np.asarray(x, np.float32) for x in (stored, dense))
    for r, n in enumerate(length):
        low = max(int(start[r]) - window + 1, 0) if window else 0
        for i in range(-(-int(n) // Z)):
            table[r, i] = page = next(free)
            a, b = max(low, i * Z), min((i + 1) * Z, int(n))
            if b > a:
                part = stored[:, r, a:b].swapaxes(1, 2)
                pools[:, page, :, a - i * Z : b - i * Z] = part
    return Inputs(
        jnp.asarray(table),
        jnp.asarray(start),
        jnp.asarray(length),
        *(
            jnp.asarray(x[..., :H].astype(dtype if dtype == jnp.int8 else np.float32), dtype)
            for x in pools
        ),
        tuple(jnp.asarray(x[..., H], jnp.float32) for x in pools) if dtype == jnp.int8 else (),
        dense[0],
        dense[1],
    )


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 numbers of vectors [..., H] with the scale of each behind them, float32[..., H + 1], and what they are."""
    scale = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float32)
    q = np.round(x / scale).astype(np.float32)
    return np.concatenate([q, scale], -1), q * scale


def poisoned(rng: np.random.Generator, shape: tuple[int, ...], H: int) -> np.ndarray:
    """As ``rounded``: any numbers, and scales that are NaN."""
    return np.concatenate([rng.integers(-128, 128, (*shape, H)), np.full((*shape, 1), np.nan)], -1)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: np.ndarray | None = None,
    path: tuple[int, ...] | None = None,
) -> np.ndarray:
    """float64[N, H] of one token's queries over keys and values [S, K, H]. ``path``: where the
    last of the ``position + 1`` keys lie, root first, for a token of a tree."""
    N, K = q.shape[0], k.shape[1]
    low = max(position - window + 1, 0) if window else 0
    seen = list(range(position + 1))
    if path is not None:
        seen[len(seen) - len(path) :] = path
    k, v = k[seen], v[seen]
    out = np.zeros(q.shape)
    for n in range(N):
        h = n // (N // K)
        x = k[low : position + 1, h].astype(np.float64) @ q[n].astype(np.float64) * scale
        x = soft_cap * np.tanh(x / soft_cap) if soft_cap else x
        top = x.max() if sinks is None else max(x.max(), float(sinks[n]))
        p = np.exp(x - top)
        total = p.sum() + (0.0 if sinks is None else np.exp(float(sinks[n]) - top))
        out[n] = p / total @ v[low : position + 1, h]
    return out
