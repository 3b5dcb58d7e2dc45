"""Percentiles of times, linear between ranks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

POINTS = (50, 90, 99)


def spread(seconds: Seq[float] | np.ndarray) -> dict[str, float] | None:
    """p50, p90, p99 and max in milliseconds; None for no values."""
    if not len(seconds):
        return None
    values = np.percentile(np.asarray(seconds, float), [*POINTS, 100])
    names = [*(f"p{q}" for q in POINTS), "max"]
    return {name: round(float(v) * 1e3, 3) for name, v in zip(names, values, strict=True)}
