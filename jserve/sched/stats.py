"""The scheduler's gauges and counters, for metrics and admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jserve.sched.admission.gate import AdmissionGate, next_level
from jserve.sched.resources import Resources
from jserve.types import Lane, SeqState, Sequence


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
    """The fullness of the queue; 1 is full."""
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


def stats_of(
    resources: Resources, gate: AdmissionGate, counts: Mapping[Lane, LaneCounts]
) -> SchedStats:
    """All of them, as of now."""
    load = gate.load()
    preempted = sum(1 for seq in resources.waiting if seq.state is SeqState.PREEMPTED)
    return SchedStats(
        waiting=len(resources.waiting) - preempted,
        preempted=preempted,
        running=len(resources.running),
        pages_total=resources.cache.pool.n_usable,
        pages_free=resources.cache.pool.n_free,
        pages_cached=resources.cache.n_evictable,
        cache_query_tokens=resources.n_looked_up,
        cache_hit_tokens=resources.n_hit,
        preemptions=resources.n_preemptions,
        finished=sum(lane.finished for lane in counts.values()),
        waiting_tokens=resources.waiting.n_tokens,
        overload_level=next_level(gate.level, load),
        overload_load=load,
        lanes=_lanes(resources, gate, counts),
    )


def _lanes(
    resources: Resources, gate: AdmissionGate, counts: Mapping[Lane, LaneCounts]
) -> dict[str, int]:
    values = {}
    for lane in Lane:
        values[f"{lane}_waiting"] = resources.waiting.lanes[lane].n
        values[f"{lane}_running"] = resources.n_running[lane]
        values[f"{lane}_refused"] = gate.n_refused[lane]
        values |= {f"{lane}_{name}": getattr(counts[lane], name) for name in LaneCounts.__slots__}
    return values
