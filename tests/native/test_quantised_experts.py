"""Products of quantised experts by the native kernels, which read numbers and scales where they lie."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import native
from jserve.model.arch import Clamped, Moe
from jserve.model.moe import in_place, route, routed, through
from jserve.model.quant import HALF_BYTES, Form, QTensor
from jserve.native.library import LEVELS
from tests.native.quantised import Weights, weights

MOE = Moe(E=7, X=3, F=96)
D = 64
FORMS = {
    "int8": Form(kind="int8"),
    "int8 rounded": Form(kind="int8", rounded=True),
    "int8 zeros": Form(kind="int8", group=32, zeros=True),
    "int8 shifts": Form(kind="int8", group=16, shifts=True),
    "int4": Form(kind="int4", group=32),
    "int4 zeros": Form(kind="int4", group=32, zeros=True),
    "uint4 shifts": Form(kind="uint4", group=32, shifts=True),
    "e2m1 by 16": Form(kind="e2m1", group=16),
    "e2m1 by 32": Form(kind="e2m1", group=32),
    "e4m3": Form(kind="e4m3", group=32),
}
Experts = dict[str, Weights]
"""expert_gate_up, of [2E * F, D], and expert_down, of [E * D, F]."""


def made(form: Form) -> Experts:
    kind = "rounded" if form.rounded else form.kind
    off = "zeros" if form.zeros else "shifts" if form.shifts else ""
    sizes = {"expert_gate_up": (2 * MOE.E * MOE.F, D), "expert_down": (MOE.E * D, MOE.F)}
    found = {}
    for name, (N, K) in sizes.items():
        found[name] = w = weights(kind, N, K, group=form.group, off=off)
        size = np.abs(w.wide).mean() * np.sqrt(K)
        w.scale = (w.scale / size).astype(np.float32)
        w.shift = None if w.shift is None else (w.shift / size).astype(np.float32)
        del w.wide
    return found


def tensors(experts: Experts, form: Form) -> dict[str, QTensor]:
    def of(w: Weights, *rows: int) -> QTensor:
        parts = {"q": w.q, "scale": w.scale, "zero": w.zero, "shift": w.shift}
        parts = {
            name: None if x is None else jnp.asarray(x.reshape(*rows, -1))
            for name, x in parts.items()
        }
        return QTensor(**parts, form=form)  # type: ignore[arg-type]

    return {
        "expert_gate_up": of(experts["expert_gate_up"], 2 * MOE.E, MOE.F),
        "expert_down": of(experts["expert_down"], MOE.E, D),
    }


def drawn(T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(T)
    expert = np.argsort(rng.random((T, MOE.E)), axis=1)[:, : MOE.X].astype(np.int32)
    expert[rng.random(T) < 0.2] = MOE.E
    x = np.asarray(jnp.asarray(rng.standard_normal((T, D)), jnp.bfloat16), np.float32)
    return x, expert, rng.random((T, MOE.X), np.float32)


def exact(
    experts: Experts, x: np.ndarray, expert: np.ndarray, weight: np.ndarray, act: Any
) -> np.ndarray:
    """float64[T, D]."""
    gate_up = experts["expert_gate_up"].wide.reshape(MOE.E, 2, MOE.F, D)
    down = experts["expert_down"].wide.reshape(MOE.E, D, MOE.F)
    y = np.zeros(x.shape)
    for t, j in np.ndindex(expert.shape):
        e = expert[t, j]
        if e < MOE.E:
            gate, up = gate_up[e] @ x[t].astype(np.float64)
            y[t] += weight[t, j] * (down[e] @ act(gate, up))
    return y


def silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = np.minimum(gate, 0.5)
    return (np.clip(up, -0.5, 0.5) + 1) * gate / (1 + np.exp(-1.7 * gate))


def by(moe: Moe, p: Any, args: Any, level: str) -> np.ndarray:
    with native.kernels(level):
        return np.asarray(jax.jit(partial(through, in_place, moe))(p, *map(jnp.asarray, args)))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FORMS)
def test_experts_in_every_form(level: str, name: str) -> None:
    form = FORMS[name]
    experts = made(form)
    p = tensors(experts, form)
    near = 4e-2 if form.rounded else 1e-2
    clamp = replace(MOE, activation=Clamped(alpha=1.7, limit=0.5))
    for T in (1, 4, 60):
        args = drawn(T)
        for moe, act in ((MOE, silu), (clamp, clamped)):
            want = exact(experts, *args, act)
            for asked in LEVELS[1 : LEVELS.index(level) + 1]:
                got = by(moe, p, args, asked)
                assert np.abs(got - want).max() <= near * np.abs(want).max(), (asked, T, act)


def test_experts_that_nobody_chose_are_not_read(level: str) -> None:
    form = FORMS["uint4 shifts"]
    p, (x, expert, weight) = tensors(made(form), form), drawn(30)
    expert = np.where(expert < MOE.E, np.array([4, 0, 5]), MOE.E)
    others = np.array([e for e in range(MOE.E) if e not in (0, 4, 5)])
    gate_up, down = p["expert_gate_up"], p["expert_down"]
    both = (2 * others[:, None] + np.arange(2)).reshape(-1)
    unread = {
        "expert_gate_up": replace(gate_up, scale=gate_up.scale.at[both].set(jnp.nan)),
        "expert_down": replace(down, shift=down.shift.at[others].set(jnp.nan)),
    }
    args = (x, expert, weight)
    assert np.array_equal(by(MOE, unread, args, level), by(MOE, p, args, level))


def text(p: Any, T: int) -> str:
    """The program of a layer's routed experts."""
    p = p | {"router": jnp.zeros((MOE.E, D))}

    def layer(p: Any, x: jax.Array) -> jax.Array:
        return routed(MOE, p, x, *route(MOE.router, p, x, MOE.X, jnp.ones(T, bool)))

    return jax.jit(layer).lower(p, jnp.zeros((T, D))).as_text()


