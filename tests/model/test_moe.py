"""Routers and experts against brute force, and what a token's result must not depend on."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jserve.model import moe as module
from jserve.model.arch import Clamped, Moe, Router
from jserve.model.moe import Tiles, gathered, route, routed, through, tiled

# ---- routers -----------------------------------------------------------------------------------

ROUTERS = {
    "mixtral": Router(normalise=True),
    "qwen": Router(),
    "granite": Router(choose="logits"),
    "gpt-oss": Router(choose="logits", logit_bias=True),
    "deepseek-v2": Router(groups=4, top_groups=2, scale=1.5),
    "deepseek-v3": Router(
        score="sigmoid",
        choice_bias=True,
        groups=4,
        top_groups=2,
        group_score="top2",
        normalise=True,
        scale=2.5,
    ),
    "llama4": Router(score="sigmoid", choose="logits", on_input=True),
}
T, X = 6, 3
COUNTS = {True: (3, 7, 8, 11), False: (8, 12, 20)}
"""Numbers of experts, without groups and with four of them; most are a multiple of nothing else."""
ROUTE = jax.jit(route, static_argnums=(0, 3))
HALVES = st.integers(-4, 4).map(lambda n: n / 2)
"""So few values that many are equal."""


def brute(
    router: Router, logits_E: np.ndarray, bias_E: np.ndarray
) -> tuple[list[int], list[float]]:
    """Experts and weights of one token, by sorting."""
    if router.logit_bias:
        logits_E = logits_E + bias_E
    scores_E = np.asarray(_scores(router, logits_E))
    value_E = scores_E if router.choose == "scores" else logits_E
    choice_E = value_E + bias_E if router.choice_bias else value_E

    def best_first(values: Any) -> list[int]:
        return sorted(range(len(values)), key=lambda i: (-values[i], i))

    groups = [sorted(g, reverse=True) for g in choice_E.reshape(router.groups, -1)]
    n = 2 if router.group_score == "top2" else 1
    kept = best_first([sum(g[:n]) for g in groups])[: router.top_groups]
    size = len(choice_E) // router.groups
    chosen = [e for e in best_first(choice_E) if e // size in kept][:X]
    if router.choose == "logits":
        weights = np.asarray(_scores(router, logits_E[chosen]), np.float64)
    else:
        weights = scores_E[chosen].astype(np.float64)
    weights = weights / weights.sum() if router.normalise else weights
    return chosen, list(weights * router.scale)


def _scores(router: Router, logits: np.ndarray) -> jax.Array:
    return (jax.nn.sigmoid if router.score == "sigmoid" else jax.nn.softmax)(logits)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_router_chooses_what_sorting_chooses(name: str, data: st.DataObject) -> None:
    """Equal ones among them; the lower number wins. Padding chooses nothing, whatever it is."""
    router = ROUTERS[name]
    E = data.draw(st.sampled_from(COUNTS[router.groups == 1]))
    logits_TE = np.array(data.draw(st.lists(HALVES, min_size=T * E, max_size=T * E)), np.float32)
    logits_TE = logits_TE.reshape(T, E)
    bias_E = np.array(data.draw(st.lists(HALVES, min_size=E, max_size=E)), np.float32)
    p = {"router": np.eye(E, dtype=np.float32), "router_bias": bias_E, "choice_bias": bias_E}
    real_T = np.array(data.draw(st.lists(st.booleans(), min_size=T, max_size=T)))
    expert_TX, weight_TX = map(np.asarray, ROUTE(router, p, logits_TE, X, real_T))
    for t in range(T):
        experts, weights = brute(router, logits_TE[t], bias_E)
        assert expert_TX[t].tolist() == (experts if real_T[t] else [E] * X)
        np.testing.assert_allclose(weight_TX[t], weights, rtol=1e-5)


def test_scores_that_are_equal_in_float32_do_not_decide_a_choice_by_logits() -> None:
    """The sigmoids of 18 and 20 are both 1."""
    x = jnp.array([[18.0, 20.0, 0.0]])
    p = {"router": jnp.eye(3)}
    by_logits = Router(score="sigmoid", choose="logits")
    assert route(by_logits, p, x, 1, np.array([True]))[0].tolist() == [[1]]


# ---- experts -----------------------------------------------------------------------------------

D, F = 24, 20
MOE = Moe(E=5, X=2, F=F)
FORMS = {"tiled": tiled, "gathered": gathered}


def params(moe: Moe, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {
        "expert_gate_up": (2 * moe.E, F, D),
        "expert_down": (moe.E, D, F),
        "expert_gate_up_bias": (2 * moe.E, F),
        "expert_down_bias": (moe.E, D),
    }
    return {
        name: jnp.asarray(0.3 * rng.standard_normal(shape), dtype) for name, shape in shapes.items()
    }


def outputs(form: str, moe: Moe, p: Any, x: Any, expert: Any, weight: Any) -> np.ndarray:
    """What ``routed`` gives with this form."""
    args = jnp.asarray(x), jnp.asarray(expert, jnp.int32), jnp.asarray(weight, jnp.float32)
    return np.asarray(_compiled(form, moe)(p, *args))


@lru_cache
def _compiled(form: str, moe: Moe) -> Any:
    return jax.jit(partial(through, FORMS[form], moe))


def expected(moe: Moe, p: Any, x_TD: np.ndarray, expert_TX: Any, weight_TX: Any) -> np.ndarray:
    """Token by token in float64, without the bias of the last product."""
    w = {name: np.asarray(value, np.float64) for name, value in p.items()}
    y_TD = np.zeros(x_TD.shape)
    for t, experts in enumerate(expert_TX):
        for e, weight in zip(experts, weight_TX[t], strict=True):
            if e >= moe.E:
                continue
            x = x_TD[t] * weight if moe.router.on_input else x_TD[t]
            gate, up = w["expert_gate_up"][2 * e] @ x, w["expert_gate_up"][2 * e + 1] @ x
            if moe.expert_bias:
                gate = gate + w["expert_gate_up_bias"][2 * e]
                up = up + w["expert_gate_up_bias"][2 * e + 1]
            y = w["expert_down"][e] @ _activated(moe.activation, gate, up)
            y_TD[t] += y if moe.router.on_input else y * weight
    return y_TD


def _activated(activation: str | Clamped, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if isinstance(activation, str):
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate / (1 + np.exp(-activation.alpha * gate))


def drawn(n: int, moe: Moe, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, different experts of each token, weights)."""
    rng = np.random.default_rng(seed)
    expert = np.argsort(rng.random((n, moe.E)), axis=1)[:, : moe.X]
    x = rng.standard_normal((n, D)).astype(np.float32)
    return x, expert, rng.random((n, moe.X)).astype(np.float32)


