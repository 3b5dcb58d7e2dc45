"""Products of quantised matrices against float64, and what they must not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.extend.core import jaxprs_in_params

from jserve.model import native
from jserve.model.dot import dot, forms_for_hopper, gate_up, path_of, paths
from jserve.model.quant import HALF_BYTES, LARGEST, Form, QTensor, integers, rounded, widened
from jserve.native.library import LEVELS_OF
from jserve.weights.quant.matrix import packed

N, D = 24, 128
FORMS = {
    "int8": Form(kind="int8"),
    "int8 groups": Form(kind="int8", group=32, zeros=True),
    "int4": Form(kind="int4", group=32),
    "int4 zeros": Form(kind="int4", group=64, zeros=True),
    "e4m3": Form(kind="e4m3"),
    "e4m3 groups": Form(kind="e4m3", group=16),
    "int8 rounded": Form(kind="int8", rounded=True),
    "int8 groups rounded": Form(kind="int8", group=32, zeros=True, rounded=True),
    "e4m3 rounded": Form(kind="e4m3", rounded=True),
    "e4m3 groups rounded": Form(kind="e4m3", group=32, rounded=True),
    "e2m1": Form(kind="e2m1", group=16),
    "uint4": Form(kind="uint4", group=32, shifts=True),
    "int8 shifts": Form(kind="int8", group=32, shifts=True),
    "int4 ordered": Form(kind="int4", group=32, zeros=True, ordered=True),
    "e4m3 static": Form(kind="e4m3", rounded=True, static=True),
    "int8 static": Form(kind="int8", rounded=True, static=True),
    "e4m3 bounded": Form(kind="e4m3", rounded=True, bound=1.5),
}
DOT = jax.jit(dot)
rng = np.random.default_rng(0)


def tensor(form: Form, rows: tuple[int, ...] = (N,)) -> tuple[QTensor, np.ndarray]:
    """A matrix in this form, and what it stands for in float64."""
    B = form.groups(D)
    top = {"int8": 127, "int4": 7, "e4m3": 1, "e2m1": 1, "uint4": 7}[form.kind]
    q = rng.integers(-top - 1, top + 1, (*rows, D))
    q = q + 8 if form.kind == "uint4" else q
    numbers: Any = q.astype(np.int8)
    if form.kind == "e4m3":
        numbers = np.asarray(jnp.asarray(rng.normal(0, 60, (*rows, D)), jnp.float8_e4m3fn))
        q = numbers.astype(np.float64)
    if form.kind == "e2m1":
        q = numbers = rng.choice([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], (*rows, D))
    scale = rng.uniform(0.01, 0.1, (*rows, B)).astype(np.float32)
    zero = rng.integers(-8, 8, (*rows, B)).astype(np.int8) if form.zeros else None
    if form.shifts:  # of few bits, as in files: then products are exact
        scale = np.round(scale * 1024) / np.float32(1024)
    shift = rng.integers(-99, 99, (*rows, B)) / np.float32(1024) if form.shifts else None
    order = rng.permutation(D).astype(np.int32) if form.ordered else None
    at = np.arange(D) // (D // B)
    exact = (q - (0 if zero is None else zero[..., at])) * scale[..., at].astype(np.float64)
    if shift is not None:
        exact = exact - shift[..., at]
    if order is not None:
        placed = np.empty_like(exact)
        placed[..., order] = exact
        exact = placed
    if form.kind in HALF_BYTES:
        numbers = packed(numbers.reshape(-1, D), form.kind).reshape(*rows, D // 2)
    made = QTensor(
        q=jnp.asarray(numbers),
        scale=jnp.asarray(scale),
        zero=None if zero is None else jnp.asarray(zero),
        form=form,
        shift=None if shift is None else jnp.asarray(shift),
        order=None if order is None else jnp.asarray(np.stack([order, order])),
        input_scale=jnp.asarray(INPUT_SCALES) if form.static else None,
    )
    return made, exact


INPUT_SCALES = np.array([0.005, 0.01, 0.008], np.float32)
"""Of three tensors that make a matrix; the largest counts."""


def exact_product(x: np.ndarray, w: np.ndarray, form: Form) -> np.ndarray:
    """In float64, of activations rounded as the form says."""
    if form.static or form.bound:
        top = LARGEST[form.kind]
        most = np.abs(x).max(-1, keepdims=True)
        s = np.float32(0.01) if form.static else np.minimum(most, form.bound) / np.float32(top)
        x = np.clip(x / s, -top, top)
        x = np.round(x) if form.kind == "int8" else np.asarray(jnp.asarray(x, jnp.float8_e4m3fn))
        x = x.astype(np.float64) * s
    elif form.rounded:
        x_TBG = x.reshape(len(x), form.groups(D), -1)
        q, s = rounded(jnp.asarray(x_TBG), form)
        x = (np.asarray(q).astype(np.float64) * np.asarray(s)[..., None]).reshape(len(x), D)
    return x.astype(np.float64) @ w.reshape(-1, D).T


def error(got: Any, want: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want)))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products(name: str, dtype: str):
    form = replace(FORMS[name], dtype=dtype)
    w, exact = tensor(form)
    assert w.shape == (N, D)
    for T in (1, 2, 7, 16, 17, 40):
        x = rng.standard_normal((T, D)).astype(np.float32)
        want = exact_product(x, exact, form)
        exactly = dtype == "float32" or form.rounded
        assert error(DOT(x, w), want) < (2e-6 if exactly else 6e-3), T


@pytest.mark.parametrize("name", FORMS)
def test_widened_is_exact(name: str):
    form = replace(FORMS[name], dtype="float32")
    w, exact = tensor(form, (3, 5))
    assert w.shape == (3, 5, D)
    np.testing.assert_array_equal(np.asarray(widened(w)), exact.astype(np.float32))


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def traced_path(w: QTensor, T: int, level: str) -> str:
    """What the product is in fact, by its trace: a call of a kernel, a product of groups, or one of a matrix, whose
    numbers were multiplied by their scales before or were not."""
    x = jax.ShapeDtypeStruct((T, D), jnp.float32)
    with native.kernels(level):
        found = list(equations(jax.make_jaxpr(lambda x: dot(x, w))(x).jaxpr))
    if any("ffi" in eqn.primitive.name for eqn in found):
        return "native"
    first = next(eqn for eqn in found if eqn.primitive.name == "dot_general")
    if first.params["dimension_numbers"][1][0]:
        return "xla-blocks"
    before = found[: found.index(first)]
    scaled = any(e.primitive.name == "mul" and e.outvars[0].aval.size == N * D for e in before)
    return "xla-widened" if scaled else "xla"


@pytest.mark.parametrize("name", FORMS)
def test_the_path_that_is_named_is_the_one_taken(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "LEVELS", LEVELS_OF["x86_64"])  # it is traced, and not run
    for dtype in ("float32", "bfloat16"):
        w, _ = tensor(replace(FORMS[name], dtype=dtype))
        named = paths({"w": w}, "avx512f", (1, 8, 9, 16, 17, 64, 65))[w.form.name]
        for level in ("", "avx512f", "avx512_bf16"):
            told = {T: path_of(w.form, level, T, w.shape) for T in (1, 8, 9, 16, 17, 64, 65)}
            for path in set(told.values()):
                same = [T for T in told if told[T] == path]
                for T in {same[0], same[-1]}:  # where it begins and ends
                    assert path == traced_path(w, T, level), (dtype, level, T)
                if level == "avx512f":
                    assert named[path] == [same[0], same[-1]]


def test_paths_are_named_by_form_and_tokens():
    four, eight = (replace(FORMS[n], dtype="bfloat16") for n in ("int4", "int8 rounded"))
    tree = {"a": tensor(four)[0], "b": [tensor(eight)[0], jnp.zeros(3)]}
    assert paths(tree, "", (2, 32, 512)) == {
        "int4": {"xla-blocks": [2, 2], "xla-widened": [32, 512]},
        "int8": {"xla": [2, 512]},
    }
    assert paths(tree, "avx512f", (2, 32, 512)) == {
        "int4": {"native": [2, 32], "xla-widened": [512, 512]},
        "int8": {"native": [2, 2], "xla": [32, 512]},
    }
    assert paths(tree, "avx512_bf16", (2, 32, 512))["int4"] == {"native": [2, 512]}
    assert paths({"b": jnp.zeros(3)}, "", (2,)) == {}


def test_paths_on_hopper():
    """The kernel takes few rows by groups, XLA the rest: other forms, more rows, matrices that are not whole tiles."""
    four = replace(FORMS["int4"], dtype="bfloat16")
    large, experts = (matrix_of(four, shape) for shape in ((256, 512), (2, 128, 512)))
    assert paths({"w": large}, "hopper", (1, 64, 65, 512)) == {
        "int4": {"quant_matmul": [1, 64], "xla-widened": [65, 512]}
    }
    assert paths({"expert_down": experts}, "hopper", (1, 64)) == {
        "int4": {"xla-blocks": [1, 1], "xla-widened": [64, 64]}
    }
    small = matrix_of(four, (32, 512))
    assert paths({"w": large, "x": small}, "hopper", (2,)) == {
        "int4": {"quant_matmul": [2, 2], "xla-blocks": [2, 2]}
    }
    for name, form in FORMS.items():
        form = replace(form, dtype="bfloat16")
        taken = path_of(form, "hopper", 2, (256, 512)) == "quant_matmul"
        assert taken == (bool(form.group) or form.kind in HALF_BYTES), name
        assert path_of(replace(form, dtype="float32"), "hopper", 2, (256, 512)) != "quant_matmul"
    assert forms_for_hopper({"w": large, "expert_down": experts}) == (four,)
    assert forms_for_hopper({"expert_down": experts, "b": jnp.zeros(3)}) == ()


def matrix_of(form: Form, shape: tuple[int, ...]) -> QTensor:
    """A matrix of which only shapes are looked at."""
    *rows, n = shape
    q, scale = ((*rows, k) for k in (form.stored(n), form.groups(n)))
    of = jax.ShapeDtypeStruct
    return QTensor(of(q, jnp.uint8), of(scale, jnp.float32), None, form)


def test_packed_numbers_are_read_in_their_order():
    q = rng.integers(-8, 8, (5, 96)).astype(np.int8)
    w = QTensor(q=packed(q), scale=np.ones((5, 1), np.float32), zero=None, form=Form(kind="int4"))
    np.testing.assert_array_equal(np.asarray(integers(w)), q)
    first = np.asarray(w.q)[0, :16]
    np.testing.assert_array_equal(first & 15, q[0, :16] + 8)
    np.testing.assert_array_equal(first >> 4, q[0, 16:32] + 8)


@pytest.mark.parametrize("name", FORMS)
def test_a_row_does_not_depend_on_the_others(name: str):
    form = replace(FORMS[name], dtype="float32")
    w, _ = tensor(form)
    x = rng.standard_normal((40, D)).astype(np.float32)
    x[3] *= 1e6
    alone = [np.asarray(DOT(x[i : i + 2], w))[0] for i in range(0, 20, 2)]
    together = np.asarray(DOT(x, w))[0:20:2]
    if form.rounded and form.kind == "int8" and not form.group:
        np.testing.assert_array_equal(together, alone)
    else:
        np.testing.assert_allclose(together, alone, rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_and_shows(name: str, bad: float):
    w, _ = tensor(replace(FORMS[name], dtype="float32"))
    x = rng.standard_normal((9, D)).astype(np.float32)
    clean = np.asarray(DOT(x, w))
    x[4, 7] = bad
    got = np.asarray(DOT(x, w))
    assert not np.isfinite(got[4]).any()
    np.testing.assert_allclose(np.delete(got, 4, 0), np.delete(clean, 4, 0), rtol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_the_scale_of_many_inputs_shows_a_nan(kind: str):
    """In rows of this length the largest number by XLA:CPU is that of the others."""
    x = np.ones((16, 1, 4096), np.float32)
    x[3, 0, 100] = np.nan
    _, scale = jax.jit(rounded, static_argnums=1)(x, Form(kind=kind, rounded=True))
    assert np.isnan(np.asarray(scale)[:, 0]).tolist() == [i == 3 for i in range(16)]


def test_a_gated_product_is_that_of_its_halves():
    form = replace(FORMS["int4"], dtype="float32")
    w, exact = tensor(form, (2, N))
    x = rng.standard_normal((5, D)).astype(np.float32)
    gate, up = (x @ exact[i].T for i in range(2))
    want = gate / (1 + np.exp(-gate)) * up
    assert error(gate_up(jnp.asarray(x), w), want) < 1e-5


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 4]), st.integers(0, 2**31))
def test_rounded_activations(T: int, B: int, seed: int):
    x = np.random.default_rng(seed).standard_normal((T, B, 32)).astype(np.float32) * 10
    x[0] = 0
    for kind in ("int8", "e4m3"):
        q, scale = (np.asarray(a) for a in rounded(jnp.asarray(x), Form(kind=kind, rounded=True)))
        assert (scale > 0).all()
        top = np.abs(x).max(-1)
        np.testing.assert_allclose(scale[top > 0] * LARGEST[kind], top[top > 0], rtol=1e-6)
        off = np.abs(q.astype(np.float32) * scale[..., None] - x)
        allowed = (
            scale[..., None] * 0.5
            if kind == "int8"
            else np.maximum(np.abs(x) / 16, scale[..., None] / 512)
        )
        assert (off <= allowed * 1.001).all()
