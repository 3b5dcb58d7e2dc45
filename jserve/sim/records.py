"""Records what simulated clients observe: one record per request."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from jserve.sim.trace import TraceItem
from jserve.types import Finish, Sequence


class Done(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that is over. Times in seconds; None for what never came."""

    id: str
    lane: str
    tenant: str
    at: float
    """The time at which its client first sent it."""
    end: float
    ttft: float | None
    tpot: float | None
    """Mean time between tokens after the first, of choice 0."""
    n_prompt: int
    n_cached: int
    n_output: int
    n_preempted: int
    n_sent: int
    finish: str
    error: str | None
    refused: bool
    """It never ran."""
    n_resumed: int
    """Times that it went on at another engine because its own was lost."""
    ttft_deadline: float | None
    tpot_deadline: float | None
    deadline: float | None


@dataclass(slots=True, eq=False)
class Record:
    """A request on its way."""

    item: TraceItem
    at: float
    times: list[list[float]]
    """Per choice, when each output with tokens came: an output has one token."""
    open: set[int]
    """Choices without an end."""
    n_sent: int = 0
    attempt: int = 0
    """Times that it was moved to another engine; outputs of earlier attempts do not count."""
    n_idle: int = 0
    """Attempts in a row that were lost with their engine and had told nothing."""
    n_resumed: int = 0
    n_cached: int = 0
    seq: Sequence | None = None
    finish: Finish | None = None
    error: str | None = None
    refused: bool = False


@dataclass(slots=True)
class Records:
    """All requests of a run."""

    open: dict[str, Record] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    gaps: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Per lane, seconds between the outputs of each choice."""
    resumed_gaps: list[np.ndarray] = field(default_factory=list)
    """Of each request that went on at another engine, seconds between its outputs."""
    n_unsent: int = 0
    """Later turns of sessions that failed before."""

    def sent(self, item: TraceItem, at: float) -> None:
        """A client sends (again); the first time counts."""
        record = self.open.get(item.id)
        if record is None:
            record = self.open[item.id] = Record(item, at, [], set())
        record.open = {*range(len(item.outputs))}
        record.times = [[] for _ in item.outputs]
        record.n_sent += 1
        record.error, record.refused = None, False

    def close(self, record: Record, now: float) -> None:
        """Its last choice ended."""
        item, times = record.item, record.times[0]
        del self.open[item.id]
        gaps = [np.diff(np.array(t)).astype(np.float32) for t in record.times if len(t) > 1]
        if gaps:
            self.gaps.setdefault(item.lane.value, []).extend(gaps)
        if gaps and record.n_resumed:
            self.resumed_gaps.append(np.concatenate(gaps))
        span = times[-1] - times[0] if len(times) > 1 else None
        self.done.append(
            Done(
                id=item.id,
                lane=item.lane.value,
                tenant=item.tenant,
                at=record.at,
                end=now,
                ttft=times[0] - record.at if times else None,
                tpot=None if span is None else span / (len(times) - 1),
                n_prompt=item.n_prompt,
                n_cached=record.n_cached,
                n_output=sum(map(len, record.times)),
                n_preempted=0 if record.seq is None else record.seq.n_preempted,
                n_sent=record.n_sent,
                finish=record.finish.value if record.finish else "",
                error=record.error,
                refused=record.refused,
                n_resumed=record.n_resumed,
                ttft_deadline=seconds_of(item.ttft_deadline_ms),
                tpot_deadline=seconds_of(item.tpot_deadline_ms),
                deadline=seconds_of(item.deadline_ms),
            )
        )


def seconds_of(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
