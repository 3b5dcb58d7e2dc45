"""One table of mixtures of experts: each row is proved in the interpreter and compiled for sm_90a."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import Activation, Experts, ExpertSpec

CLAMPED = Activation(name="clamped", alpha=1.702, limit=1.5)
GELU = Activation(name="gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """T tokens choose X of E experts of F in a model of D; ``chosen`` says how."""

    T: int
    X: int
    E: int
    D: int = 128
    F: int = 64
    activation: Activation = Activation()
    bias: bool = False
    scaled: bool = False
    dtype: Any = jnp.bfloat16
    chosen: str = "random"
    tune: Any = None

    def spec(self, interpret: Any = None) -> ExpertSpec:
        return ExpertSpec(activation=self.activation, tune=self.tune, interpret=interpret)


MIXTURES: dict[str, Mixture] = {
    "one token": Mixture(T=1, X=2, E=8),
    "scaled input": Mixture(T=5, X=2, E=4, scaled=True),
    "more tokens than a tile": Mixture(T=13, X=2, E=3, F=128),
    "ties": Mixture(T=9, X=3, E=5, chosen="the first", dtype=jnp.float16),
    "all in one expert": Mixture(T=21, X=1, E=6, chosen="the last"),
    "empty experts and nowhere": Mixture(T=17, X=4, E=7, chosen="some nowhere"),
    "nobody": Mixture(T=3, X=2, E=4, chosen="nowhere"),
    "clamped, biases": Mixture(T=5, X=2, E=4, activation=CLAMPED, bias=True),
    "gelu, bias": Mixture(T=4, X=1, E=3, activation=GELU, bias=True),
    "blocks that overlap": Mixture(
        T=6, X=2, E=3, D=192, F=192, bias=True,
        tune={"columns": 64, "warpgroups": 2, "parts": 2, "depth": 64},
    ),
    "two chunks of the result": Mixture(T=40, X=2, E=2, tune={"columns": 64, "warpgroups": 1}),
    "a ring that goes round": Mixture(T=30, X=1, E=4, D=384, tune={"stages": 2, "sms": 1, "panel": 2}),
    "deep reads, three warpgroups": Mixture(
        T=4, X=2, E=3, D=256, F=192, tune={"depth": 128, "warpgroups": 3, "parts": 1, "stages": 2}
    ),
    "wide tiles": Mixture(T=150, X=1, E=2, tune={"columns": 128, "depth": 64}),
}  # fmt: skip


def choices(m: Mixture, seed: int = 0) -> Any:
    """int32[T, X]; no token chooses an expert twice."""
    rng = np.random.default_rng([seed, m.T, m.E])
    chosen = np.stack([rng.permutation(m.E)[: m.X] for _ in range(m.T)])
    if m.chosen == "the first":
        chosen = np.tile(np.arange(m.X), (m.T, 1))
    if m.chosen == "the last":
        chosen = np.full((m.T, m.X), m.E - 1)
    if m.chosen == "some nowhere":
        chosen = np.where(chosen == 2, m.E + 1, chosen)  # an expert of another device
        chosen[::3] = m.E  # padding
        chosen[1, 0] = -1
    if m.chosen == "nowhere":
        chosen[:] = m.E
    return jnp.asarray(chosen, jnp.int32)


def tokens(m: Mixture, expert_TX: Any, seed: int = 0) -> Any:
    """Those that go nowhere are NaN."""
    rng = np.random.default_rng([seed, m.T, m.D])
    x = rng.standard_normal((m.T, m.D)).astype(np.float32)
    x[~np.asarray((expert_TX >= 0) & (expert_TX < m.E)).any(1)] = np.nan
    return jnp.asarray(x, m.dtype)


def experts(m: Mixture, expert_TX: Any, seed: int = 0) -> Experts:
    """Those that nobody chose are NaN."""
    rng = np.random.default_rng([seed, m.E, m.F])
    idle = ~np.isin(np.arange(m.E), np.asarray(expert_TX))

    def draw(*shape: int, size: float, dtype: Any) -> Any:
        x = rng.standard_normal((m.E, *shape)).astype(np.float32) * size
        x[idle] = np.nan
        return jnp.asarray(x, dtype)

    weights = {
        "gate_up_E2FD": draw(2, m.F, m.D, size=m.D**-0.5, dtype=m.dtype),
        "down_EDF": draw(m.D, m.F, size=m.F**-0.5, dtype=m.dtype),
    }
    if m.bias:
        weights["gate_up_bias_E2F"] = draw(2, m.F, size=1.0, dtype=m.dtype)
        weights["down_bias_ED"] = draw(m.D, size=1.0, dtype=jnp.float32)
    return Experts(**weights)


def scales(m: Mixture) -> Any:
    """float32[T, X], or None where tokens are not scaled."""
    rng = np.random.default_rng([m.T, m.X])
    return jnp.asarray(rng.uniform(0.1, 2, (m.T, m.X)), jnp.float32) if m.scaled else None
