"""Few rows times weights in groups in the Mosaic interpreter against float64, and the bits that become numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.flash import WGMMA
from pallas_kernels.launch import interpreter
from pallas_kernels.quant_matmul import KINDS, Weights, bits, quant_matmul, ref, serves
from pallas_kernels.quant_matmul.api import tile_of
from pallas_kernels.quant_matmul.hopper import Tile
from tests.pallas_kernels.rows import PRODUCTS

CODES = {
    "int4": np.arange(16) - 8.0,
    "uint4": np.arange(16.0),
    "e2m1": 2 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
}
"""Of halves of a byte."""


class Inputs:
    """Arguments of a product, and its exact result. Numbers are drawn first, then packed one by one."""

    def __init__(
        self,
        rows: int,
        N: int,
        D: int,
        kind: str,
        group: int,
        zeros: bool = False,
        x_scales: bool = False,
    ) -> None:
        rng, B = np.random.default_rng([rows, N, D]), D // group
        self.kind = kind
        self.x = rng.standard_normal((rows, D)).astype(ml_dtypes.bfloat16)
        self.q, numbers = (drawn_halves if kind in CODES else drawn_bytes)(rng, N, D, kind)
        self.scale = rng.uniform(1e-3, 1, (N, B)).astype(np.float32)
        self.zero = rng.integers(-8, 8, (N, B)).astype(np.int8) if zeros else None
        self.x_scale = rng.uniform(0.1, 1, (rows, B)).astype(np.float32) if x_scales else None
        taken = np.zeros((N, B)) if self.zero is None else self.zero.astype(float)
        w = (numbers - np.repeat(taken, group, 1)) * np.repeat(self.scale.astype(float), group, 1)
        x = self.x.astype(float)
        if self.x_scale is not None:
            x = x * np.repeat(self.x_scale.astype(float), group, 1)
        self.exact = x @ w.T

    def by(self, call: Any, **options: Any) -> np.ndarray:
        zero = None if self.zero is None else jnp.asarray(self.zero)
        w = Weights(jnp.asarray(self.q), jnp.asarray(self.scale), zero)
        scale = None if self.x_scale is None else jnp.asarray(self.x_scale)
        return call(jnp.asarray(self.x), w, self.kind, x_scale_TB=scale, **options)


def drawn_halves(rng: np.random.Generator, N: int, D: int, kind: str) -> tuple[Any, np.ndarray]:
    codes = rng.integers(0, 16, (N, D))
    packed = np.zeros((N, D // 2), np.uint8)
    for d in range(D):
        byte = d // 32 * 16 + d % 16
        packed[:, byte] |= (codes[:, d] << (4 if d % 32 >= 16 else 0)).astype(np.uint8)
    return packed, CODES[kind][codes]


def drawn_bytes(rng: np.random.Generator, N: int, D: int, kind: str) -> tuple[Any, np.ndarray]:
    if kind == "int8":
        q = rng.integers(-128, 128, (N, D)).astype(np.int8)
        return q, q.astype(float)
    codes = rng.integers(0, 256, (N, D)).astype(np.uint8)
    codes[codes & 127 == 127] = 8  # these are not numbers
    q = codes.view(ml_dtypes.float8_e4m3fn)
    return q, q.astype(float)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("kernel", ["hopper", "ref"])
def test_values(name: str, kernel: str) -> None:
    case = dict(PRODUCTS[name])
    tune = case.pop("tune", None)
    given = Inputs(**case)
    options = {"tune": tune, "interpret": interpreter()}
    got = given.by(ref.quant_matmul) if kernel == "ref" else given.by(quant_matmul, **options)
    assert got.shape == given.exact.shape
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, given.exact, atol=1e-5 * np.abs(given.exact).max())


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_its_number(kind: str) -> None:
    """Of all bytes, in their order, the signs of zeros apart."""
    whole = np.broadcast_to(np.arange(256, dtype=np.uint8), (64, 256))
    got = bits.wide(jnp.asarray(whole), kind, interpreter()) - jnp.bfloat16(bits.offset(kind))
    q = whole if kind in CODES else whole.view(KINDS[kind])
    want = np.asarray(bits.in_order(ref.numbers(jnp.asarray(q), kind)))
    numbers = np.isfinite(want)
    assert numbers.mean() > 0.99
    np.testing.assert_array_equal(np.asarray(got, np.float32)[numbers], want[numbers])


def owners(layout: Any, rows: int, columns: int) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """(warp, lane, register) -> the places in an array [rows, columns] that it holds, lowest bits first."""
    tiled = layout.to_mgpu()
    at = np.arange(rows * columns).reshape(rows, columns)
    for tile in tiled.tiling.tiles:
        outer = at.shape[: at.ndim - len(tile)]
        inner = at.shape[at.ndim - len(tile) :]
        split = [n for size, t in zip(inner, tile, strict=True) for n in (size // t, t)]
        at = at.reshape(*outer, *split)
        k, n = len(outer), len(tile)
        order = [*range(k), *(k + 2 * i for i in range(n)), *(k + 2 * i + 1 for i in range(n))]
        at = at.transpose(order)
    wanted = [[d % at.ndim for d in dims] for dims in (tiled.warp_dims, tiled.lane_dims)]
    vector = tiled.vector_dim % at.ndim
    rest = [d for d in range(at.ndim) if d not in (*wanted[0], *wanted[1], vector)]
    at = at.transpose(*wanted[0], *wanted[1], *rest, vector)
    at = at.reshape(4, 32, -1, at.shape[-1])
    return {
        (w, lane, r): [divmod(int(x), columns) for x in at[w, lane, r]]
        for w, lane, r in np.ndindex(at.shape[:3])
    }


def test_a_register_of_bytes_is_a_word() -> None:
    """What ``words`` says to Mosaic is what it says to the interpreter."""
    of_bytes, of_words = owners(bits.BYTES, 64, 64), owners(bits.WORDS, 64, 16)
    assert of_bytes.keys() == of_words.keys()
    for key, places in of_bytes.items():
        [(row, word)] = of_words[key]
        assert places == [(row, 4 * word + i) for i in range(4)]


@pytest.mark.parametrize("parts", [2, 4])
def test_a_register_of_a_word_is_a_pair(parts: int) -> None:
    """``pairs`` likewise."""
    of_words, of_pairs = owners(bits.WORDS, 64, 16), owners(WGMMA, 64, 8 * 4 * parts)
    place = np.arange(parts * 64 * 16 * 2, dtype=np.uint16).reshape(parts, 64, 16, 2)
    given = [jnp.asarray(x.view(np.uint32)[..., 0]) for x in place]
    seen = np.asarray(bits.pairs(given, jnp.uint16, interpreter()))
    shape = bits.WORDS.to_mgpu().registers_shape((64, 16))
    n = int(np.prod(shape))
    registers = bits.arranged(np.arange(parts * n).reshape(parts, *shape))
    assert registers.shape == WGMMA.to_mgpu().registers_shape((64, 8 * 4 * parts))
    for at, register in enumerate(registers.flat):
        part, own = divmod(int(register), n)
        for warp, lane in np.ndindex(4, 32):
            [(row, word)] = of_words[warp, lane, own]
            pair = of_pairs[warp, lane, at]
            assert [seen[i] for i in pair] == list(place[part, row, word])


def test_outputs_and_rows_do_not_mix() -> None:
    """NaN in a scale reaches one output, NaN in a row of x that row; what lies beyond the outputs is not read."""
    given = Inputs(4, 133, 512, "int4", 128)
    given.x[2] = np.nan
    given.scale[77, 3] = np.nan
    got = given.by(quant_matmul, interpret=interpreter())
    bad = np.zeros((4, 133), bool)
    bad[2], bad[:, 77] = True, True
    np.testing.assert_array_equal(np.isnan(got), bad)


def test_padding_is_not_read() -> None:
    """Rows that pad x to a tile are of nobody, whatever the scales of theirs are."""
    given = Inputs(3, 64, 256, "e4m3", 128, x_scales=True)
    alone = Inputs(3, 64, 256, "e4m3", 128, x_scales=True)
    for name in ("x", "x_scale"):
        setattr(alone, name, getattr(given, name)[:1])
    np.testing.assert_array_equal(
        given.by(quant_matmul, interpret=interpreter())[:1],
        alone.by(quant_matmul, interpret=interpreter()),
    )


def weights(N: int, D: int, B: int, kind: str = "int4") -> Weights:
    return Weights(
        jnp.zeros((N, D // bits.per_byte(kind)), KINDS[kind]), jnp.zeros((N, B), jnp.float32)
    )


def tile(steps: int, splits: int) -> Tile:
    D = steps * 256
    return tile_of(np.empty((8, D)), weights(128, D, steps * 2), "int4", None, {"splits": splits})


def runs(tile: Tile) -> list[range]:
    """The steps of each split."""
    found = (tile.steps_of(s) for s in range(tile.splits))
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
    ("rows", "w", "kind", "says"),
    [
        (65, weights(128, 256, 2), "int4", "65 rows"),
        (0, weights(128, 256, 2), "int4", "0 rows"),
        (8, weights(128, 256, 3), "int4", "3 groups"),
        (8, weights(63, 256, 2), "int4", "at least 64 rows"),
        (8, weights(64, 96, 1), "int4", "whole 64 inputs"),
        (8, weights(64, 256, 32), "int4", "in groups of 16"),
        (8, weights(64, 768, 8), "int4", "in groups of 16"),
        (8, weights(64, 256, 2), "int3", "kind 'int3'"),
        (8, weights(64, 256, 2), "int8", "q is uint8"),
        (8, weights(64, 256, 2)._replace(scale_NB=jnp.zeros((64, 2), jnp.bfloat16)), "int4", "scale is"),
        (8, weights(64, 256, 2)._replace(zero_NB=jnp.zeros((64, 2))), "int4", "zero is float32"),
        (8, weights(64, 256, 2)._replace(zero_NB=jnp.zeros((2, 64), jnp.int8)), "int4", "zero is"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(rows: int, w: Weights, kind: str, says: str) -> None:
    D = w.q.shape[1] * (2 if w.q.dtype == jnp.uint8 else 1)
    with pytest.raises(ValueError, match=says):
        tile_of(np.empty((rows, D)), w, kind)


def test_serves_says_what_is_refused() -> None:
    assert serves(64, 704, 64)
    assert serves(100, 512, 512)
    assert not serves(63, 512, 128)
    assert not serves(64, 96, 32)
    assert not serves(64, 256, 8)
    assert not serves(64, 512, 96)
