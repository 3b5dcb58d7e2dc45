"""Few rows times 4-bit weights in the Mosaic interpreter against float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench.candidates.quant_matmul import quant_matmul, ref
from bench.candidates.quant_matmul.api import tile_of
from bench.candidates.quant_matmul.hopper import Tile
from pallas_kernels.launch import interpreter
from tests.pallas_kernels.rows import PRODUCTS


def inputs(rows: int, N: int, D: int, block: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng([rows, N, D])
    x = jnp.asarray(rng.standard_normal((rows, D)), jnp.bfloat16)
    w = rng.integers(-8, 8, (N, D))
    scales = rng.uniform(1e-3, 1, (D // block, N)).astype(np.float32)
    return x, jnp.asarray(w, jnp.int4), jnp.asarray(scales)


def exact(x: Any, w: Any, scales: Any) -> np.ndarray:
    _N, D = w.shape
    spread = np.repeat(np.asarray(scales, np.float64).T, D // scales.shape[0], axis=1)
    return np.asarray(x, np.float64) @ (np.asarray(w, np.int32) * spread).T


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("kernel", ["hopper", "ref"])
def test_values(name: str, kernel: str) -> None:
    case = dict(PRODUCTS[name])
    tune = case.pop("tune", None)
    args = inputs(**case)
    got = (
        ref.quant_matmul(*args)
        if kernel == "ref"
        else quant_matmul(*args, tune=tune, interpret=interpreter())
    )
    want = exact(*args)
    assert got.shape == want.shape
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_outputs_and_rows_do_not_mix() -> None:
    """NaN in a scale reaches one output, NaN in a row of x that row."""
    x, w, scales = inputs(4, 128, 512, 128)
    got = quant_matmul(
        x.at[2].set(jnp.nan), w, scales.at[3, 77].set(jnp.nan), interpret=interpreter()
    )
    bad = np.zeros((4, 128), bool)
    bad[2], bad[:, 77] = True, True
    np.testing.assert_array_equal(np.isnan(got), bad)


def tile(steps: int, splits: int) -> Tile:
    shapes = np.empty((8, steps * 256)), jnp.empty((128, steps * 256), jnp.int4)
    return tile_of(*shapes, jnp.empty((steps * 2, 128)), {"splits": splits})


def runs(tile: Tile) -> list[range]:
    """The steps of each split."""
    found = (tile.run(s) for s in range(tile.splits))
    return [range(int(begin), int(begin + count)) for begin, count in found]


@pytest.mark.parametrize("steps", [1, 2, 7, 16, 112])
@pytest.mark.parametrize("most", [1, 3, 5, 132])
def test_every_split_has_work(steps: int, most: int) -> None:
    split = tile(steps, 1).split(most)
    assert split.splits <= most
    assert all(runs(split))


@pytest.mark.parametrize(("steps", "splits"), [(1, 1), (5, 2), (7, 3), (5, 4), (16, 5)])
def test_each_step_is_of_one_split(steps: int, splits: int) -> None:
    assert [i for run in runs(tile(steps, splits)) for i in run] == list(range(steps))


@pytest.mark.parametrize(
    ("rows", "N", "D", "B", "says"),
    [
        (65, 128, 256, 2, "65 rows"),
        (8, 128, 256, 3, "blocks must be of"),
        (8, 100, 256, 2, "not whole tiles"),
        (8, 128, 128, 1, "not whole tiles"),
    ],
)
def test_bad_shapes_are_named(rows: int, N: int, D: int, B: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tile_of(np.empty((rows, D)), jnp.empty((N, D), jnp.int4), jnp.empty((B, N)))


def test_bad_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="int8"):
        tile_of(np.empty((8, 256)), jnp.empty((128, 256), jnp.int8), jnp.empty((2, 128)))
