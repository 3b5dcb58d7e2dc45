"""Products with every form of quantised weights where the kernels are in use: whoever computes them, they are right."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import native
from jserve.model.dot import dot, gate_up
from tests.model.test_quant import FORMS, D, N, error, exact_product, tensor
from tests.native.test_steps import calls

XLAS = ("int8 groups rounded", "e4m3 groups rounded", "e4m3 static", "int8 static", "e4m3 bounded")
"""Those whose activations are rounded as no kernel does it."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMS)
def test_products(name: str, level: str) -> None:
    form = replace(FORMS[name], dtype="bfloat16")
    w, exact = tensor(form)
    with native.kernels(level):
        assert calls(dot, jnp.zeros((3, D)), w, name="quantised_product") == (name not in XLAS)
    rng = np.random.default_rng(1)
    with native.kernels(level):
        x = np.asarray(jnp.asarray(rng.standard_normal((3, D)), jnp.bfloat16), np.float32)
        assert error(dot(jnp.asarray(x), w), exact_product(x, exact, form)) < 8e-3


@pytest.mark.parametrize("name", ["uint4", "e2m1", "int4 ordered", "e4m3 static", "int8 shifts"])
def test_gate_and_up(name: str, level: str) -> None:
    form = replace(FORMS[name], dtype="bfloat16")
    w, exact = tensor(form, (2, N))
    x = np.random.default_rng(1).standard_normal((3, D)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    gate, up = (exact_product(x, exact[i], form) for i in range(2))
    want = gate / (1 + np.exp(-gate)) * up
    with native.kernels(level):
        assert error(gate_up(jnp.asarray(x), w), want) < 2e-2
