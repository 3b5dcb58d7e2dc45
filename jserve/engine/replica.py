"""One engine as the asyncio face sees it: who keeps it alive, what it said of itself last, which requests it has.

It owns the requests that this engine works on, and hands them back when the engine is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from jserve.engine.client import EngineClient
from jserve.engine.health import EngineHealth, HealthLimits
from jserve.engine.streams import Stream
from jserve.engine.supervisor import Supervisor
from jserve.engine.wire import HandleReply, Message, Outputs, Ready, Stats
from jserve.ports import Clock
from jserve.types import Request


class Listener(Protocol):
    """Gets the messages of all replicas."""

    def received(self, replica: Replica, message: Message) -> None:
        """``message`` came, and ``replica`` has taken note of it."""
        ...

    def lost(self, replica: Replica, streams: list[Stream], why: str) -> None:
        """Its engine is gone, and with it the work on ``streams``."""
        ...


class Replica:
    """One supervised engine.

    Args:
        make_client: makes a fresh, unstarted client, also for every restart.
        listener: is told of messages and ends.
        max_restarts: restarts before giving up; 0 where somebody else keeps the engine alive.
        backoff_s: wait before the first restart; doubles each time.
        health: limits of ``health``.
        clock: monotonic seconds.

    Attributes:
        streams: requests it works on, by id, oldest first.
        stats: its latest statistics.
        weights: names the weights that its tokens come from; None where nobody says.
    """

    def __init__(
        self,
        make_client: Callable[[], EngineClient],
        listener: Listener,
        *,
        max_restarts: int,
        backoff_s: float,
        health: HealthLimits | None,
        clock: Clock,
    ) -> None:
        self._make_client, self._listener, self._clock = make_client, listener, clock
        self.supervisor = Supervisor(
            self._new_client,
            self._on_message,
            self._on_lost,
            max_restarts=max_restarts,
            backoff_s=backoff_s,
            clock=clock,
        )
        self.streams: dict[str, Stream] = {}
        self.health = EngineHealth(health)
        self.stats = Stats()
        self.weights: str | None = None
        self._moved_at = clock()

    @property
    def ready(self) -> bool:
        return self.supervisor.ready

    @property
    def info(self) -> dict[str, Any]:
        return self.supervisor.info

    @property
    def client(self) -> EngineClient | None:
        return self.supervisor.client

    def work_on(self, stream: Stream, request: Request, ttl_s: float | None = None) -> None:
        """Hand it an attempt at the request of ``stream``; with ``ttl_s`` its prompt becomes a cache handle.

        Raises:
            BadRequest: it is too large to be sent.
        """
        assert self.client is not None
        if ttl_s is None:
            self.client.submit(request)
        else:
            self.client.create(request, ttl_s)
        if not any(other.open for other in self.streams.values()):
            self._moved_at = self._clock()
        self.streams[request.id], stream.replica = stream, self
        if not any(stream.said):
            stream.weights = self.weights

    def give_up(self, n: int | None = None) -> list[Stream]:
        """End its work on the ``n`` oldest requests, or on all; these."""
        streams = self._take_streams(n)
        for stream in streams:
            if stream.open:
                self.cancel(stream.request.id)
        return streams

    def _take_streams(self, n: int | None = None) -> list[Stream]:
        streams = list(self.streams.values())[:n]
        for stream in streams:
            del self.streams[stream.request.id]
            stream.replica = None
        return streams

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End the work on a request, or on one choice of it."""
        if self.client is not None and self.client.alive:
            self.client.cancel(request_id, index)

    def without_step_s(self) -> float:
        """Seconds since its last step while it has work; 0 when it has none."""
        waiting = any(stream.open for stream in self.streams.values())
        return self._clock() - self._moved_at if waiting else 0.0

    def degraded_reasons(self) -> list[str]:
        """The reasons why it should get no new requests; empty: it should."""
        return self.health.degraded_reasons(self._clock(), self.without_step_s())

    def _new_client(self) -> EngineClient:
        self.stats = Stats()  # statistics of the last engine
        self.health.forget()
        return self._make_client()

    def _on_message(self, message: Message) -> None:
        match message:
            case Outputs():
                self._progress_to(message.step)
            case Stats():
                self._progress_to(message.step)
                self.stats = message
                self.health.observe(message.step, message.values, self._clock())
            case Ready():
                self._moved_at = self._clock()
                self.weights = message.info.get("weights")
            case HandleReply() if message.info.get("weights"):
                self.weights = message.info["weights"]
                for stream in self.streams.values():
                    stream.weights = self.weights  # what they were told goes on with these
        self._listener.received(self, message)

    def _progress_to(self, step: int) -> None:
        if step != self.stats.step:
            self.stats = msgspec.structs.replace(self.stats, step=step)
            self._moved_at = self._clock()

    def _on_lost(self, why: str) -> None:
        self._listener.lost(self, self._take_streams(), why)