ROUTINGS = st.lists(
    st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), min_size=21, max_size=21
)
"""Experts of 21 tokens; number 5 is nowhere."""


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None)
@given(expert=ROUTINGS)
def test_experts_give_what_each_token_alone_gives(form: str, expert: list[list[int]]) -> None:
    p, (x, _, weight) = params(MOE), drawn(21, MOE)
    got = outputs(form, MOE, p, x, expert, weight)
    np.testing.assert_allclose(got, expected(MOE, p, x, expert, weight), atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "moe",
    [
        replace(MOE, expert_bias=True, activation=Clamped(alpha=1.7, limit=0.5)),
        replace(MOE, router=Router(score="sigmoid", choose="logits", on_input=True)),
    ],
)
def test_biases_clamps_and_weights_on_the_input(form: str, moe: Moe) -> None:
    p, (x, expert, weight) = params(moe), drawn(21, moe)
    got = outputs(form, moe, p, x, expert, weight)
    np.testing.assert_allclose(got, expected(moe, p, x, expert, weight), atol=1e-5)


def test_a_thousand_tokens_of_one_expert_are_all_served() -> None:
    moe, p, n = replace(MOE, X=1), params(MOE), 1000
    x, _, weight = drawn(n, moe)
    expert = np.full((n, 1), 3)
    got = outputs("tiled", moe, p, x, expert, weight)
    np.testing.assert_allclose(got, expected(moe, p, x, expert, weight), atol=1e-5)
    assert np.abs(got).sum(axis=1).min() > 0


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_experts_that_nobody_chose_are_not_read(form: str) -> None:
    p, (x, expert, weight) = params(MOE), drawn(21, MOE)
    expert[:] = [2, 0]
    expert[5:9] = MOE.E
    want = outputs(form, MOE, p, x, expert, weight)
    unread = {
        "expert_gate_up": p["expert_gate_up"].at[jnp.array([2, 3, 6, 7, 8, 9])].set(jnp.nan),
        "expert_down": p["expert_down"].at[jnp.array([1, 3, 4])].set(jnp.nan),
    }
    got = outputs(form, MOE, p | unread, x, expert, weight)
    np.testing.assert_array_equal(got, want)
    assert np.all(got[5:9] == 0), "padding tokens get nothing"
    assert np.abs(got).max() > 0.1


