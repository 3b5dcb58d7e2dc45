"""Describes an engine to those who choose between several (``engine.view``)."""

from __future__ import annotations

import msgspec

from jserve.engine.engine import Engine
from jserve.engine.view import View
from jserve.engine.wire import Stats
from jserve.fleet.page_log import Both, PageLog
from jserve.kv.cache import PageListener
from jserve.sched.scheduler import Scheduler
from jserve.types import Lane

ROWS = 8
"""Rows over which the cost of one more is averaged: programs come in sizes."""


EVERY_S = 0.05
"""Between two views of an engine that works."""


def describe(engine: Engine, listener: PageListener | None = None) -> None:
    """From now on the statistics of ``engine`` hold its view and what happened to its pages, of which ``listener``
    hears too."""
    pages = PageLog()
    cache = engine.scheduler.resources.cache
    cache.listener = pages if listener is None else Both(pages, listener)

    def described(stats: Stats) -> Stats:
        view = view_of(engine.scheduler, engine.n_read, engine.weights, engine.page_s)
        return msgspec.structs.replace(stats, view=view, pages=pages.take())

    engine.describer, engine.stats_every_s = described, EVERY_S


def view_of(scheduler: Scheduler, n_taken: int, weights: str = "", page_s: float = 0.0) -> View:
    """The cost of one more request now; ``n_taken`` were read so far, and ``page_s`` is that of the engine."""
    resources, gate = scheduler.resources, scheduler.gate
    n, context, pace = len(resources.running), gate.n_context, gate.pace()
    seconds = scheduler.costs.seconds
    plain_s = seconds(n, 0, context)
    return View(
        weights=weights,
        slides=bool(resources.cache.parts[0].window),
        n_taken=n_taken,
        n_rows=n + len(resources.waiting),
        n_before=max(0, n + len(resources.waiting) + 1 - resources.max_running),
        wait_s={lane.value: _wait_s(scheduler, lane) for lane in Lane},
        prefill_token_s=max(0.0, pace.step_s - plain_s) / max(1.0, pace.chunk),
        row_s=max(0.0, seconds(n + ROWS, 0, context) - plain_s) / ROWS,
        token_s=scheduler.demand.token_s(context),
        page_s=resources.swap_policy.page_move_s + page_s,
        step_s=max(pace.step_s, plain_s),
        chunk=pace.chunk,
    )


def _wait_s(scheduler: Scheduler, lane: Lane) -> float:
    """Until all is computed that goes before a newcomer of ``lane``: what is begun, and of each lane as much
    as its weight gives it meanwhile.

    Prompts that wait count less what the cache has of them, and where slots or pages are what they wait for, all their
    steps do. The time between the last ends would say how long those took that are gone: with prefixes that are found
    by now, a multiple.
    """
    resources, demand = scheduler.resources, scheduler.demand
    waiting, pace = resources.waiting, scheduler.gate.pace()
    own, weights = waiting.lanes[lane], waiting.weights
    begun = sum([max(0, seq.given - seq.scheduled) for seq in resources.running])
    full = len(resources.running) >= resources.max_running
    n = n_tokens = 0.0
    for name, other in waiting.lanes.items():
        if other.n:
            part = 1.0 if name == lane else own.n_tokens * weights[name] / weights[lane]
            part = part if name == lane else min(1.0, part / max(1, other.n_tokens))
            n, n_tokens = n + part * other.n, n_tokens + part * other.n_tokens
    prefill_s = (begun + demand.new_share * n_tokens) * pace.step_s / pace.chunk
    work_s = demand.waiting_s(n, n_tokens, lane)
    if full:  # and one more has to end
        given = sum([seq.given for seq in resources.running]) / len(resources.running)
        each_s = work_s / n if n else pace.gap_s or demand.waiting_s(1.0, given, lane)
        work_s += each_s
    return max(prefill_s, work_s)
