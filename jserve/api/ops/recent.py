"""A histogram that also keeps its latest samples, for current percentiles.

A sample costs one append to a ring, whether anybody looks or not; sorting is paid for by the one who asks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from prometheus_client import Histogram

KEPT = 8192
WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Nearest-rank percentiles of ``n`` samples; None where there is none."""

    n: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Recent:
    """Passes samples on to ``histogram`` and keeps the latest ``kept`` with their times."""

    def __init__(self, histogram: Histogram, kept: int = KEPT) -> None:
        self._histogram = histogram
        self._samples: deque[tuple[float, float]] = deque(maxlen=kept)

    def observe(self, amount: float) -> None:
        self._histogram.observe(amount)
        self._samples.append((time.monotonic(), amount))

    def percentiles(self, now: float, window_s: float = WINDOW_S) -> Percentiles:
        """Of the samples of the last ``window_s`` seconds before ``now`` that are still kept."""
        late = sorted(value for at, value in self._samples if at >= now - window_s)
        if not late:
            return Percentiles(n=0)
        p50, p90, p99 = (late[math.ceil(p * len(late)) - 1] for p in (0.5, 0.9, 0.99))
        return Percentiles(n=len(late), p50=p50, p90=p90, p99=p99)