def test_padding_costs_no_tile() -> None:
    expert = jnp.array([[0, 3], [5, 5], [3, 1], [5, 5]])
    tiles = Tiles.of(expert, 5, 2)
    assert int(tiles.n) == 3
    assert tiles.expert_I[:3].tolist() == [0, 1, 3]
    assert tiles.order_A[:4].tolist() == [0, 5, 1, 4]
    assert int(Tiles.of(jnp.full((4, 2), 5), 5, 2).n) == 0


@partial(jax.jit, static_argnums=(1, 2))
def cut(expert_TX: jax.Array, E: int, Q: int) -> tuple[jax.Array, ...]:
    """(order_A, expert_I, first_I, n) of the tiles."""
    tiles = Tiles.of(expert_TX, E, Q)
    return tiles.order_A, tiles.expert_I, tiles.first_I, tiles.n


@settings(max_examples=30, deadline=None)
@given(expert=ROUTINGS, Q=st.sampled_from([1, 3, 16]))
def test_tiles_have_every_assignment_once(expert: list[list[int]], Q: int) -> None:
    flat = np.ravel(expert)
    order, expert_I, first_I, n = (x.tolist() for x in cut(np.array(expert), 5, Q))
    seen = []
    for first, e in list(zip(first_I, expert_I, strict=True))[:n]:
        rows = [a for a in order[first : first + Q] if flat[a] == e]
        assert rows, "an empty tile"
        seen += rows
    assert sorted(set(seen)) == sorted(np.flatnonzero(flat < 5)) == sorted(seen)


@pytest.mark.parametrize("size", [(24, 20), (256, 160)])
def test_a_token_has_the_same_bits_in_every_batch(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in buckets of several sizes, in another order and beside padding, by float32 on the CPU."""
    monkeypatch.setattr("tests.model.test_moe.D", size[0])
    monkeypatch.setattr("tests.model.test_moe.F", size[1])
    router, p = Router(normalise=True), params(MOE)
    p["router"] = jnp.asarray(np.random.default_rng(5).standard_normal((MOE.E, size[0])) * 0.3)
    x = drawn(70, MOE)[0]

    @jax.jit
    def one(p: Any, x: jax.Array, real: jax.Array) -> jax.Array:
        return routed(MOE, p, x, *route(router, p, x, MOE.X, real))

    def run(x: np.ndarray, bucket: int) -> np.ndarray:
        padded = np.resize(x, (bucket, x.shape[1]))
        return np.asarray(one(p, padded, np.arange(bucket) < len(x)))[: len(x)]

    whole = run(x, 70)
    for bucket in (2, 3, 16, 40, 128):
        n = min(bucket, 7)
        np.testing.assert_array_equal(run(x[:n], bucket), whole[:n], err_msg=f"bucket {bucket}")
    np.testing.assert_array_equal(run(x[::-1], 70)[::-1], whole)


# ---- programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2, 64])
def test_a_program_keeps_the_weights_of_one_expert_beside_the_parameters(tokens: int) -> None:
    """And changes the type of no array of all experts."""
    moe, width, ffn = Moe(E=24, X=2, F=768), 1024, 768
    shape = jax.ShapeDtypeStruct
    p = {
        "router": shape((24, width), jnp.float32),
        "expert_gate_up": shape((48, ffn, width), jnp.bfloat16),
        "expert_down": shape((24, width, ffn), jnp.bfloat16),
    }

    def one(p: Any, x: jax.Array) -> jax.Array:
        real = jnp.arange(tokens) < tokens - 1
        return routed(moe, p, x, *route(moe.router, p, x, moe.X, real))

    program = jax.jit(one).lower(p, shape((tokens, width), jnp.float32)).compile()
    of_one = 3 * ffn * width * 2
    assert program.memory_analysis().temp_size_in_bytes < 2 * of_one
    for line in program.as_text().splitlines():
        found = re.search(r"= (\w+)\[(48|24),(768|1024),(768|1024)\]", line)
        assert not found or found[1] in ("bf16", "u16"), line[:200]


def test_the_table_of_forms_covers_every_step() -> None:
    for forms in module.FORMS.values():
        bounds = [most for most, _ in forms]
        assert bounds[-1] is None
        assert sorted(n for n in bounds if n) == bounds[:-1]
    assert module._form("default", module.GATHER_MOST) is gathered
    assert module._form("default", module.GATHER_MOST + 1) is tiled
    assert module._form("cpu", 1) is tiled
