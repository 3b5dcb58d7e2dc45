"""Admission control: refuses requests by queue bounds, tenant shares, overload and deadlines.

``load`` is the fuller of the queue's bounds (sequences, prompt tokens, seconds of work). The level
rises and falls with a gap between, so that it does not flutter; lane interactive has an eighth of
the queue on top, which is its own::

    load   0 ------- 0.5 ------- 0.75 ------- 1.0 ------ 1.125
    up to              1           2            3          |
    back below    0.35      0.6         0.85               |
                       no bulk     shorter      no       nobody
                                   prefills   standard

A refused request changes nothing, however often it comes again: retries do not raise the load. Prompts
of one client request are one decision: the first one decides for all, so that an idle server refuses no
request because of its own size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from jserve.config import SchedulerOptions
from jserve.errors import (
    BadRequest,
    DeadlineInfeasible,
    DeadlineUnreachable,
    JserveError,
    Overloaded,
    RateLimited,
)
from jserve.sched import policy
from jserve.sched.admission import estimate
from jserve.sched.admission.estimate import FinishIntervals, Forecast, Pace
from jserve.sched.resources import Resources
from jserve.timing.prefill_cap import PrefillCap
from jserve.types import Lane, Request

UP = (0.5, 0.75, 1.0)
DOWN = (0.35, 0.6, 0.85)
FULL = 1.125
SHED_FROM = {Lane.BULK: 1, Lane.STANDARD: 3, Lane.INTERACTIVE: 4}
"""Overload level from which a lane is refused; 4 stands for a full queue."""
SHORT_FROM = 2
FEW = 8
"""So few waiting sequences are no overload, however many seconds their prompts take; nor are those
for whom a slot is free."""
MAX_BATCHES = 4096
"""Names of batches that are kept; the requests of one come close together."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound of the queue: ``used`` of at most ``limit``, which ``option`` sets."""

    used: float
    limit: float
    what: str
    option: str

    @property
    def share(self) -> float:
        """1 is full."""
        return self.used / self.limit


def next_level(level: int, load: float) -> int:
    """The overload level after ``level`` at ``load``."""
    while level < len(UP) and load >= UP[level]:
        level += 1
    while level and load < DOWN[level - 1]:
        level -= 1
    return level


