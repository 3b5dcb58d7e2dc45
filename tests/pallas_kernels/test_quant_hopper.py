"""The model's products with quantised weights by the kernel in the interpreter, beside XLA's in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import native, quant
from jserve.model.dot import dot, gate_up, path_of
from jserve.model.quant import Form, QTensor
from jserve.runner import selftest
from pallas_kernels import quant_matmul as kernel
from pallas_kernels.launch import interpreter

D = 512
FORMS = {
    "int4": Form(kind="int4", group=128),
    "int4, a scale a row": Form(kind="int4"),
    "int4 zeros, ordered": Form(kind="int4", group=64, zeros=True, ordered=True),
    "uint4 shifts": Form(kind="uint4", group=32, shifts=True),
    "e2m1": Form(kind="e2m1", group=16),
    "int8 zeros": Form(kind="int8", group=32, zeros=True),
    "int8 rounded": Form(kind="int8", group=128, rounded=True),
    "e4m3 rounded": Form(kind="e4m3", group=128, rounded=True),
    "e4m3 static, shifts": Form(kind="e4m3", group=64, rounded=True, static=True, shifts=True),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the kernel's calls, which are interpreted."""
    kinds: list[str] = []
    real = kernel.quant_matmul

    def interpreted(x: Any, w: Any, kind: str, **options: Any) -> Any:
        kinds.append(kind)
        return real(x, w, kind, interpret=interpreter(), **options)

    monkeypatch.setattr(kernel, "quant_matmul", interpreted)
    return kinds


def rows(T: int, D: int = D) -> jax.Array:
    return jnp.asarray(np.random.default_rng(T).standard_normal((T, D)), jnp.float32)


def in_float32(x_TD: jax.Array, w: QTensor) -> np.ndarray:
    """The product of activations as a model in bfloat16 has them."""
    exact = replace(w, form=replace(w.form, dtype="float32"))
    x_TD = x_TD if w.form.rounded else x_TD.astype(jnp.bfloat16)
    return np.asarray(quant.product(x_TD.astype(jnp.float32), exact))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FORMS)
def test_values(name: str, calls: list[str]) -> None:
    form = FORMS[name]
    w, x = selftest._random_matrix(form), rows(3)
    assert path_of(form, native.HOPPER, 3, w.shape) == "quant_matmul"
    with native.kernels(native.HOPPER):
        got = dot(x, w)
    assert calls == [form.kind]
    want = in_float32(x, w)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_a_matrix_in_parts(calls: list[str]) -> None:
    """Gate and up are rows of one matrix."""
    form = FORMS["int4"]
    whole = selftest._random_matrix(form)
    w, x = whole.reshape(2, -1, whole.shape[1]), rows(3)
    with native.kernels(native.HOPPER):
        got = gate_up(x, w)
    assert calls == ["int4"]
    y_T2F = in_float32(x, whole).reshape(3, 2, -1)
    want = np.asarray(jax.nn.silu(y_T2F[:, 0]) * y_T2F[:, 1])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_what_the_kernel_does_not_take_is_xlas(calls: list[str]) -> None:
    form = FORMS["int4"]
    w = selftest._random_matrix(form)
    few = w.mapped(lambda x: x[:63])
    wide = replace(w, form=replace(form, dtype="float32"))
    whole = selftest._random_matrix(Form(kind="int8"))
    cases = [(few, 3), (wide, 3), (whole, 3), (w, kernel.MAX_ROWS + 1)]
    for one, T in cases:
        with native.kernels(native.HOPPER):
            got = dot(rows(T), one)
        want = np.asarray(quant.product(rows(T), one))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
    with native.kernels(""):
        dot(rows(3), w)
    assert not calls


def test_the_test_at_start_sees_wrong_products(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = [FORMS["int4 zeros, ordered"], FORMS["e4m3 rounded"]]
    monkeypatch.setattr(selftest, "PRODUCT_ROWS", (1,))
    assert selftest.products_differ(forms) == ""
    interpreted = kernel.quant_matmul

    def without_zeros(x: Any, w: Any, kind: str, **options: Any) -> Any:
        return interpreted(x, w._replace(zero_NB=None), kind, **options)

    monkeypatch.setattr(kernel, "quant_matmul", without_zeros)
    jax.clear_caches()  # the traces of the kernel that was right
    found = selftest.products_differ(forms)
    assert found.startswith("int4 in groups of 64, 1 rows differs")
    assert "fp8" not in found


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the next group's scale": lambda w: w._replace(scale_NB=jnp.roll(w.scale_NB, -1, axis=1)),
    "halves in the other order": lambda w: w._replace(q=(w.q << 4) | (w.q >> 4)),
    "no zeros": lambda w: w._replace(zero_NB=None),
    "without the last groups": lambda w: w._replace(scale_NB=w.scale_NB.at[:, -1].set(0)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", CHANGES)
def test_each_mistake_is_far_beyond_rounding(change: str) -> None:
    form = FORMS["int4 zeros, ordered"]
    w, x = selftest._random_matrix(replace(form, ordered=False)), rows(3)
    given = kernel.Weights(w.q, w.scale, w.zero)
    want, wrong = (
        np.asarray(kernel.quant_matmul(x, one, "int4", interpret=interpreter()))
        for one in (given, CHANGES[change](given))
    )
    assert np.abs(want - wrong).max() > selftest.APART * np.abs(want).max()
