"""The ``hopper`` backend in the interpreter against ``ref``: mixed steps over poisoned pages, and a
whole model through the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model.attention import backend
from jserve.model.hand import Row, pack
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.window import Window
from tests.model.driver import NoSlots

K, G, H, Z, M = 2, 2, 64, 16, 12
DIMS = StepDims(C=4, M=M, Z=Z, V=32)
N_PAGES = 60
CASES: dict[str, tuple[Bucket, Any, Any]] = {
    "mixed": (Bucket(D=3, P=48, F=2), [(70, 1), (0, 1)], [(100, 20), (0, 17)]),
    "verify": (Bucket(D=2, P=0, F=0, J=3), [(63, 3), (5, 2)], []),
    "prefill only": (Bucket(D=0, P=40, F=2), [], [(15, 30)]),
    "empty": (Bucket(D=2, P=16, F=1), [], []),
}


def step(name: str, case: str, window: int, *, release: bool = False) -> np.ndarray:
    """Output of the step's real tokens. ``release`` gives back the pages behind the window: their
    entries are 0, they and page 0 hold NaN."""
    bucket, decode, prefill = CASES[case]
    attn = backend(name, "cpu")
    rng = np.random.default_rng(3)
    pages = iter(rng.permutation(N_PAGES - 1) + 1)
    spans = [*decode, *prefill]
    rows = [Row([next(pages) for _ in range(-(-(s + c) // Z))], s, [1] * c) for s, c in spans]
    pool = np.full((2, N_PAGES, Z, K, H), np.nan, np.float32)
    for row in rows:
        for i in range(row.start):
            pool[:, row.pages[i // Z], i % Z] = rng.standard_normal((2, K, H))
        for i in Window(page_size=Z, tokens=window).gone(row.start) if release else ():
            pool[:, row.pages[i]] = np.nan
            row.pages[i] = 0
    pool = np.asarray(jnp.asarray(pool, jnp.bfloat16), np.float32)
    if attn.kv_axis == 1:
        pool = pool.swapaxes(2, 3)
    kv = tuple(jnp.asarray(x, attn.kv_dtype(jnp.bfloat16)) for x in pool)
    q, k, v = (
        np.asarray(jnp.asarray(rng.standard_normal((bucket.T, n, H)), jnp.bfloat16), np.float32)
        for n in (K * G, K, K)
    )
    buf = pack(bucket, DIMS, attn, rows[: len(decode)], rows[len(decode) :])
    zeros = jnp.zeros(DIMS.C, jnp.int32)
    fields = layout(bucket, DIMS, attn.plan_shapes(bucket, DIMS))
    view = unpack(jnp.asarray(buf), fields, bucket, DIMS, NoSlots(zeros, zeros))
    kv = attn.write_kv(kv, jnp.asarray(k), jnp.asarray(v), view)
    out = np.asarray(attn.attend(jnp.asarray(q), kv, view, window=window, scale=0.2))
    assert out.dtype == np.float32
    assert np.isfinite(out).all()
    return out[np.asarray(view.pos_T) >= 0]


@pytest.mark.parametrize("case", CASES)
def test_steps_agree_with_ref(case: str) -> None:
    np.testing.assert_allclose(step("hopper", case, 0), step("ref", case, 0), atol=2e-2)


def test_window_agrees_with_ref() -> None:
    np.testing.assert_allclose(step("hopper", "mixed", 25), step("ref", "mixed", 25), atol=2e-2)


def test_pages_given_back_are_not_missed() -> None:
    want = step("hopper", "mixed", 25)
    np.testing.assert_array_equal(step("hopper", "mixed", 25, release=True), want)


def test_padding_writes_nothing() -> None:
    bucket = Bucket(D=2, P=0, F=0)
    attn = backend("hopper", "cpu")
    fields = layout(bucket, DIMS, {})
    zeros = jnp.zeros(DIMS.C, jnp.int32)
    buf = jnp.asarray(pack(bucket, DIMS, attn, [Row([3], 2, [1])], []))
    view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
    empty = jnp.zeros(attn.kv_shape(K, H, 5, Z), jnp.bfloat16)
    new = jnp.ones((2, K, H))
    keys, values = (
        np.asarray(x, np.float32) for x in attn.write_kv((empty, empty), new, new, view)
    )
    want = np.zeros(keys.shape, np.float32)
    want[3, :, 2] = 1
    np.testing.assert_array_equal(keys, want)
    np.testing.assert_array_equal(values, want)


def test_old_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(ConfigError, match=r"needs jax 0\.11") as e:
        backend("hopper", "cuda")
    assert e.value.field == "attention_backend"
