"""The forms of ``largest`` that GPUs take, run on a CPU against ``lax.top_k``: ties, crowded parts, -inf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import sample as sampling, vocab_part
from jserve.model.adjust import CHANGES
from jserve.model.largest import BY_KERNEL, PARTS, by_parts, in_two_rounds
from jserve.model.view import BIAS, RANDOM, TRUNCATE
from jserve.sampling import SamplingParams
from tests.model.sample_reference import Context
from tests.model.sample_rig import draws_of, slots_of

E, V, N = 8, 5003, 64


def logits() -> np.ndarray:
    """Rows of all kinds: continuous, of many ties, mostly -inf, and with a part that holds 40 of the best."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((E, V)).astype(np.float32) * 3
    x[1] = np.round(x[1] * 2) / 2
    x[2] = np.round(x[2])
    x[3, rng.permutation(V)[: V - 30]] = -np.inf
    x[4, 3 : 3 + 40 * PARTS : PARTS] += 50
    x[5] = 1.0
    x[6, :40] += 20  # neighbours
    return x


def test_what_is_sure_of_the_parts_is_what_top_k_finds() -> None:
    x = logits()
    best_En, sure_E = map(np.asarray, by_parts(jnp.asarray(x), N))
    want_En = np.asarray(jax.lax.top_k(x, N)[0])
    for got, want, n in zip(best_En, want_En, sure_E, strict=True):
        np.testing.assert_array_equal(got[:n], want[:n])
    assert sure_E[4] == BY_KERNEL, "of the crowded part no more than 16 are known"
    assert [sure_E[i] for i in (0, 3, 5, 6, 7)] == [N] * 5
    assert (best_En[4] != want_En[4]).any(), "or nothing here depends on what is sure"


@pytest.mark.parametrize("n", [17, 20, 32])
def test_two_rounds_are_top_k(n: int) -> None:
    x = jnp.asarray(np.delete(logits(), 3, axis=0))
    for got, want in zip(in_two_rounds(x, n), jax.lax.top_k(x, n), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_threshold_by_parts_is_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a row's best lie in one part, whose rest is then searched for."""
    limits = [
        {"top_k": k, "top_p": p, "min_p": m}
        for k in (0, 5, 17, 30, 64, 70)
        for p in (1.0, 0.5, 0.95, 0.999)
        for m in (0.0, 0.01)
    ]
    rows = [(SamplingParams(**kw), Context(prompt=[0], output=[])) for kw in limits]
    draws, _ = draws_of(rows)
    whole, parted = jax.jit(sampling.threshold), jax.jit(lambda *a: sampling.threshold(*a))
    for i in range(E):
        x = np.broadcast_to(logits()[i], (len(rows), V))
        scaled_EV = jnp.asarray(x - x.max(1, keepdims=True))
        want = np.asarray(whole(scaled_EV, draws))
        with monkeypatch.context() as patch:
            patch.setattr(vocab_part.local, "largest", by_parts)
            got = np.asarray(parted(scaled_EV, draws))
        kept = [(np.asarray(scaled_EV) >= t[:, None]).sum(1) for t in (got, want)]
        # A mass within rounding of top_p may move the border by a token where they lie densely.
        apart = np.abs(kept[0] - kept[1])
        assert not apart[[r for r, kw in enumerate(limits) if kw["top_p"] == 1.0]].any(), i
        assert (apart <= np.maximum(1, kept[1] // 1000)).all(), (i, kept)


def test_a_step_that_only_draws_gives_no_logits_back() -> None:
    """A branch that returns its operand copies [E, V] on every device."""
    rows = [(SamplingParams(temperature=0.9), Context(prompt=[1], output=[])) for _ in range(E)]
    draws, _ = draws_of(rows)
    args = (jnp.asarray(logits()), draws, slots_of(rows, V))

    def copies(flags: int) -> int:
        flat, _ = jax.tree.flatten((*args, jnp.int32(flags)))
        closed = jax.make_jaxpr(sampling.sample)(*args, jnp.int32(flags))
        return _given_back(closed.jaxpr, closed.consts, flat)[1]

    assert copies(RANDOM) == 0
    assert copies(RANDOM | BIAS) == 3, "the walk sees the changes that are not made"
    assert CHANGES & (RANDOM | TRUNCATE) == 0


def _given_back(jaxpr: Any, consts: Any, args: Any) -> tuple[list[Any], int]:
    """Outputs, and how often a branch that is taken returns an operand of [E, V]."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if hasattr(v, "val") else env[v]

    n = 0
    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name == "cond":
            inner = eqn.params["branches"][int(values.pop(0))]
            back = [v for v in inner.jaxpr.outvars if v in inner.jaxpr.invars]
            n += sum(v.aval.shape == (E, V) for v in back)
        if inner is not None and eqn.primitive.name in ("cond", "jit", "pjit"):
            out, more = _given_back(inner.jaxpr, inner.consts, values)
            n += more
        else:
            out = eqn.primitive.bind(*values, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars], n
