"""Says when a simulated layout cannot win any more, so that a search need not simulate it to its end.

Each bound is certain: what is late among ``n`` requests only grows, and no step is shorter than one of one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jserve.sim.records import Done, Record
from jserve.sim.report import Slo
from jserve.sim.trace import TraceItem

GOOD = 0.99
"""Share of requests that have to keep the targets."""
ROUNDED_MS = 0.001
"""Reports round to it, so less is no difference."""


def serves(n_good: int, n: int) -> bool:
    """So many good requests are enough of ``n``; the share is rounded as in reports."""
    return round(n_good / n, 4) >= GOOD


def too_slow(step_s: float, trace: Sequence[TraceItem], slo: Slo) -> str:
    """The reason why no engine whose steps take ``step_s`` or longer keeps enough targets; empty: one may."""
    n_missed = sum(_least_target(item, slo) < step_s for item in trace)
    if serves(len(trace) - n_missed, len(trace)):
        return ""
    return f"a step of one token takes {step_s * 1e3:.2f} ms, beyond the targets of {n_missed} requests"


def _least_target(item: TraceItem, slo: Slo) -> float:
    """Seconds; the first token takes a whole step, and so does each later one."""
    ttft, tpot = slo.targets(item)
    n_drawn = sum(piece[2] for piece in item.outputs[0])
    if item.max_tokens is not None:
        n_drawn = min(n_drawn, item.max_tokens)
    return min(ttft, tpot) if n_drawn > 1 else ttft if n_drawn else math.inf


@dataclass(slots=True, kw_only=True)
class Bounds:
    """A ``sim.simulate.Watch`` of a load whose clients send once."""

    slo: Slo
    n: int
    """Requests of the load."""
    latest_ms: float = math.inf
    """First tokens of the layout that is to be beaten: 99 % of them come until then, as rounded in reports."""
    n_over: int = 0
    """Requests that are over."""
    missed: set[str] = field(default_factory=set)
    """Requests that cannot keep their targets."""
    n_late: int = 0
    """First tokens after ``latest_ms``."""
    why: str = ""
    """The reason why the layout cannot win; empty: it can."""

    @property
    def enough(self) -> bool:
        return bool(self.why)

    def token(self, record: Record) -> None:
        times = record.times[0]
        if self.slo.missed(record):
            self._miss(record.item.id)
        if len(times) == 1:
            self._first(times[0] - record.at)

    def end(self, done: Done) -> None:
        self.n_over += 1
        if not self.slo.kept(done):
            self._miss(done.id)

    def _first(self, seconds: float) -> None:
        self.n_late += seconds * 1e3 > self.latest_ms + ROUNDED_MS
        # The 99th percentile lies between two ranks: once the lower one is late, so is it.
        if self.n_late >= self.n - math.floor(0.99 * (self.n - 1)):
            self.why = f"its last percent of first tokens comes after {self.latest_ms:.0f} ms"

    def _miss(self, name: str) -> None:
        self.missed.add(name)
        if not serves(self.n - len(self.missed), self.n):
            n = len(self.missed)
            self.why = f"{n} requests missed their targets when {self.n_over} of {self.n} were over"
