"""The sums that calibration keeps of the activations that enter a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """Sums over tokens."""

    n: int
    hessian_DD: np.ndarray
    """float64: the sum of ``x x'``."""
    size_D: np.ndarray
    """float64: the sum of ``|x|``."""
    most_D: np.ndarray
    """float32: the largest ``|x|``."""

    @classmethod
    def empty(cls, D: int) -> InputStats:
        zeros = np.zeros(D)
        return cls(n=0, hessian_DD=np.zeros((D, D)), size_D=zeros, most_D=zeros.astype(np.float32))

    def with_more(self, x_TD: jax.Array, kept_T: jax.Array) -> InputStats:
        """With the tokens of ``x_TD`` where ``kept_T`` is true."""
        square_DD, size_D, most_D = (np.asarray(a) for a in _of_tokens(x_TD, kept_T))
        return InputStats(
            n=self.n + int(np.sum(kept_T)),
            hessian_DD=self.hessian_DD + square_DD,
            size_D=self.size_D + size_D,
            most_D=np.maximum(self.most_D, most_D),
        )

    def divided(self, s_D: np.ndarray) -> InputStats:
        """Of activations that are divided by ``s_D``."""
        return InputStats(
            n=self.n,
            hessian_DD=self.hessian_DD / np.outer(s_D, s_D),
            size_D=self.size_D / s_D,
            most_D=(self.most_D / s_D).astype(np.float32),
        )

    @property
    def mean_D(self) -> np.ndarray:
        """The mean of ``|x|``."""
        return self.size_D / max(self.n, 1)

    def error(self, off_ND: np.ndarray) -> float:
        """The sum of squared errors of the outputs of a matrix that is off by ``off_ND``."""
        return float(np.sum((off_ND @ self.hessian_DD) * off_ND))


@jax.jit
def _of_tokens(x_TD: jax.Array, kept_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_TD = jnp.where(kept_T[:, None], x_TD, 0.0)
    size_TD = jnp.abs(x_TD)
    square_DD = jnp.matmul(x_TD.T, x_TD, precision=jax.lax.Precision.HIGHEST)
    return square_DD, jnp.sum(size_TD, axis=0), jnp.max(size_TD, axis=0)
