"""Estimates time to first token and to last token of an arriving request.

The queue is taken as a fluid: while a request and the work before it in its own tenant's queue
(``mine`` tokens) is served, every other tenant of the lane gets as much, and every other lane gets
its weight's part, each no more than it has waiting. The work before it, over the pace at which
prompts are computed beside those who run, is the wait; if slots lack, it is at least the wait for
so many sequences to end. A request that needs a vocab row also waits for one (``AdmissionGate``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from jserve.sched import policy
from jserve.sched.admission.queue import WaitQueue
from jserve.timing.prefill_cap import PATIENCE, PrefillCap
from jserve.types import Request, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The engine's current pace."""

    step_s: float
    """Seconds of a step that decodes for all who run and carries ``chunk`` prefill tokens."""
    chunk: float
    gap_s: float
    """Mean seconds between two ends of sequences that held a slot."""
    n_free: int
    """Slots that are free."""

    def wait_s(self, n_seqs: float, n_tokens: float) -> float:
        """Seconds until ``n_seqs`` sequences with ``n_tokens`` to compute have been served."""
        for_slots = max(0.0, n_seqs - self.n_free) * self.gap_s
        return max(n_tokens * self.step_s / self.chunk, for_slots)


def pace_of(cap: PrefillCap, n_running: int, n_context: int, *, gap_s: float, n_free: int) -> Pace:
    """The pace with ``n_running`` who decode, the longest at ``n_context`` tokens."""
    chunk: float = cap.most
    if cap.bound_s and n_running:
        chunk = cap.fitting(n_running, n_context, cap.most) or cap.least / PATIENCE
    step_s = cap.costs.seconds(n_running, max(1, round(chunk)), n_context)
    return Pace(step_s=step_s, chunk=chunk, gap_s=gap_s, n_free=n_free)


def ahead(queue: WaitQueue, request: Request, due: float) -> tuple[float, float]:
    """(sequences, prompt tokens) served before ``request``, if it arrives now; see above."""
    lane = queue.lanes[request.lane]
    mine = lane.tenants.get(request.tenant)
    before = mine.below((request.priority, due, inf)) if mine is not None else []
    n_tokens = len(request.prompt_ids) + sum([len(seq.tokens) for seq in before])
    n, tokens = len(before) + float(len(lane.back)), n_tokens - len(request.prompt_ids)
    for tenant, has in lane.tokens.items():
        if tenant != request.tenant:
            part = min(1.0, n_tokens / max(1, has))
            n, tokens = n + part * len(lane.tenants[tenant]), tokens + part * has
    return _with_lanes(queue, request, n, tokens)


def _with_lanes(queue: WaitQueue, request: Request, n: float, tokens: float) -> tuple[float, float]:
    """Add what other lanes get while this lane serves ``tokens`` and the request itself."""
    served, weights = tokens + len(request.prompt_ids), queue.weights
    for name, lane in queue.lanes.items():
        if name != request.lane and lane.n:
            has = max(1, lane.n_tokens)
            part = min(1.0, served * weights[name] / weights[request.lane] / has)
            n, tokens = n + part * lane.n, tokens + part * lane.n_tokens
    return n, tokens


def pushed_late(
    queue: WaitQueue, request: Request, due: float, pace: Pace, n: float, tokens: float, now: float
) -> Sequence | None:
    """The sequence behind ``request`` that would miss its first token's deadline because of it.

    Looks at the tenant's own line, in which an earlier deadline goes first. ``n`` sequences with
    ``tokens`` are ahead of ``request``. None if all who can be in time still are.
    """
    mine = queue.lanes[request.lane].tenants.get(request.tenant)
    own = len(request.prompt_ids)
    for seq in mine.beyond((request.priority, due, inf)) if mine is not None else ():
        n, tokens = n + 1, tokens + len(seq.tokens)
        if seq.request.ttft_deadline_ms is not None:
            left = seq.due - now - pace.step_s
            if pace.wait_s(n, tokens) <= left < pace.wait_s(n + 1, tokens + own):
                return seq
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds from now: to the first token, between tokens, to the last token."""

    ttft_s: float
    tpot_s: float
    total_s: float


def alone(cap: PrefillCap, n_new: int, n_out: int, n_context: int) -> Forecast:
    """On an idle server: nothing can make it faster than this."""
    n_full, rest = divmod(n_new, cap.most)
    seconds = cap.costs.seconds
    ttft_s = n_full * seconds(0, cap.most, n_context) + seconds(0, rest, n_context)
    tpot_s = seconds(1, 0, n_context)
    return Forecast(ttft_s=ttft_s, tpot_s=tpot_s, total_s=ttft_s + max(0, n_out - 1) * tpot_s)


def behind(
    cap: PrefillCap,
    pace: Pace,
    wait_s: float,
    n_running: int,
    n_new: int,
    n_out: int,
    n_context: int,
) -> Forecast:
    """After ``wait_s`` in the queue, beside ``n_running`` who decode.

    Where others wait too, every step carries a whole chunk: its tokens come a full step apart. One
    step more is that under way.
    """
    chunk = max(1, round(pace.chunk))
    n_full, rest = divmod(n_new, chunk)
    if wait_s > 0:
        ttft_s = wait_s + (n_full + (rest > 0) + 1) * pace.step_s
        tpot_s = cap.costs.seconds(n_running + 1, chunk, n_context)
    else:
        last_s = cap.costs.seconds(n_running, rest, n_context) if rest else 0.0
        ttft_s = n_full * pace.step_s + last_s
        tpot_s = cap.costs.seconds(n_running + 1, 0, n_context)
    return Forecast(ttft_s=ttft_s, tpot_s=tpot_s, total_s=ttft_s + max(0, n_out - 1) * tpot_s)


class FinishIntervals:
    """Mean seconds between two ends of sequences that held a slot, while there was work."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """0 until one has ended, which promises too much rather than too little."""
        self._last = 0.0
        self._n = 0

    def busy_from(self, now: float) -> None:
        """Work came to an idle engine: the pause before does not count."""
        self._last = now

    def ended(self, now: float) -> None:
        gap, self._last = max(0.0, now - self._last), now
        self._n += 1
        self.mean_s += max(0.1, 1 / self._n) * (gap - self.mean_s)


def due_times(request: Request, now: float) -> tuple[float | None, float | None]:
    """(first token by, last token by) in scheduler seconds; None where nothing is asked.

    They count from the arrival, or from ``now`` where the arrival is unknown or of another clock.
    """
    start = request.arrival if 0 < request.arrival <= now else now
    first, last = request.ttft_deadline_ms, request.deadline_ms
    return (
        None if first is None else start + first / 1000,
        None if last is None else start + last / 1000,
    )


def due(request: Request, now: float) -> float:
    """``Sequence.due`` of ``request``."""
    return policy.due_of(*due_times(request, now))
