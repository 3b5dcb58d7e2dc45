"""Orthogonal matrices that spread what few channels hold over all of them."""

from __future__ import annotations

import numpy as np


def rotation(n: int, seed: int) -> np.ndarray:
    """float64[n, n]: a Hadamard matrix of the power of two in ``n``, times a random rotation of the rest, with random
    signs; the same for the same seed."""
    rng = np.random.default_rng(seed)
    power = n & -n
    rest, _ = np.linalg.qr(rng.standard_normal((n // power, n // power)))
    whole = np.kron(rest, hadamard(power))
    return rng.choice([-1.0, 1.0], n)[:, None] * whole


def hadamard(n: int) -> np.ndarray:
    """float64[n, n], orthogonal; ``n`` is a power of two."""
    assert n & (n - 1) == 0, n
    found = np.ones((1, 1))
    while found.shape[0] < n:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(n)
