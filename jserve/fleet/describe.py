"""Describes a scheduler to those who choose between several (``fleet.view``)."""

from __future__ import annotations

from jserve.fleet.view import View
from jserve.sched.scheduler import Scheduler
from jserve.types import Lane

ROWS = 8
"""Rows over which the cost of one more is averaged: programs come in sizes."""


def view_of(scheduler: Scheduler, n_taken: int, weights: str = "") -> View:
    """The cost of one more request now; ``n_taken`` were read so far."""
    resources, gate = scheduler.resources, scheduler.gate
    n, context, pace = len(resources.running), gate.n_context, gate.pace()
    seconds = scheduler.costs.seconds
    plain_s = seconds(n, 0, context)
    return View(
        weights=weights,
        n_taken=n_taken,
        n_rows=n + len(resources.waiting),
        wait_s={lane.value: _wait_s(scheduler, lane) for lane in Lane},
        prefill_token_s=max(0.0, pace.step_s - plain_s) / max(1.0, pace.chunk),
        row_s=max(0.0, seconds(n + ROWS, 0, context) - plain_s) / ROWS,
    )


def _wait_s(scheduler: Scheduler, lane: Lane) -> float:
    """Until all is computed that goes before a newcomer of ``lane``: what is begun, and of each lane as much
    as its weight gives it meanwhile."""
    resources = scheduler.resources
    waiting = resources.waiting
    own, weights = waiting.lanes[lane], waiting.weights
    tokens = sum([max(0, seq.given - seq.scheduled) for seq in resources.running])
    n = 0.0
    for name, other in waiting.lanes.items():
        if other.n:
            part = 1.0 if name == lane else own.n_tokens * weights[name] / weights[lane]
            part = part if name == lane else min(1.0, part / max(1, other.n_tokens))
            n, tokens = n + part * other.n, tokens + part * other.n_tokens
    free = max(0, resources.max_running - len(resources.running))
    return scheduler.gate.pace().wait_s(n + (free == 0), tokens)
