"""Scales of the inputs of a matrix, which the matrix takes up and what is before it gives back: AWQ and SmoothQuant.

It owns their choice; ``weights.offline.folds`` puts them into a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jserve.weights.quant.methods.stats import InputStats

POWERS = 20
"""Powers of the mean activation that AWQ tries, from 0 (no scales) on."""
LEAST = 1e-4

Rounded = Callable[[np.ndarray], np.ndarray]
"""A matrix [N, D] as its numbers and scales give it back."""


def smooth_scales(
    most_D: np.ndarray, matrices: Sequence[np.ndarray], strength: float
) -> np.ndarray:
    """float32[D]: ``max |x| ** strength / max |w| ** (1 - strength)``: what the inputs are divided by.

    Args:
        most_D: the largest activations.
        matrices: [N, D] each, of the same inputs.
        strength: 0 leaves the difficulty to the activations, 1 moves all of it into the weights.
    """
    weight_D = np.max([np.abs(w_ND).max(axis=0) for w_ND in matrices], axis=0)
    usable = (most_D > 0) & (weight_D > 0)
    x_D, w_D = np.where(usable, most_D, 1.0), np.where(usable, weight_D, 1.0)
    return np.where(usable, x_D**strength / w_D ** (1.0 - strength), 1.0).astype(np.float32)


def awq_scales(
    stats: InputStats,
    size_D: np.ndarray,
    matrices: Sequence[np.ndarray],
    rounded: Sequence[Rounded],
) -> np.ndarray:
    """float32[D]: the power of the mean activations that leaves the least error of the outputs.

    Args:
        stats: of the inputs.
        size_D: the mean activations, where several inputs must have one scale the same for them.
        matrices: [N, D] each, of these inputs.
        rounded: of each matrix.
    """
    best_D, least = np.ones_like(size_D, np.float32), np.inf
    for i in range(POWERS):
        s_D = _balanced(size_D, i / POWERS)
        off = [f(w * s_D) / s_D - w for w, f in zip(matrices, rounded, strict=True)]
        error = sum(stats.error(x) for x in off)
        if error < least:
            best_D, least = s_D, error
    return best_D


def _balanced(size_D: np.ndarray, power: float) -> np.ndarray:
    """``size_D ** power`` around 1."""
    s_D = np.maximum(size_D, LEAST * max(float(size_D.max()), 1e-30)) ** power
    return (s_D / np.sqrt(s_D.max() * s_D.min())).astype(np.float32)