def test_the_kernels_are_chosen_by_both_matrices_and_rows(level: str) -> None:
    int4, fp8 = FORMS["int4"], Form(kind="e4m3", rounded=True)
    p = tensors(made(int4), int4)
    wide = jnp.zeros((MOE.E, D, MOE.F), jnp.bfloat16)
    most = native.MOST_ASSIGNMENTS // MOE.X
    assert "jserve.quantised_expert" not in text(p, 4)
    with native.kernels(level):
        assert text(p, 4).count("jserve.quantised_expert_") == 2
        mixed = text(p | {"expert_down": wide}, 4)
        assert mixed.count("jserve.quantised_expert_gate_up") == 1
        assert mixed.count("jserve.expert_product") == 1
        assert "jserve.quantised_expert" not in text(p, most + 1)
        assert "jserve.quantised_expert" not in text(tensors(made(fp8), fp8), 4)
        f32 = {name: replace(w, form=replace(int4, dtype="float32")) for name, w in p.items()}
        assert "jserve" not in text(f32, 4)


@pytest.mark.parametrize("name", ["int8", "int4", "e2m1 by 16"])
def test_no_expert_is_widened_or_copied(level: str, name: str) -> None:
    moe, shape, form = Moe(E=16, X=2, F=256), jax.ShapeDtypeStruct, FORMS[name]
    dtype = jnp.uint8 if form.kind in HALF_BYTES else jnp.int8

    def of(*sizes: int) -> QTensor:
        rows, K = sizes[:-1], sizes[-1]
        scale = shape((*rows, form.groups(K)), jnp.float32)
        return QTensor(q=shape((*rows, form.stored(K)), dtype), scale=scale, zero=None, form=form)

    p = {"expert_gate_up": of(32, 256, 512), "expert_down": of(16, 512, 256)}
    args = [shape((8, 512), jnp.float32), shape((8, 2), jnp.int32), shape((8, 2), jnp.float32)]
    with native.kernels(level):
        program = jax.jit(partial(through, in_place, moe)).lower(p, *args).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 256 * 512
