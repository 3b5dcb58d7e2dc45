"""Attention sinks against the paper taken literally: a cache of sinks and window, rotated by place."""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.attention import AttendArgs, Sinks, backend
from jserve.model.rope import rope_tables, rotate
from jserve.model.view import Bucket, StepDims, layout, unpack
from tests.model.driver import NoSlots, Row, pack
from tests.runner.harness import ARCH

N, K, H, Z, M = ARCH.N, ARCH.K, ARCH.H, 8, 40
ROPE = ARCH.ropes[0], H
DIMS = StepDims(C=4, M=M, Z=Z, V=32)
N_PAGES = 3 * M + 1


@jax.jit
def _turned(x_TNH: jax.Array, place_T: jax.Array) -> jax.Array:
    return rotate(x_TNH, *rope_tables(*ROPE, place_T))


def turned(x_TNH: np.ndarray, place_T: np.ndarray) -> np.ndarray:
    """Each token rotated by its place; padded so that few shapes are compiled."""
    n, most = len(place_T), M * Z
    padded = np.zeros((most, *x_TNH.shape[1:]), np.float32)
    padded[:n] = x_TNH
    return np.asarray(_turned(padded, np.resize(place_T, most)))[:n]


def literal(q_SNH, k_SKH, v_SKH, at: int, window: int, sinks: int) -> np.ndarray:
    """[N, H]: the token at ``at`` with a cache of its sinks and its window, keys turned by their place
    in that cache (StreamingLLM, figure 4)."""
    kept = [s for s in range(at + 1) if s < sinks or s > at - window]
    q_NH = turned(q_SNH[at][None], np.array([len(kept) - 1]))[0]
    keys = turned(k_SKH[kept], np.arange(len(kept)))
    out = np.zeros((N, H))
    for n in range(N):
        score = np.array([k_KH[n // (N // K)] @ q_NH[n] for k_KH in keys]) * H**-0.5
        p = np.exp(score - score.max())
        out[n] = p / p.sum() @ np.array([v_SKH[s, n // (N // K)] for s in kept])
    return out


def _attend(name: str, bucket: Bucket, window: int, sinks: int, buf, q, k, v, kv):
    attn = backend(name)
    zeros = jnp.zeros(DIMS.C, jnp.int32)
    fields = layout(bucket, DIMS, attn.plan_shapes(bucket, DIMS))
    view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
    tables = rope_tables(*ROPE, view.pos_T)
    capped = rope_tables(*ROPE, jnp.minimum(view.pos_T, window + sinks - 1))
    kv = attn.write_kv(kv, rotate(k, *tables), v, view)
    far = Sinks(n=sinks, q_TNH=rotate(q, *capped))
    args = AttendArgs(
        q_TNH=rotate(q, *tables), window=window, scale=H**-0.5, sinks=far if sinks else None
    )
    return attn.attend(args, kv, view), kv


@lru_cache
def _compiled(name: str, bucket: Bucket, window: int, sinks: int):
    return jax.jit(partial(_attend, name, bucket, window, sinks))


def served(name: str, rows, values, window: int, sinks: int, release: bool) -> list[np.ndarray]:
    """Outputs of the last chunk of each row: (tokens before, tokens in the chunk) on clean pages."""
    bucket = Bucket(D=2, P=160, F=3)
    run = _compiled(name, bucket, window, sinks)
    attn = backend(name)
    shape = attn.kv_shape(K, H, N_PAGES, Z)
    kv = (jnp.full(shape, jnp.nan), jnp.full(shape, jnp.nan))
    pages = [[1 + r * M + i for i in range(M)] for r in range(len(rows))]
    for before in range(0, max(start for start, _ in rows), 40):  # the past, in chunks of 40
        past = [(before, min(40, start - before)) for start, _ in rows]
        _, kv = run(*_step(bucket, attn, past, pages, values, ()), kv)
    decode = [n == 1 for _, n in rows]
    if release:
        first = -(-sinks // Z)
        for row, (start, _) in zip(pages, rows, strict=True):
            for i in range(first, max(0, start - window + 1) // Z):
                kv = tuple(_blank(x, row[i], attn) for x in kv)
                row[i] = 0
    out, _ = run(*_step(bucket, attn, rows, pages, values, decode), kv)
    found, at, d = [], bucket.D, 0
    for (_, n), one in zip(rows, decode, strict=True):
        first, at, d = (d, at, d + 1) if one else (at, at + n, d)
        found.append(np.asarray(out[first : first + n]))
    return found


def _blank(pool, page: int, attn):
    return pool.at[page].set(jnp.nan)


def _step(bucket, attn, rows, pages, values, decode):
    """Buffer and q, k, v of a step; rows of no tokens are left out. Decode rows come first."""
    some = [(r, span) for r, span in enumerate(rows) if span[1] > 0]
    early = [(r, s) for r, s in some if decode and decode[r]]
    late = [(r, s) for r, s in some if not (decode and decode[r])]
    made = [[Row(pages[r], s, [1] * n) for r, (s, n) in part] for part in (early, late)]
    buf = pack(bucket, DIMS, attn, *made)
    x = [np.zeros((bucket.T, width, H), np.float32) for width in (N, K, K)]
    at = bucket.D
    for i, (r, (s, n)) in enumerate([*early, *late]):
        first = i if i < len(early) else at
        at += 0 if i < len(early) else n
        for to, value in zip(x, values[r], strict=True):
            to[first : first + n] = value[s : s + n]
    return buf, *x


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["ref", "xla", "dense"])
@pytest.mark.parametrize(
    ("window", "sinks"), [(11, 4), (11, 9), (30, 1), (1, 3), (40, 150), (9, 0)]
)
def test_served_as_the_paper_says(name: str, window: int, sinks: int) -> None:
    rng = np.random.default_rng(3)
    rows = [(200, 1), (3, 1), (150, 20), (0, 30), (60, 3)]
    values = [
        tuple(rng.standard_normal((M * Z, w, H), np.float32) for w in (N, K, K)) for _ in rows
    ]
    for part in ([0, 2, 4], [1, 3]):
        mine, own = [rows[r] for r in part], [values[r] for r in part]
        for release in (False, True):
            got = served(name, mine, own, window, sinks, release)
            for (start, n), value, out in zip(mine, own, got, strict=True):
                for i in {0, n // 2, n - 1}:
                    want = literal(*value, start + i, window, sinks)
                    np.testing.assert_allclose(out[i], want, atol=2e-5)
