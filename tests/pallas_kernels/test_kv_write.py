"""Norm, rotation and page write in the Mosaic interpreter against the float32 reference, over poisoned pools."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.norms import rms_norm
from jserve.model.rope import rotate
from pallas_kernels.kv_write import Angles, Places, hopper, kv_write, ref
from pallas_kernels.launch import interpreter
from pallas_kernels.served import multiplied
from tests.pallas_kernels.rows import F8, HEADS, PLACES

P, Z = 5, 16


def inputs(
    *,
    K: int,
    G: int,
    H: int,
    S: int = 1,
    dtype: Any = jnp.bfloat16,
    norms: bool = False,
    bias: bool = False,
) -> tuple[tuple, dict[str, Any]]:
    """Positional and named arguments; padding tokens and the whole pool are NaN."""
    rng = np.random.default_rng([K, G, H])
    T = len(PLACES)
    page, off = np.array(PLACES, np.int32).T
    y = rng.standard_normal((S, T, K, G + 2, H)).astype(np.float32) * 3 / S**0.5
    y[:, page < 0] = np.nan
    angle = rng.uniform(0, 6, (T, H // 2)).astype(np.float32)
    named: dict[str, Any] = {}
    if norms:
        weights = jnp.asarray(rng.uniform(0.5, 2, (2, H)), jnp.bfloat16)
        named |= {"norms": tuple(weights), "eps": 1e-5}
    if bias:
        named["bias_KCH"] = rng.standard_normal((K, G + 2, H)).astype(np.float32)
    if dtype == F8:
        named["scales_2K"] = rng.uniform(0.01, 0.5, (2, K)).astype(np.float32)
    pools = (jnp.full((P, K, Z, H), jnp.nan, dtype),) * 2
    angles = Angles(jnp.cos(jnp.asarray(angle)), jnp.sin(jnp.asarray(angle)))
    places = Places(jnp.asarray(page), jnp.asarray(off))
    return (jnp.asarray(y), angles, places, pools), {
        k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in named.items()
    }


@pytest.mark.parametrize("name", HEADS)
def test_values_and_places(name: str) -> None:
    heads = dict(HEADS[name])
    q_rows = heads.pop("q_rows", 0)
    args, named = inputs(**heads)
    got = kv_write(*args, **named, q_rows=q_rows, interpret=interpreter())
    want = ref.kv_write(*args, **named)
    live = np.asarray(args[2].page_T) >= 0
    assert got[0].shape == (len(PLACES), heads["K"], q_rows or heads["G"], heads["H"])
    assert got[0].dtype == multiplied(heads.get("dtype", jnp.bfloat16))
    queries = np.asarray(got[0], np.float32)[live][:, :, : heads["G"]]
    np.testing.assert_allclose(queries, np.asarray(want[0])[live], rtol=8e-3, atol=1e-5)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert mine.dtype == heads.get("dtype", jnp.bfloat16)
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        # Rounding may fall to either neighbour: 1 in 8 for e4m3, 1 in 128 for bfloat16.
        step = 2**-3 if mine.dtype == F8 or heads.get("dtype") == F8 else 2**-7
        np.testing.assert_allclose(mine, theirs, rtol=step, atol=1e-5)
        same = (mine == theirs) | np.isnan(theirs)
        assert same.mean() > 0.999
        assert np.isfinite(mine).sum() == live.sum() * heads["K"] * heads["H"]


def test_too_large_for_eight_bits_is_the_largest() -> None:
    args, named = inputs(K=1, G=2, H=64, dtype=F8)
    named["scales_2K"] = jnp.full((2, 1), 1e-4)
    _, keys, values = kv_write(*args, **named, interpret=interpreter())
    for pool in (keys, values):
        written = np.asarray(pool, np.float32)
        assert np.nanmax(np.abs(written)) == 448
        assert np.isfinite(written).sum() == 4 * 64


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, F8])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_rows_of_shared_memory_begin_where_bulk_copies_may(H: int, dtype: Any) -> None:
    """At multiples of 128 bytes, which neither interpreter nor compiler checks."""
    assert hopper._room(H, jnp.dtype(dtype)).shape[1] * jnp.dtype(dtype).itemsize % 128 == 0


def test_ref_is_what_the_model_does() -> None:
    """The reference of the kernel against the norm and the rotation of the served model."""
    args, named = inputs(K=2, G=3, H=64, norms=True)
    y, (cos, sin) = args[0].sum(0), args[1]
    q, keys, _ = ref.kv_write(*args, **named)
    tables = jnp.stack([cos, cos], 1), jnp.stack([-sin, sin], 1)
    turned = [
        rotate(rms_norm(x, w, named["eps"]), *tables)
        for x, w in zip(
            (y[:, :, :3].reshape(len(PLACES), 6, 64), y[:, :, 3]), named["norms"], strict=True
        )
    ]
    live = np.asarray(args[2].page_T) >= 0
    np.testing.assert_allclose(
        np.asarray(q.reshape(-1, 6, 64))[live], turned[0][live], rtol=1e-5, atol=1e-5
    )
    for t, (page, off) in enumerate(PLACES):
        if page >= 0:
            want = turned[1][t].astype(jnp.bfloat16)
            np.testing.assert_array_equal(np.asarray(keys[page, :, off]), np.asarray(want))


def test_what_is_refused() -> None:
    args, _named = inputs(K=2, G=3, H=64)
    with pytest.raises(ValueError, match="projections are bfloat16"):
        kv_write(args[0].astype(jnp.bfloat16), *args[1:])
    with pytest.raises(ValueError, match="2 rows for 3 queries"):
        kv_write(*args, q_rows=2)
    with pytest.raises(ValueError, match="only 8 bits have scales"):
        kv_write(*args, scales_2K=jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="angles of shape"):
        kv_write(args[0], Angles(*(x[:, :5] for x in args[1])), *args[2:])
    with pytest.raises(ValueError, match="keys of 2"):
        kv_write(args[0][:, :, :1], *args[1:])
