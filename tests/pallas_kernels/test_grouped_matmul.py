"""Mixtures of experts in the Mosaic interpreter against the float32 reference, that against loops of numpy. What a
token did not choose, and tokens that choose nothing, are NaN."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import Activation, Experts, ExpertSpec, grouped_mlp, ref
from pallas_kernels.grouped_matmul.api import columns_of, tiles_of
from pallas_kernels.grouped_matmul.plan import BLOCK, Order, Work, plan
from pallas_kernels.launch import interpreter
from tests.pallas_kernels.experts import MIXTURES, Mixture, choices, experts, scales, tokens


def inputs(m: Mixture) -> tuple[Any, Any, Experts]:
    e_TX = choices(m)
    return tokens(m, e_TX), e_TX, experts(m, e_TX)


def by_hand(m: Mixture, x: Any, e_TX: Any, e: Experts) -> np.ndarray:
    """[T, X, D]: token by token, choice by choice, float64."""
    gate_up, down, b, c = (None if w is None else np.asarray(w, np.float64) for w in e)
    out = np.zeros((m.T, m.X, m.D))
    for t, i in np.ndindex(m.T, m.X):
        n = int(e_TX[t, i])
        if not 0 <= n < m.E:
            continue
        one = np.asarray(x[t], np.float64) * float(scales(m)[t, i] if m.scaled else 1)
        gate, up = gate_up[n] @ one + (0 if b is None else b[n])
        out[t, i] = down[n] @ acted(m.activation, gate, up) + (0 if c is None else c[n])
    return out


def by_kernel(x: Any, e_TX: Any, e: Experts, spec: ExpertSpec, scale_TX: Any = None) -> np.ndarray:
    """float32[T, X, D], zero where a token goes nowhere."""
    y_YD, row_TX = grouped_mlp(x, e_TX, e, spec, scale_TX=scale_TX)
    assert y_YD.dtype == jnp.float32
    assert row_TX.shape == e_TX.shape
    return np.where(row_TX[:, :, None] >= 0, np.asarray(y_YD)[np.maximum(row_TX, 0)], 0)


def acted(a: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if a.name == "gelu_tanh":
        return up * gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    if a.name == "silu":
        return up * gate / (1 + np.exp(-gate))
    gate, up = np.minimum(gate, a.limit), np.clip(up, -a.limit, a.limit)
    return (up + 1) * gate / (1 + np.exp(-a.alpha * gate))


@pytest.mark.parametrize("name", MIXTURES)
def test_reference(name: str) -> None:
    m = MIXTURES[name]
    args = inputs(m)
    got = ref.grouped_mlp(*args, m.spec(), scale_TX=scales(m))
    np.testing.assert_allclose(got, by_hand(m, *args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_values(name: str) -> None:
    m = MIXTURES[name]
    args = inputs(m)
    got, want = by_kernel(*args, m.spec(interpreter()), scales(m)), by_hand(m, *args)
    # Between the products numbers are rounded to the type of the weights.
    near = 2**-7 if m.dtype == jnp.bfloat16 else 2**-10
    np.testing.assert_allclose(got, want, rtol=0, atol=near * max(np.abs(want).max(), 1e-9))


def test_a_token_does_not_depend_on_the_others() -> None:
    """Bit for bit: whoever shares its tile."""
    m = MIXTURES["more tokens than a tile"]
    x, e_TX, e = inputs(m)
    spec = ExpertSpec(tune={"columns": 16}, interpret=interpreter())
    together, alone = by_kernel(x, e_TX, e, spec), by_kernel(x[4:5], e_TX[4:5], e, spec)
    np.testing.assert_array_equal(together[4:5], alone)


def work_of(e_TX: Any, E: int, columns: int) -> tuple[Order, Work]:
    T, X = e_TX.shape
    order = Order(T=T, X=X, E=E, columns=columns)
    return order, Work(*(np.asarray(x) for x in plan(jnp.asarray(e_TX), order)))


def check(e_TX: Any, E: int, columns: int) -> None:
    """Every pair has a row of its own in a tile of its expert, in the order of the tokens."""
    order, work = work_of(e_TX, E, columns)
    e_TX = np.asarray(e_TX)
    real = (e_TX >= 0) & (e_TX < E)
    assert ((work.row_TX >= 0) == real).all()
    rows = work.row_TX[real]
    assert len(set(rows.tolist())) == len(rows)
    assert (work.expert_I[rows // columns] == e_TX[real]).all()
    assert (work.pair_Y[rows] == np.flatnonzero(real)).all()
    assert ((work.pair_Y >= 0) & (work.pair_Y < order.pairs)).all()
    counts = np.bincount(e_TX[real], minlength=E)
    assert int(work.n_1[0]) == sum(-(-n // columns) for n in counts) <= order.tiles
    assert len(set((rows // columns).tolist())) == work.n_1[0], "a tile of nobody is in the list"
    for e in range(E):
        assert (np.diff(work.row_TX[e_TX == e]) == 1).all()


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("columns", [8, 64])
def test_plan(name: str, columns: int) -> None:
    m = MIXTURES[name]
    check(choices(m), m.E, columns)


@pytest.mark.parametrize(
    ("T", "X", "E"), [(BLOCK, 1, 3), (BLOCK + 1, 1, 300), (150, 5, 7), (1000, 1, 9), (37, 60, 60)]
)
def test_plan_of_many_pairs(T: int, X: int, E: int) -> None:
    """More than are ranked at once, and no multiple of that."""
    for chosen in ("random", "some nowhere") if E > 2 else ("random",):
        check(choices(Mixture(T=T, X=X, E=E, chosen=chosen)), E, 16)


def test_a_thousand_tokens_of_one_expert() -> None:
    check(choices(Mixture(T=1000, X=1, E=6, chosen="the last")), 6, 8)


@pytest.mark.parametrize(
    ("sizes", "columns"), [([1] * 5 + [4], 8), ([9, 1, 1], 8), ([17] * 4, 16), ([1] * 3, 128)]
)
def test_the_list_is_no_longer_than_it_can_get(sizes: list[int], columns: int) -> None:
    """Experts that begin a tile for a single pair fill the last place."""
    e = np.repeat(np.arange(len(sizes)), sizes)[:, None]
    order, work = work_of(e, len(sizes), columns)
    assert work.n_1[0] == order.tiles
    check(e, len(sizes), columns)


@pytest.mark.parametrize(
    ("pairs", "E", "columns"),
    [(1, 8, 8), (8, 128, 8), (512, 128, 8), (520, 128, 16), (128, 8, 32), (256, 8, 64), (4096, 8, 128)],
)  # fmt: skip
def test_columns_leave_room_for_twice_the_mean(pairs: int, E: int, columns: int) -> None:
    assert columns_of(pairs, E) == columns


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"down_EDF": jnp.zeros((3, 128, 96), jnp.bfloat16)}, "down of shape"),
        ({"down_EDF": jnp.zeros((3, 128, 128), jnp.float32)}, "weights are bfloat16 and float32"),
        ({"down_bias_ED": jnp.zeros((3, 100))}, "bias of down of shape"),
        ({"gate_up_bias_E2F": jnp.zeros((3, 256))}, "bias of gate_up of shape"),
    ],
)
def test_what_is_refused(change: dict[str, Any], says: str) -> None:
    x, e_TX, e = inputs(MIXTURES["more tokens than a tile"])
    with pytest.raises(ValueError, match=says):
        grouped_mlp(x, e_TX, e._replace(**change), ExpertSpec())


def test_what_else_is_refused() -> None:
    m = MIXTURES["one token"]
    x, e_TX, e = inputs(m)
    with pytest.raises(ValueError, match="x of shape"):
        grouped_mlp(x[:, :64], e_TX, e, m.spec())
    with pytest.raises(ValueError, match="scales of shape"):
        grouped_mlp(x, e_TX, e, m.spec(), scale_TX=jnp.ones((1, 3)))
    with pytest.raises(ValueError, match="'relu' is none of"):
        grouped_mlp(x, e_TX, e, ExpertSpec(activation=Activation(name="relu")))
    with pytest.raises(ValueError, match="tiles of 24 tokens"):
        grouped_mlp(x, e_TX, e, ExpertSpec(tune={"columns": 24}))
    odd = Experts(jnp.zeros((8, 2, 96, 128), jnp.bfloat16), jnp.zeros((8, 128, 96), jnp.bfloat16))
    with pytest.raises(ValueError, match="experts of 96 in a model of 128"):
        tiles_of(x, e_TX, odd, m.spec())
