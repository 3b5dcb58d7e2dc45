"""Partial sums, residual and norm in the Mosaic interpreter against float64; rows of others are NaN."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.norms import rms_norm
from pallas_kernels.add_norm import add_norm, ref
from pallas_kernels.launch import interpreter

EPS = 1e-5


def inputs(S: int, T: int, D: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of different sizes; the last one is NaN."""
    rng = np.random.default_rng([S, T, D])
    y = rng.standard_normal((S, T, D)).astype(np.float32)
    x = rng.standard_normal((T, D)).astype(np.float32) * 10.0 ** np.arange(T)[:, None]
    y[:, -1] = np.nan
    return y, x.astype(np.float32), rng.uniform(0.5, 2, D).astype(np.float32)


@pytest.mark.parametrize(("S", "D"), [(1, 512), (4, 1024), (3, 3584)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_values(S: int, D: int, dtype: Any) -> None:
    y, x, weight = inputs(S, 4, D)
    weight16 = jnp.asarray(weight, jnp.bfloat16)
    arrays = (jnp.asarray(y), jnp.asarray(x), weight16)
    residual, normed = add_norm(*arrays, EPS, dtype, interpreter())
    assert (residual.dtype, normed.dtype) == (jnp.float32, dtype)
    want = x.astype(np.float64) + y.astype(np.float64).sum(0)
    scale = np.asarray(weight16, np.float64) / np.sqrt((want**2).mean(1, keepdims=True) + EPS)
    near = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    assert np.isnan(np.asarray(residual[-1])).all(), "or rows are not apart"
    np.testing.assert_allclose(residual[:-1], want[:-1], rtol=1e-5, atol=1e-5)
    got = np.asarray(normed, np.float64)[:-1]
    np.testing.assert_allclose(got, (want * scale)[:-1], rtol=near, atol=1e-6)


def test_ref_is_what_the_model_does() -> None:
    y, x, weight = (jnp.asarray(a) for a in inputs(2, 3, 64))
    residual, normed = ref.add_norm(y, x, weight, EPS, jnp.bfloat16)
    want = x + (y[0] + y[1])
    np.testing.assert_array_equal(residual, want)
    want = rms_norm(want, weight, EPS).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(normed), np.float32(want))


def test_what_is_refused() -> None:
    y, x, weight = (jnp.asarray(a) for a in inputs(2, 3, 512))
    with pytest.raises(ValueError, match="residual of shape"):
        add_norm(y, x[:2], weight, EPS, jnp.bfloat16)
    with pytest.raises(ValueError, match="partial sums are bfloat16"):
        add_norm(y.astype(jnp.bfloat16), x, weight, EPS, jnp.bfloat16)
    with pytest.raises(ValueError, match="rows of 500"):
        add_norm(y[..., :500], x[:, :500], weight[:500], EPS, jnp.bfloat16)
