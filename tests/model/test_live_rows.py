"""Rows in use, some at a time: each as alone, and no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jserve.model.live_rows import ROWS, over_live


def of(rows):
    x_RV, (n_R, none) = rows
    assert none is None
    return {"sum": x_RV.sum(axis=1) * n_R, "most": jnp.argmax(x_RV, axis=1).astype(jnp.int32)}


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, ROWS, ROWS + 1, 10, 3 * ROWS]), st.data())
def test_rows_in_use_have_their_values_and_the_others_zeros(E, data):
    live = np.array(data.draw(st.lists(st.booleans(), min_size=E, max_size=E)))
    x = np.random.default_rng(E).standard_normal((E, 7)).astype(np.float32)
    x[~live] = np.nan  # in a value of another row it would show
    n = np.arange(E, dtype=np.float32) + 1
    found = jax.jit(lambda *a: over_live(of, a[0], (a[1], (a[2], None))))(live, x, n)
    expected = of((jnp.array(x), (jnp.array(n), None)))
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        np.testing.assert_array_equal(value[live], expected[name][live])
        if ROWS < E:
            assert not np.asarray(value)[~live].any()


@pytest.mark.parametrize(("n_live", "rounds"), [(0, 0), (1, 1), (ROWS, 1), (ROWS + 1, 2), (64, 8)])
def test_as_many_rounds_as_the_rows_in_use_need(n_live, rounds):
    seen = []

    def counted(x_R):
        jax.debug.callback(lambda x: seen.append(x.shape), x_R)
        return x_R

    live = np.zeros(64, bool)
    live[np.random.default_rng(0).permutation(64)[:n_live]] = True
    jax.block_until_ready(jax.jit(lambda live, x: over_live(counted, live, x))(live, jnp.ones(64)))
    jax.effects_barrier()
    assert seen == [(ROWS,)] * rounds
