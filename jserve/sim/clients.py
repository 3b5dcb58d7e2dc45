"""The clients of a simulation: when each request is sent, sent again or given up, and what is written down of it."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence as Seq
from typing import TYPE_CHECKING

from jserve.errors import EngineDead, NotReady
from jserve.sim.records import Record, Records
from jserve.sim.trace import Streams, TraceItem, request_of
from jserve.types import Output, Request

if TYPE_CHECKING:
    from jserve.sim.simulate import Setup

NO_ENGINE = (EngineDead.code, NotReady.code)
RETRIED = frozenset({"overloaded", "queue_full_tenant", "deadline_unreachable", *NO_ENGINE})
"""Error codes after which a client that was told nothing may send again."""


class Clients:
    """Those who send a trace: when each request is due, sent again or given up, and what follows from it.

    Args:
        trace: requests; those that follow another are sent after its end.
        setup: how often a refused client sends again, and how fast arrivals come.
    """

    def __init__(self, trace: Seq[TraceItem], setup: Setup) -> None:
        self.setup = setup
        self.streams, self.records = Streams(), Records()
        self._serial = itertools.count()
        self._heap: list[tuple[float, int, TraceItem, int | None, bool]] = []
        """(time, serial, item, choice, is a cancel)."""
        self._followers: dict[str, list[TraceItem]] = {}
        self._ended: list[tuple[str, int]] = []
        for item in trace:
            if item.after:
                self._followers.setdefault(item.after, []).append(item)
            else:
                self._push(item.at / setup.load, item)

    @property
    def next_at(self) -> float | None:
        """The time at which something is due next; None: never."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[tuple[float, TraceItem, int | None, bool]]:
        """(time, request, choice, hangs up) of what is due by ``now``."""
        while self._heap and self._heap[0][0] <= now:
            at, _, item, index, hangs_up = heapq.heappop(self._heap)
            yield at, item, index, hangs_up

    def sent(self, item: TraceItem, at: float) -> Request:
        """The request that the client of ``item`` sends at ``at``."""
        self.records.sent(item, at)
        for seconds, index in item.cancels:
            self._push(at + seconds, item, index, hangs_up=True)
        return self._request(item, at)

    def again(self, item: TraceItem) -> Request:
        """The request of ``item``, which was sent before."""
        return self._request(item, self.records.open[item.id].at)

    def _request(self, item: TraceItem, arrival: float) -> Request:
        request = request_of(item, self.streams, arrival)
        attempt = self.records.open[item.id].attempt
        request = dataclasses.replace(request, attempt=attempt) if attempt else request
        return request if self.setup.deadlines else without_deadlines(request)

    def receive(self, outputs: Seq[Output], now: float) -> None:
        """Write down what each output says, and send what follows from it."""
        records, watch = self.records.open, self.setup.watch
        for output in outputs:
            record = records.get(output.request_id)
            if record is None or output.attempt != record.attempt:
                continue
            if output.token_ids:
                record.n_idle = 0
                record.times[output.index].append(now)
                if watch is not None:
                    watch.token(record)
            if output.finish is not None:
                self._end(record, output, now)

    @property
    def enough(self) -> bool:
        """Whoever watches has seen enough."""
        return self.setup.watch is not None and self.setup.watch.enough

    def take_ended(self) -> list[tuple[str, int]]:
        """Requests that ended since the last call, those that are sent again among them: (id, tokens drawn)."""
        ended, self._ended = self._ended, []
        return ended

    def _push(
        self, at: float, item: TraceItem, index: int | None = None, hangs_up: bool = False
    ) -> None:
        heapq.heappush(self._heap, (at, next(self._serial), item, index, hangs_up))

    def _end(self, record: Record, output: Output, now: float) -> None:
        record.open.discard(output.index)
        if output.error_code is not None:
            record.error = output.error_code
            record.refused = record.refused or record.seq is None
        record.finish = output.finish
        record.n_cached = max(record.n_cached, output.n_cached)
        if record.open:
            return
        n_tokens = sum(map(len, record.times))
        self._ended.append((record.item.id, n_tokens))
        again = record.error in RETRIED and not n_tokens
        if again and record.n_sent <= self.setup.retries:
            wait = output.retry_after or float(2 ** (record.n_sent - 1))
            self._push(now + wait, record.item)
            return
        self.records.close(record, now)
        if self.setup.watch is not None:
            self.setup.watch.end(self.records.done[-1])
        self._follow(record.item, record.error is None, now)

    def _follow(self, item: TraceItem, went_well: bool, now: float) -> None:
        for follower in self._followers.pop(item.id, ()):
            if went_well:
                self._push(now + follower.at, follower)
            else:
                self.records.n_unsent += 1
                self._follow(follower, False, now)


def without_deadlines(request: Request) -> Request:
    """``request`` as a scheduler sees it that knows of no deadlines."""
    return dataclasses.replace(
        request, ttft_deadline_ms=None, tpot_deadline_ms=None, deadline_ms=None
    )
