"""Quantised products by the native kernels in JAX: which are chosen, that integers have XLA's bits, and whole steps."""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import native, native_quant
from jserve.model.dot import dot, gate_up
from jserve.model.quant import Form, QTensor
from jserve.native.library import LEVELS
from jserve.weights.quant.rounding import as_tensor
from tests.native import rig
from tests.native.test_steps import calls, compare, requests
from tests.whole import equal

N, D = 48, 96
FORMS = {
    "int8": Form(kind="int8", rounded=True, method="rtn"),
    "int8-weight-only": Form(kind="int8", method="rtn"),
    "int4": Form(kind="int4", group=32, method="rtn"),
    "fp8": Form(kind="e4m3", rounded=True, method="rtn"),
    "fp8 weights": Form(kind="e4m3", method="rtn"),
}


def arrays(form: Form, T: int) -> tuple[jax.Array, QTensor]:
    """Activations of all sizes and a matrix [2, N, D]."""
    rng = np.random.default_rng(T)
    x = rng.standard_normal((T, D)) * rng.random((T, 1)) * 10
    w = jnp.asarray(rng.standard_normal((2 * N, D)), jnp.float32)
    return jnp.asarray(x, jnp.float32), as_tensor(w, form).reshape(2, N, D)


def by(level: str, function, *args) -> np.ndarray:
    with native.kernels(level):
        return np.asarray(jax.jit(function)(*args))


def test_products_are_chosen_by_form_rows_and_type(level):
    for form in FORMS.values():
        x, w = arrays(form, 4)
        rows = native.MOST_ROWS[level]
        most = max(rows, native_quant.FOUR_BIT_ROWS) if form.kind == "int4" else rows
        fused = form != FORMS["fp8"]
        assert calls(dot, x, w) == 0, "nothing is chosen unless a step asks for it"
        with native.kernels(level):
            assert calls(dot, x, w, name="quantised_product") == 1
            assert calls(gate_up, x, w, name="quantised_gate_up") == fused
            assert calls(gate_up, x, w, name="quantised_product") == (not fused)
            assert calls(gate_up, x, w, jnp.zeros((2, N)), name="quantised_product") == 1
            assert calls(dot, jnp.zeros((most + 1, D)), w) == 0
            wide = QTensor(q=w.q, scale=w.scale, zero=None, form=replace(form, dtype="float32"))
            assert calls(dot, x, wide) == 0, "float32 is XLA's"


def test_rounded_activations_with_groups_are_xlas(level):
    form = Form(kind="int8", rounded=True, group=32, method="rtn")
    with native.kernels(level):
        assert calls(dot, *arrays(form, 4)) == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("T", [1, 9, 40])
def test_results_are_those_of_xla(level, T):
    for name, form in FORMS.items():
        x, w = arrays(form, T)
        got, want = by(level, dot, x, w), by("", dot, x, w)
        if name == "int8":
            assert np.array_equal(got, want), "the same integers, scaled in the same order"
        near = 5e-3 if form.group else 1e-6  # scales of groups are rounded into weights, or not
        assert np.abs(got - want).max() <= near * np.abs(want).max()
        got, want = by(level, gate_up, x, w), by("", gate_up, x, w)
        assert np.abs(got - want).max() <= near * np.abs(want).max()


def test_the_lowest_levels_take_more_rows_of_int4(level):
    x, w = arrays(FORMS["int4"], native_quant.FOUR_BIT_ROWS)
    for asked in LEVELS[1 : LEVELS.index(level) + 1]:
        with native.kernels(asked):
            assert calls(dot, x, w) == 1
            assert calls(dot, x, w.reshape(-1, D)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int8-weight-only", "int4", "fp8"])
def test_whole_steps_are_close_to_xla_and_to_alone(level, name):
    steps = rig.runner("native", 1, name)
    assert "jserve.quantised_product.v2" in steps.programs.hlo(rig.BUCKETS[0])
    asked = requests(20)
    wanted = equal.alone(steps, asked)
    compare(equal.run(steps, asked, equal.PLAIN, random.Random(0)), wanted, asked)
    if name in ("int8-weight-only", "int4"):  # rounded activations may round to another neighbour
        compare(wanted, equal.alone(rig.runner("xla", 1, name), asked), asked)
