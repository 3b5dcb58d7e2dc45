"""Sends a request of lane interactive to a second replica when its first token is late (Dean and Barroso, "The Tail at
Scale", 2013).

Draws are functions of seed and position, so both would say the same: whoever speaks first goes on with it, the other
one is cancelled. Nothing was told before, so an answer is always one replica's::

    stream    at A     what the client gets
    hedge     at B     under the same id; nobody reads it before it takes the stream's place
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from jserve.engine.replica import Replica
from jserve.engine.streams import Stream
from jserve.errors import JserveError
from jserve.fleet.sent import NEAR_S, Sent, SentRequests
from jserve.fleet.suspicion import RetryBudget, Suspicion
from jserve.ports import Clock
from jserve.types import Finish, Lane, Output, Request

LATE = 3.0
"""A first token is late at so many times its price."""
MOST = 8.0
"""Hedges that may be saved up."""


@dataclass(slots=True, eq=False)
class _Hedge:
    stream: Stream
    sent: Sent


class Hedging:
    """The hedges, by id of their request.

    Args:
        sent: where requests are.
        choose_other: the cheapest replica for a stream's request but those of these names, which it is then taken to be
            sent to.
        suspicion: hears of replicas whose first token came too late.
        share: of requests of lane interactive, those that may be sent twice; 0: none.
        clock: monotonic seconds.

    Attributes:
        n_sent, n_won: requests that were sent twice, and those of which the second replica spoke first.
    """

    def __init__(
        self,
        sent: SentRequests,
        choose_other: Callable[[Stream, Collection[str]], Sent | None],
        suspicion: Suspicion,
        *,
        share: float,
        clock: Clock,
    ) -> None:
        self._sent, self._choose_other, self._suspicion = sent, choose_other, suspicion
        self._share, self._clock = share, clock
        self._budget = RetryBudget(share, MOST)
        self._hedges: dict[str, _Hedge] = {}
        self.n_sent = self.n_won = 0

    def __len__(self) -> int:
        return len(self._hedges)

    def has(self, request_id: str) -> bool:
        """Two replicas have this request."""
        return request_id in self._hedges

    def placed(self, request: Request) -> None:
        """``request`` was handed to a replica for the first time."""
        if request.lane == Lane.INTERACTIVE:
            self._budget.earned()

    def look(self, streams: Iterable[Stream]) -> None:
        """Send those of ``streams`` twice whose first token is late."""
        if not self._share:
            return
        now = self._clock()
        for stream in streams:
            sent = self._sent.get(stream.request.id)
            if sent is not None and self._may_hedge(stream, sent) and _late(sent, now):
                self._send(stream, sent)

    def _may_hedge(self, stream: Stream, sent: Sent) -> bool:
        request = stream.request
        if request.lane != Lane.INTERACTIVE or request.id in self._hedges or not sent.first:
            return False
        first = stream.attempt == 0 and stream.replica is sent.member
        return first and request.cache is None and request.params.prompt_logprobs is None

    def _send(self, stream: Stream, first: Sent) -> None:
        request = stream.request
        target = self._choose_other(stream, {first.member.name})
        if target is None:
            return
        loaded = target.member.stats.values.get("overload_level", 0.0)
        if loaded or not self._budget.spend(1):
            self._sent.settle_copy(target)
            return
        hedge = _Hedge(Stream(request, clock=self._clock), target)
        try:
            target.member.work_on(hedge.stream, request)
        except JserveError:
            self._sent.settle_copy(target)
            return
        self._hedges[request.id] = hedge
        self.n_sent += 1

    def took(self, stream: Stream | None, replica: Replica, output: Output) -> bool:
        """True: ``output`` is of a hedge, and nobody reads it. One that speaks first takes the place of ``stream``, and
        its output is that of the request."""
        hedge = self._hedges.get(output.request_id)
        if hedge is None:
            return False
        speaks = bool(output.token_ids) or output.finish in (Finish.STOP, Finish.LENGTH)
        if replica is not hedge.sent.member:
            if speaks or output.finish is not None:
                self._drop(output.request_id)
            return False
        if speaks and stream is not None:
            self._win(stream)
            return False
        if output.finish is not None:
            self._drop(output.request_id)
        return True

    def _win(self, stream: Stream) -> None:
        first, replica = self._sent.settle(stream.request.id), stream.replica
        if replica is not None:
            replica.streams.pop(stream.request.id, None)
            replica.cancel(stream.request.id)
        self.take_place(stream)
        self.n_won += 1
        if first is not None:
            self._suspicion.observe(first.member.name, first.ratio(self._clock()))

    def take_place(self, stream: Stream) -> bool:
        """``stream`` has no replica: its hedge goes on with it, if it has one."""
        hedge = self._hedges.pop(stream.request.id, None)
        if hedge is None:
            return False
        member = hedge.sent.member
        member.streams[stream.request.id], stream.replica = stream, member
        stream.weights = hedge.stream.weights
        self._sent.add(stream.request.id, hedge.sent)
        return True

    def lost(self, stream: Stream) -> bool:
        """The replica of ``stream`` works on it no more; True: it is a hedge, and given up."""
        hedge = self._hedges.get(stream.request.id)
        if hedge is None or hedge.stream is not stream:
            return False
        del self._hedges[stream.request.id]
        self._sent.settle_copy(hedge.sent)
        return True

    def over(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        if request_id in self._hedges:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        hedge = self._hedges[request_id]
        self.lost(hedge.stream)
        del hedge.sent.member.streams[request_id]
        hedge.sent.member.cancel(request_id)


def _late(sent: Sent, now: float) -> bool:
    return now - sent.at > LATE * sent.choice.first_s + NEAR_S
