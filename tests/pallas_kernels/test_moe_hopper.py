"""The experts of a layer by the kernel in the interpreter, beside XLA's loop over tiles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.arch import Clamped, Moe, Router
from jserve.model.attention import ExpertKernel, backend
from jserve.model.moe import GATHER_MOST, routed, through, tiled
from jserve.runner import selftest

D, F, E, X, T = 128, 64, 5, 2, 21
MIXTURES = {
    "plain": Moe(E=E, X=X, F=F),
    "gelu": Moe(E=E, X=X, F=F, activation="gelu_tanh"),
    "clamped, biases": Moe(E=E, X=X, F=F, activation=Clamped(alpha=1.7, limit=1.0), expert_bias=True),
    "weights on the input": Moe(E=E, X=X, F=F, router=Router(on_input=True)),
}  # fmt: skip


def params(moe: Moe, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Also biases that a mixture without them must not add."""
    rng = np.random.default_rng(4)

    def draw(*shape: int, size: float) -> Any:
        return jnp.asarray(rng.standard_normal(shape) * size, dtype)

    return {
        "expert_gate_up": draw(2 * E, moe.F, D, size=D**-0.5),
        "expert_down": draw(E, D, moe.F, size=moe.F**-0.5),
        "expert_gate_up_bias": draw(2 * E, moe.F, size=1.0),
    }


def step(seed: int = 0) -> tuple[Any, Any, Any]:
    """Tokens, the experts of each, their weights; expert 1 is nobody's, every fifth token padding."""
    rng = np.random.default_rng(seed)
    expert_TX = np.stack([np.delete(np.arange(E), 1)[rng.permutation(E - 1)[:X]] for _ in range(T)])
    expert_TX[::5] = E
    x_TD, weight_TX = rng.standard_normal((T, D)), rng.uniform(0.1, 1, (T, X))
    return jnp.float32(x_TD), jnp.int32(expert_TX), jnp.float32(weight_TX)


@pytest.mark.parametrize("name", MIXTURES)
def test_values(name: str) -> None:
    moe = MIXTURES[name]
    p, kernel = params(moe), backend("hopper").experts
    assert kernel is not None
    assert kernel.serves(moe, p)
    assert T * X > GATHER_MOST
    want = through(tiled, moe, p, *step())
    got = routed(moe, p, *step(), kernel)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())
    assert not np.asarray(got)[::5].any(), "padding adds something"


def test_what_the_kernel_does_not_take_is_xlas() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the kernel was called")

    kernel = backend("hopper").experts
    assert kernel is not None
    plain, odd = MIXTURES["plain"], Moe(E=E, X=X, F=48)
    assert not kernel.serves(odd, params(odd))
    assert not kernel.serves(Moe(E=E, X=X, F=F, activation="gelu"), params(plain))
    assert not kernel.serves(plain, params(plain, jnp.float32))
    watched = ExpertKernel(serves=kernel.serves, form=never)
    routed(plain, params(plain, jnp.float32), *step(), watched)
    few = tuple(x[: GATHER_MOST // X] for x in step())
    routed(plain, params(plain), *few, watched)
    with pytest.raises(AssertionError, match="was called"):
        routed(plain, params(plain), *step(), watched)


def test_the_test_at_start_sees_wrong_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from jserve.model import attn_hopper

    case = ("hopper", 64, 2, 16, "bfloat16", (D, F))
    assert selftest.differs(*case) == ""
    right = attn_hopper.hopper("cpu")
    assert right.experts is not None
    form = right.experts.form

    def wrong(*args: Any) -> Any:
        y_YD, row_TX = form(*args)
        return y_YD * 1.1, row_TX

    experts = dataclasses.replace(right.experts, form=wrong)
    changed = dataclasses.replace(right, experts=experts)
    monkeypatch.setattr(attn_hopper, "hopper", lambda _: changed)
    found = selftest.differs(*case)
    assert "experts differs" in found
    assert "decode" not in found