class AdmissionGate:
    """Admits or refuses a request at arrival.

    Args:
        options: bounds of the queue, caps of the lanes.
        cap: the step's prefill cap, whose costs predict times.
        resources: the wait queue, the running sequences, and what they hold.
    """

    def __init__(self, options: SchedulerOptions, cap: PrefillCap, resources: Resources) -> None:
        self.options = options
        self.cap = cap
        self.resources = resources
        self.finish_intervals = FinishIntervals()
        self.level = 0
        self.n_context = 0
        """Tokens of the longest row of late."""
        self.n_refused = dict.fromkeys(Lane, 0)
        self._batches: OrderedDict[str, None] = OrderedDict()
        """Those of which a request was taken, oldest first."""
        self._most_out = {
            Lane.INTERACTIVE: options.max_tokens_interactive,
            Lane.STANDARD: options.max_tokens_standard,
            Lane.BULK: options.max_tokens_bulk,
        }

    def capped(self, request: Request, max_len: int) -> int:
        """``max_len`` under the lane's cap on ``max_tokens``; an open length is cut to it.

        Raises:
            BadRequest: ``max_tokens`` is above the cap.
        """
        cap, wanted = self._most_out[request.lane], request.params.max_tokens
        if cap and (wanted or request.params.min_tokens) > cap:
            raise BadRequest(
                f"max_tokens may be at most {cap} in lane {request.lane}", field="max_tokens"
            )
        return min(max_len, len(request.prompt_ids) + cap) if cap else max_len

    def check(self, request: Request, max_len: int, now: float) -> None:
        """Raises:
        Overloaded, RateLimited: the queue, or the tenant's part of it, has no room.
        DeadlineInfeasible, DeadlineUnreachable: a deadline cannot be met at all, or not now.
        """
        self.update()
        try:
            if request.batch not in self._batches:
                self._check_room(request)
            self._check_deadlines(request, max_len, now)
        except JserveError as error:
            self.n_refused[request.lane] += 1
            raise self._own_fault(error, request) from None
        if request.batch:
            self._batches[request.batch] = None
            while len(self._batches) > MAX_BATCHES:
                self._batches.popitem(last=False)

    def _own_fault(self, error: JserveError, request: Request) -> JserveError:
        """``error``, or that the deadline is out of reach whenever it is asked for: only the request's
        own batch is ahead of it."""
        resources = self.resources
        others = any(
            seq.request.batch != request.batch for seq in (*resources.waiting, *resources.running)
        )
        if others or not request.batch or not isinstance(error, DeadlineUnreachable):
            return error
        return DeadlineInfeasible(
            f"{error.field} cannot be met for so many prompts at once", field=error.field
        )

    def update(self) -> None:
        """Bring the overload level up to the load of now."""
        self.level = next_level(self.level, self.load())

    def load(self) -> float:
        """The fullness of the queue; 1 is full."""
        return self._fullest().share

    def _fullest(self) -> Bound:
        return max(self._bounds(), key=lambda bound: bound.share)

    def _bounds(self) -> Iterator[Bound]:
        options, waiting = self.options, self.resources.waiting
        yield Bound(len(waiting), options.max_waiting, "sequences", "max_waiting")
        if options.max_waiting_tokens:
            limit = options.max_waiting_tokens
            yield Bound(waiting.n_tokens, limit, "prompt tokens", "max_waiting_tokens")
        few = max(FEW, self._n_free)
        if options.max_queue_s and len(waiting) > few and self.cap.costs.known:
            yield Bound(self.queue_s(), options.max_queue_s, "s of work", "max_queue_s")

    @property
    def _n_free(self) -> int:
        return self.resources.max_running - len(self.resources.running)

    def queue_s(self) -> float:
        """Seconds of work that wait."""
        return self.pace().wait_s(len(self.resources.waiting), self.resources.waiting.n_tokens)

    @property
    def short(self) -> bool:
        """Overload asks for shorter prefills."""
        return self.level >= SHORT_FROM

    def pace(self) -> Pace:
        """The pace of now."""
        n_running = len(self.resources.running)
        return estimate.pace_of(
            self.cap,
            n_running,
            self.n_context,
            gap_s=self.finish_intervals.mean_s,
            n_free=self._n_free,
        )

    def _check_room(self, request: Request) -> None:
        waiting, options, tenant = self.resources.waiting, self.options, request.tenant
        fullest = self._fullest()
        level = 4 if fullest.share >= FULL else self.level
        if level >= SHED_FROM[request.lane]:
            wait = self._retry_after()
            raise Overloaded(
                f"overloaded: {_refusal(fullest, request.lane)}; try again in {wait:.0f} s",
                retry_after=wait,
            )
        if tenant and waiting.held_by.get(tenant, 0) >= max(
            1, int(options.tenant_share * options.max_waiting)
        ):
            wait = self._retry_after()
            raise RateLimited(
                f"this API key has {waiting.held_by[tenant]} sequences waiting, its share of the"
                f" queue (tenant_share {options.tenant_share:g} of max_waiting"
                f" {options.max_waiting}); try again in {wait:.0f} s",
                retry_after=wait,
            )

    def _retry_after(self) -> float:
        """Seconds until half of what waits is served, between 1 and 60."""
        if self.cap.costs.known:
            return min(60.0, max(1.0, self.queue_s() / 2))
        return min(60.0, max(1.0, len(self.resources.waiting) * self.finish_intervals.mean_s / 2))

    def _check_deadlines(self, request: Request, max_len: int, now: float) -> None:
        wishes = (request.ttft_deadline_ms, request.tpot_deadline_ms, request.deadline_ms)
        if wishes == (None, None, None) or not self.cap.costs.known:
            return
        n_prompt = len(request.prompt_ids)
        n_new = n_prompt - self.resources.tokens_known(request)
        n_out = self.resources.lengths.expected(request.lane, max_len - n_prompt)
        context = max(self.n_context, n_prompt)
        best = estimate.alone(self.cap, n_new, n_out, n_prompt)
        likely = self._behind(request, now, n_new, n_out, context)
        first_by, end_by = estimate.due_times(request, now)
        _promise("ttft_deadline_ms", wishes[0], best.ttft_s, likely.ttft_s, first_by, now)
        tpot_by = None if wishes[1] is None else now + wishes[1] / 1000
        _promise("tpot_deadline_ms", wishes[1], best.tpot_s, likely.tpot_s, tpot_by, now)
        _promise("deadline_ms", wishes[2], best.total_s, likely.total_s, end_by, now)

    def _behind(
        self, request: Request, now: float, n_new: int, n_out: int, context: int
    ) -> Forecast:
        resources, pace, due = self.resources, self.pace(), estimate.due(request, now)
        n, tokens = estimate.ahead(resources.waiting, request, due)
        tokens += sum([max(0, seq.given - seq.scheduled) for seq in resources.running])
        late = estimate.pushed_late(resources.waiting, request, due, pace, n, tokens, now)
        if late is not None:
            raise DeadlineUnreachable(
                "this deadline cannot be met now: it would break one that was promised before",
                field="deadline_ms" if request.ttft_deadline_ms is None else "ttft_deadline_ms",
                retry_after=min(60.0, max(1.0, late.due - now)),
            )
        beside = min(len(resources.running), resources.max_running - 1)
        wait_s = max(pace.wait_s(n + 1, tokens), self._vocab_row_s(request, n))
        return estimate.behind(self.cap, pace, wait_s, beside, n_new, n_out, context)

    def _vocab_row_s(self, request: Request, n: float) -> float:
        """Seconds until ``request`` gets a vocab row, behind ``n`` sequences of the queue; 0 where it needs none.

        Of those ahead as large a part needs rows as of the whole queue. Bulk sequences give theirs to lane interactive.
        """
        resources, rows = self.resources, self.resources.vocab_rows
        if not request.params.needs_vocab_row or rows.n >= resources.max_running:
            return 0.0
        waiting, running = resources.waiting, resources.running
        n_free = rows.n_free
        if request.lane is Lane.INTERACTIVE:
            n_free += sum(seq.vocab_row >= 0 for seq in policy.preemptible_bulk(running))
        n_need = sum(seq.request.params.needs_vocab_row for seq in waiting)
        n_ahead = n * n_need / max(1, len(waiting))
        gap_s = self.finish_intervals.mean_s * max(1.0, len(running) / rows.n)
        return max(0.0, n_ahead + 1 - n_free) * gap_s


