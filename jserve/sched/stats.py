"""The scheduler's gauges and counters, for metrics and admission.

Owns their names. Must not change anything it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jserve.sched.gate import next_level
from jserve.types import Lane, SeqState, Sequence

if TYPE_CHECKING:
    from jserve.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedStats:
    """Gauges and counters (since start) for metrics and admission."""

    waiting: int
    preempted: int
    running: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Pages of the tree that no sequence uses: they count as free for admission."""
    cache_query_tokens: int
    """Counter: tokens of admitted sequences that were looked up in the prefix cache."""
    cache_hit_tokens: int
    preemptions: int
    finished: int
    waiting_tokens: int = 0
    """Prompt tokens of those who wait for their first admission."""
    overload_level: int = 0
    """0 calm, 1 bulk is shed, 2 and prefills are short, 3 and standard is shed."""
    overload_load: float = 0.0
    """How full the queue is; 1 is full."""
    lanes: Mapping[str, int] = field(default_factory=dict)
    """``<lane>_<name>``: gauges waiting and running; counters (since start) of ``LaneCounts``."""


class LaneCounts:
    """Counters of one lane since the start."""

    __slots__ = ("cached_tokens", "expired", "finished", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.finished = self.expired = 0

    def ended(self, seq: Sequence) -> None:
        """``seq`` is over, for whatever reason."""
        self.finished += 1
        self.output_tokens += seq.n_output
        if seq.charged is not None:
            self.prompt_tokens += seq.n_prompt
            self.cached_tokens += seq.n_cached


def stats_of(scheduler: Scheduler) -> SchedStats:
    """All of them, as of now."""
    floor, gate = scheduler.floor, scheduler.gate
    load = gate.load()
    preempted = sum(1 for seq in floor.waiting if seq.state is SeqState.PREEMPTED)
    return SchedStats(
        waiting=len(floor.waiting) - preempted,
        preempted=preempted,
        running=len(floor.running),
        pages_total=floor.cache.pool.n_usable,
        pages_free=floor.cache.pool.n_free,
        pages_cached=floor.cache.tree.n_evictable,
        cache_query_tokens=floor.n_looked_up,
        cache_hit_tokens=floor.n_hit,
        preemptions=floor.n_preemptions,
        finished=sum(counts.finished for counts in scheduler.counts.values()),
        waiting_tokens=floor.waiting.n_tokens,
        overload_level=next_level(gate.level, load),
        overload_load=load,
        lanes=_lanes(scheduler),
    )


def counters_of(scheduler: Scheduler) -> dict[str, float]:
    """Those that are not there in every build: tiers, handles, sessions, waits for a prefix."""
    floor = scheduler.floor
    tier = floor.cache.tier
    tiers = {} if tier is None else tier.counters() | floor.swapping.counters()
    return {
        **floor.keeping.counters(),
        **(scheduler.drafting.counters() if scheduler.drafting.on else {}),
        **tiers,
        "step_faults_total": float(scheduler.trials.n_faults),
        "steps_failed_in_row": float(scheduler.trials.n_in_row),
        "step_slowness": scheduler.costs.slowness,
        "sequences_nonfinite_total": float(scheduler.n_unsound),
        "requests_guilty_total": float(scheduler.trials.n_guilty),
        "requests_unschedulable_total": float(scheduler.impasse.n_given_up),
        "prefix_waits_total": float(scheduler.leaders.n_waits),
        "prefill_tokens_total": float(scheduler.n_prefilled),
    }


def _lanes(scheduler: Scheduler) -> dict[str, int]:
    values = {}
    for lane in Lane:
        values[f"{lane}_waiting"] = scheduler.floor.waiting.lanes[lane].n
        values[f"{lane}_running"] = scheduler.floor.n_running[lane]
        values[f"{lane}_refused"] = scheduler.gate.n_refused[lane]
        counts = scheduler.counts[lane]
        values |= {f"{lane}_{name}": getattr(counts, name) for name in LaneCounts.__slots__}
    return values
