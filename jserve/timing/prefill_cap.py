"""Caps prefill tokens per step so that the step keeps the inter-token latency bound.

It owns the step's prefill cap and the one counter that keeps a long prefill from starving.

While sequences decode, a step may carry as many prefill tokens as keep its predicted time within
the bound on inter-token latency. If not even the smallest chunk fits, every ``PATIENCE``-th step
carries ``least`` tokens all the same: a prefill of n tokens that is first in its turn is done within
``PATIENCE * ceil(n / least)`` steps, whatever the bound. Idea of the chunk: Sarathi-Serve (Agrawal et
al., OSDI 2024), here with measured times instead of a fixed size.
"""

from __future__ import annotations

from jserve.config import SchedulerOptions
from jserve.ports import RunnerLimits
from jserve.timing.step_costs import MeasuredCosts

PATIENCE = 8
SHORTENED = 4
"""In overload the step's prefill is cut to this part."""


class PrefillCap:
    """Prefill tokens per step.

    Args:
        costs: predicts a step's seconds.
        most: tokens a step may carry at the very most.
        least: tokens that go even where nothing fits (a page).
        bound_s: longest step while sequences decode; 0 is off.
    """

    def __init__(self, costs: MeasuredCosts, *, most: int, least: int, bound_s: float) -> None:
        self.costs = costs
        self.most = most
        self.least = min(least, most)
        self.bound_s = bound_s
        self._rungs = _rungs(costs.rungs, self.least, most)
        self._passed_over = 0

    def tokens(self, n_decode: int, n_context: int, *, short: bool) -> int:
        """The cap of one step that has prefill to do beside ``n_decode`` rows.

        ``n_context`` is the longest row's tokens. ``short``: overload asks for shorter steps.
        """
        most = max(self.least, self.most // SHORTENED) if short else self.most
        if not n_decode or not self.bound_s:
            return most
        fits = self.fitting(n_decode, n_context, most)
        self._passed_over = 0 if fits else self._passed_over + 1
        if self._passed_over >= PATIENCE:
            self._passed_over, fits = 0, self.least
        return fits

    def fitting(self, n_decode: int, n_context: int, most: int) -> int:
        """The largest rung up to ``most`` whose step keeps the bound; 0 if none does."""
        for n in self._rungs:
            n = min(n, most)
            if self.costs.seconds(n_decode, n, n_context) <= self.bound_s:
                return n
        return 0


def cap_of(costs: MeasuredCosts, limits: RunnerLimits, options: SchedulerOptions) -> PrefillCap:
    """The cap within what the device takes and the options say."""
    most = min(limits.max_prefill_tokens, options.max_num_batched_tokens)
    most = min(most, options.max_prefill_tokens or most)
    return PrefillCap(costs, most=most, least=limits.page_size, bound_s=options.itl_bound_ms / 1000)


def _rungs(measured: tuple[int, ...], least: int, most: int) -> tuple[int, ...]:
    """Sizes to try, largest first: where the measured time steps up, else doublings of ``least``."""
    sizes = {n for n in measured if n < most} | {most}
    if not measured:
        n = least
        while n < most:
            sizes.add(n)
            n *= 2
    return tuple(sorted(sizes, reverse=True))
