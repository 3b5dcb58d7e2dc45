"""One table of what the kernels of latent attention serve: each row is proved in the interpreter and compiled for
sm_90a, by decode rows and by chunks. And inputs of which all that no row may see is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.launch import interpreter
from pallas_kernels.mla_attention import LatentPages, LatentSpec, mla_attention, mla_chunks
from pallas_kernels.spec import Chunks, Rows
from tests.pallas_kernels.cases import attention, inputs

FEW = {"sms": 5, "split_blocks": 1}
"""Few splits: rows share them and long rows lie in several."""


@dataclass(frozen=True, kw_only=True)
class Latents:
    """N heads over latents of A numbers that are values and Y more."""

    N: int = 16
    A: int = 512
    Y: int = 64
    Z: int = 64
    J: int = 1
    dtype: Any = jnp.bfloat16

    @property
    def C(self) -> int:
        return self.A + self.Y

    @property
    def spec(self) -> LatentSpec:
        return LatentSpec(rank=self.A, scale=0.1)


VARIANTS: dict[str, Latents] = {
    "v2-lite": Latents(),
    "v3": Latents(N=128),
    "v3 on 8 devices, verify": Latents(J=4, Z=32),
    "v3 verify": Latents(N=128, J=2, Z=128),
    "small pages": Latents(Z=16),
    "smallest pages, float16": Latents(N=32, Z=8, dtype=jnp.float16),
    "one head": Latents(N=1, A=128),
    "odd heads, many tokens": Latents(N=20, J=16, A=256, Y=128, Z=16),
    "no power of two": Latents(N=5, J=3, A=384, Z=32),
}


def run_rows(
    v: Latents, spans: Any, *, kernel: Any = None, result: Any = jnp.float32, tune: Any = None
) -> None:
    """One call of rows with up to J tokens, compared token by token with float64."""
    data = inputs(spans, K=1, H=v.C, Z=v.Z, dtype=v.dtype)
    rng = np.random.default_rng([v.N, v.J, len(spans)])
    q = _rounded(rng.standard_normal((len(spans), v.J, v.N, v.C)), v)
    kept = LatentPages(data.keys[:, 0], data.table)
    rows = Rows(data.start, data.length)
    if kernel is None:
        got = mla_attention(jnp.asarray(q), kept, rows, _interpreted(v, tune), dtype=result)
        assert got.dtype == result
    else:
        got = kernel(jnp.asarray(q), kept, rows, v.spec)
    assert got.shape == (len(spans), v.J, v.N, v.A)
    got = np.asarray(got, np.float32)
    assert np.isfinite(got).all()
    for r, (start, count) in enumerate(spans):
        if count == 0:
            assert not got[r].any(), "a row without latents is not zero"
        for j in range(count):
            want = _want(q[r, j], data.dense_k[r], start + j, v)
            near = 2**-9 if result == jnp.float32 else 2**-7
            np.testing.assert_allclose(got[r, j], want, rtol=near, atol=6e-3)


def run_chunks(
    v: Latents, spans: Any, *, gap: int = 0, pad: int = 3, kernel: Any = None, tune: Any = None
) -> None:
    """One call of chunks with ``gap`` tokens of nobody between them and ``pad`` after, all NaN."""
    data = inputs(spans, K=1, H=v.C, Z=v.Z, dtype=v.dtype)
    rng = np.random.default_rng([v.N, len(spans)])
    first = np.cumsum([0] + [c + gap for _, c in spans[:-1]]).astype(np.int32)
    q = np.full((int(first[-1]) + spans[-1][1] + pad, v.N, v.C), np.nan, np.float32)
    for f, (_, count) in zip(first, spans, strict=True):
        q[f : f + count] = _rounded(rng.standard_normal((count, v.N, v.C)), v)
    chunks = Chunks(jnp.asarray(first), data.start, jnp.asarray([c for _, c in spans], jnp.int32))
    kept = LatentPages(data.keys[:, 0], data.table)
    spec = v.spec if kernel else _interpreted(v, tune)
    got = np.asarray((kernel or mla_chunks)(jnp.asarray(q), kept, chunks, spec), np.float32)
    assert got.shape == (*q.shape[:2], v.A)
    for r, (start, n) in enumerate(spans):
        for j in range(n):
            t = int(first[r]) + j
            want = _want(q[t], data.dense_k[r], start + j, v)
            np.testing.assert_allclose(got[t], want, atol=2e-2)


def _interpreted(v: Latents, tune: Any) -> LatentSpec:
    return LatentSpec(
        rank=v.A, scale=v.spec.scale, tune={**FEW, **(tune or {})}, interpret=interpreter()
    )


def _rounded(q: np.ndarray, v: Latents) -> np.ndarray:
    return np.asarray(jnp.asarray(q, v.dtype), np.float32)


def _want(q_NC: np.ndarray, kept_S1C: np.ndarray, position: int, v: Latents) -> np.ndarray:
    """float64[N, A]"""
    full = attention(q_NC, kept_S1C, kept_S1C, position, scale=v.spec.scale)
    return full[:, : v.A]
