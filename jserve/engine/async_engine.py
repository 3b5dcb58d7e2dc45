"""The asyncio interface over one engine, which is started again when it dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from jserve.engine.client import EngineClient
from jserve.engine.face import EngineFace
from jserve.engine.health import HealthLimits
from jserve.engine.process import OnProgress
from jserve.engine.replica import Replica
from jserve.engine.streams import Stream
from jserve.engine.wire import Control, HandleCommand, Message, Ready, Stats
from jserve.errors import EngineDead, NotReady
from jserve.ports import Clock
from jserve.types import HandleInfo


class AsyncEngine(EngineFace):
    """Requests in, async iterators of outputs back; restarts an engine that died.

    Args:
        make_client: makes a fresh, unstarted client, also for every restart.
        max_restarts: restarts before giving up.
        health: limits of ``degraded_reasons``.
        backoff_s: wait before the first restart; doubles each time.
        clock: monotonic seconds.
        rest: as ``EngineFace``.

    Attributes:
        counters: engine_deaths, restarts, degraded, resumed (attempts that went on behind another one),
            faults, aborted (requests given up before their end), slow_readers, dropped_outputs.
        client: the current engine's, None before the start.
    """

    def __init__(
        self,
        make_client: Callable[[], EngineClient],
        *,
        max_restarts: int = 3,
        health: HealthLimits | None = None,
        backoff_s: float = 0.5,
        clock: Clock = time.monotonic,
        **rest: Any,
    ) -> None:
        super().__init__(clock=clock, **rest)
        self._replica = Replica(
            make_client,
            self,
            max_restarts=max_restarts,
            backoff_s=backoff_s,
            health=health,
            clock=clock,
        )
        self._supervisor = self._replica.supervisor

    @property
    def client(self) -> EngineClient | None:
        return self._supervisor.client

    @property
    def ready(self) -> bool:
        return self._supervisor.ready

    @property
    def info(self) -> dict[str, Any]:
        return self._supervisor.info

    @property
    def gave_up(self) -> asyncio.Event:
        return self._supervisor.gave_up

    @property
    def gave_up_reason(self) -> str:
        return self._supervisor.gave_up_reason

    @property
    def counters(self) -> dict[str, int]:
        deaths, restarts = self._supervisor.n_deaths, self._supervisor.n_restarts
        degraded, resumed = self._replica.health.n_degraded, self._resumption.n_resumed
        started = {"engine_deaths": deaths, "restarts": restarts, "resumed": resumed}
        return {**started, "degraded": degraded, **self._counts}

    async def start(self, on_progress: OnProgress | None = None) -> dict[str, Any]:
        return await self._supervisor.start(on_progress)

    async def close(self) -> None:
        self._supervisor.stop()
        self._fail_all("the engine was closed", EngineDead.code, cancel=False)
        await self._supervisor.close()

    async def control(self, message: Control) -> dict[str, Any]:
        self._check_open()
        return self._obeyed((await self._ask(self._replica, message)).info)

    async def handles(self, message: HandleCommand) -> list[HandleInfo]:
        self._check_open()
        return (await self._ask(self._replica, message)).handles

    def stats(self) -> Stats:
        return self._replica.stats

    def healthy(self) -> bool:
        moves = self._held or self._replica.without_step_s() <= self._stall_timeout_s
        return self.ready and moves

    def degraded_reasons(self) -> list[str]:
        return ["paused"] if self._held else self._replica.degraded_reasons()

    def lost(self, replica: Replica, streams: list[Stream], why: str) -> None:
        """Its requests wait for the next engine, if one comes."""
        why = f"the engine died: {why}"
        if self._supervisor.returns:
            self._fail_asked(why, EngineDead.code)
            self._resumption.park(streams, why, EngineDead.code)
        else:
            self._fail_all(why, EngineDead.code, cancel=False)

    def received(self, replica: Replica, message: Message) -> None:
        if isinstance(message, Ready):
            self._held = False
        super().received(replica, message)

    def _check_open(self) -> None:
        self._check_draining()
        if self._supervisor.closing:
            raise NotReady("the server is shutting down", code="draining", retry_after=5.0)
        self._supervisor.check_ready()

    def _place(self, stream: Stream, ttl_s: float | None) -> None:
        self._replica.work_on(stream, stream.request, ttl_s)

    def _go_on(self) -> None:
        if self.ready:
            for stream in self._resumption.take():
                self._resumption.go_on(stream, self._replica)
