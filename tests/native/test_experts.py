"""Products of experts by the native kernels, which read weights where they lie."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import native
from jserve.model.arch import Clamped, Moe, Router
from jserve.model.moe import in_place, route, routed, through, tiled
from jserve.native.library import LEVELS

MOE = Moe(E=11, X=3, F=45)
D = 70


def params(moe: Moe = MOE) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {
        "expert_gate_up": (2 * moe.E, moe.F, D),
        "expert_down": (moe.E, D, moe.F),
        "expert_gate_up_bias": (2 * moe.E, moe.F),
    }
    return {
        name: jnp.asarray(0.2 * rng.standard_normal(shape), jnp.bfloat16)
        for name, shape in shapes.items()
    }


def drawn(T: int, moe: Moe = MOE) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(T)
    expert = np.argsort(rng.random((T, moe.E)), axis=1)[:, : moe.X].astype(np.int32)
    expert[rng.random(T) < 0.2] = moe.E
    x = jnp.asarray(rng.standard_normal((T, D)), jnp.float32)
    return x, jnp.asarray(expert), jnp.asarray(rng.random((T, moe.X)), jnp.float32)


def by(form: Any, moe: Moe, p: Any, args: Any, level: str) -> np.ndarray:
    with native.kernels(level):
        return np.asarray(jax.jit(partial(through, form, moe))(p, *args))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "moe",
    [
        MOE,
        replace(MOE, expert_bias=True, activation=Clamped(alpha=1.7, limit=0.5)),
        replace(MOE, activation="gelu_tanh", router=Router(on_input=True)),
    ],
)
def test_experts_give_what_xla_gives(level: str, moe: Moe) -> None:
    p = params(moe)
    for asked in LEVELS[1 : LEVELS.index(level) + 1]:
        for T in (1, 4, 33, 100):
            got = by(in_place, moe, p, drawn(T, moe), asked)
            want = by(tiled, moe, p, drawn(T, moe), "")
            np.testing.assert_allclose(got, want, atol=2e-2, err_msg=f"{asked}, {T} tokens")
            assert np.abs(want).max() > 0.5


def test_all_tokens_may_choose_one_expert_and_others_are_not_read(level: str) -> None:
    p, (x, expert, weight) = params(), drawn(100)
    expert = jnp.where(expert < MOE.E, jnp.array([4, 0, 7]), MOE.E)
    unread = {name: w.at[np.array(away)].set(jnp.nan) for name, w, away in _unread(p)}
    got = by(in_place, MOE, p | unread, (x, expert, weight), level)
    want = by(tiled, MOE, p, (x, expert, weight), "")
    np.testing.assert_allclose(got, want, atol=2e-2)
    assert np.all(got[np.asarray(expert)[:, 0] == MOE.E] == 0)


def _unread(p: Any) -> list[tuple[str, jax.Array, list[int]]]:
    others = [e for e in range(MOE.E) if e not in (0, 4, 7)]
    both = [row for e in others for row in (2 * e, 2 * e + 1)]
    return [
        ("expert_gate_up", p["expert_gate_up"], both),
        ("expert_down", p["expert_down"], others),
    ]


def test_the_kernels_are_chosen_by_rows_an_expert_has(level: str) -> None:
    p = {name: w for name, w in params().items() if not name.endswith("bias")}
    p["router"] = jnp.zeros((MOE.E, D))

    def text(T: int, dtype: Any) -> str:
        def layer(p: Any, x: jax.Array) -> jax.Array:
            return routed(MOE, p, x, *route(MOE.router, p, x, MOE.X, jnp.ones(T, bool)))

        given = {name: w.astype(dtype) for name, w in p.items()} | {"router": p["router"]}
        return jax.jit(layer).lower(given, jnp.zeros((T, D))).as_text()

    most = min(native.MOST_ROWS[level] * MOE.E, native.MOST_ASSIGNMENTS) // MOE.X
    assert "jserve" not in text(4, jnp.bfloat16)
    with native.kernels(level):
        assert text(most, jnp.bfloat16).count("jserve.expert_") == 2
        assert "jserve.expert_" not in text(most + 1, jnp.bfloat16)
        assert "jserve.expert_" not in text(4, jnp.float32)


def test_no_weight_is_copied(level: str) -> None:
    moe, shape = Moe(E=16, X=2, F=256), jax.ShapeDtypeStruct
    p = {
        "expert_gate_up": shape((32, 256, 512), jnp.bfloat16),
        "expert_down": shape((16, 512, 256), jnp.bfloat16),
    }
    args = [shape((8, 512), jnp.float32), shape((8, 2), jnp.int32), shape((8, 2), jnp.float32)]
    with native.kernels(level):
        program = jax.jit(partial(through, in_place, moe)).lower(p, *args).compile()
    assert program.memory_analysis().temp_size_in_bytes < 256 * 512 * 2