def _refusal(bound: Bound, lane: Lane) -> str:
    """The error of a request of ``lane`` that ``bound`` refuses, with the option that an operator may set."""
    shed_from = SHED_FROM[lane]
    until = bound.limit * (FULL if shed_from > len(DOWN) else DOWN[shed_from - 1])
    return (
        f"{_amount(bound.used)} {bound.what} are waiting; lane {lane} is taken again below"
        f" {_amount(until)} ({bound.option} is {_amount(bound.limit)})"
    )


def _amount(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _promise(
    field: str, wish: float | None, best_s: float, likely_s: float, by: float | None, now: float
) -> None:
    """Raises if ``wish`` milliseconds, up at ``by``, cannot be kept: at all, or under the present load."""
    if wish is None or by is None:
        return
    if best_s > wish / 1000:
        raise DeadlineInfeasible(
            f"{field} of {wish:g} ms cannot be met: it takes about {best_s * 1e3:.0f} ms"
            " on an idle server",
            field=field,
        )
    if now + likely_s > by:
        late = now + likely_s - by
        raise DeadlineUnreachable(
            f"{field} of {wish:g} ms cannot be met now: it would take about"
            f" {likely_s * 1e3:.0f} ms behind what is waiting",
            field=field,
            retry_after=min(60.0, max(1.0, late)),
        )
