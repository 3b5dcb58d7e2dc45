"""Supervises the engine: starts it, restarts it with back-off when it dies, gives up after too many deaths.

It owns the client of the engine that runs now, whether it is ready, and the waits between two starts. It forwards
messages and reports when an engine is gone. All on one event loop::

    start --> client --Ready--> ready --Gone--> 0.5 s, 1 s, 2 s ... --> another client --Ready--> ...
                 '--Gone: the start failed              '-- after ``max_restarts``: gave up
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from jserve.engine.client import EngineClient, OnMessage
from jserve.engine.process import OnProgress
from jserve.engine.watchdog import EXIT_STUCK
from jserve.engine.wire import Fault, Gone, Message, Progress, Ready
from jserve.errors import ConfigError, EngineDead, JserveError, NotReady, WeightsError
from jserve.ports import Clock

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
FORGIVE_AFTER_S = 600.0
"""An engine that ran so long starts again with the full number of restarts."""


class Supervisor:
    """One engine at a time.

    Args:
        make_client: makes a fresh, unstarted client, also for every restart.
        on_message: called with every message of the current engine but its last.
        lost: called with the reason when that engine is gone, once ``returns`` says what becomes of it.
        max_restarts: restarts before giving up.
        backoff_s: wait before the first restart; doubles each time.
        clock: monotonic seconds.

    Attributes:
        client: the current engine's, None before the start.
        ready: True while it takes requests.
        info: of its Ready message.
        gave_up: set when the engine is dead for good; ``gave_up_reason`` says why.
        closing: True once ``stop`` was called.
    """

    def __init__(
        self,
        make_client: Callable[[], EngineClient],
        on_message: Callable[[Message], None],
        lost: Callable[[str], None],
        *,
        max_restarts: int,
        backoff_s: float,
        clock: Clock,
    ) -> None:
        self._make_client, self._on_engine_message, self._lost = make_client, on_message, lost
        self._max_restarts, self._backoff_s, self._clock = max_restarts, backoff_s, clock
        self.client: EngineClient | None = None
        self.ready = self.closing = False
        self.info: dict[str, Any] = {}
        self.gave_up, self.gave_up_reason = asyncio.Event(), ""
        self.n_deaths = self.n_restarts = 0
        self._n_tries, self._returns = 0, True
        self._ready_at = clock()
        self._fault: Fault | None = None
        self._restart: asyncio.Task[None] | None = None
        self._on_progress: OnProgress | None = None
        self._first: asyncio.Future[dict[str, Any]] | None = None

    async def start(self, on_progress: OnProgress | None = None) -> dict[str, Any]:
        """Start the engine and wait until it takes requests; returns the info of its Ready message.

        Raises:
            ConfigError, WeightsError: an option or a file is at fault; ``field`` names it.
            EngineDead: the engine ended during its start. A first start is not tried again.
        """
        self._loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._first = self._loop.create_future()
        self._launch()
        return await self._first

    def stop(self) -> None:
        """From now on no engine is ready, and none is started again."""
        self.closing, self.ready = True, False
        if self._restart is not None:
            self._restart.cancel()

    async def close(self) -> None:
        """End the engine. Idempotent."""
        self.stop()
        if self.client is not None:
            await asyncio.to_thread(self.client.close)

    @property
    def returns(self) -> bool:
        """An engine that is gone will be started again."""
        return self._returns and not self.closing and not self.gave_up.is_set()

    def check_ready(self) -> None:
        """Raises:
        NotReady, EngineDead: there is no engine that takes requests now; whether one will.
        """
        if self.gave_up.is_set():
            raise EngineDead(self.gave_up_reason)
        if not self.ready:
            if self.n_deaths:
                raise EngineDead("the engine is being restarted", retry_after=5.0)
            raise NotReady("the engine is starting", retry_after=5.0)

    def _launch(self) -> None:
        self._fault = None
        self.client = client = self._make_client()
        loop = self._loop

        def on_message(message: Message) -> None:
            try:
                loop.call_soon_threadsafe(self._on_message, client, message)
            except RuntimeError:  # the loop is closed: there is no receiver
                log.debug("dropped %s", type(message).__name__)

        self._start_client(client, on_message)

    def _start_client(self, client: EngineClient, on_message: OnMessage) -> None:
        try:
            client.start(on_message)
        except (OSError, RuntimeError) as error:  # no process, or no thread, can be had
            self._fault = Fault(message=f"cannot start the engine: {error}", fatal=True)
            on_message(Gone(exit_code=1))

    def _on_message(self, client: EngineClient, message: Message) -> None:
        if client is not self.client:
            return
        match message:
            case Ready():
                self._on_ready(message)
            case Progress():
                if self._on_progress is not None:
                    self._on_progress(message.stage, message.done, message.total)
            case Fault(fatal=True):
                self._fault = message  # explains the Gone that follows
            case Gone():
                self._on_gone(message)
                return
        self._on_engine_message(message)

    def _on_ready(self, message: Ready) -> None:
        self.info, self.ready = message.info, True
        self._ready_at = self._clock()
        if self._first is not None and not self._first.done():
            self._first.set_result(message.info)

    def _on_gone(self, gone: Gone) -> None:
        was_ready, self.ready = self.ready, False
        why = self._fault.message if self._fault else _end_of(gone.exit_code)
        starting = self._first is not None and not self._first.done()
        if self.closing:
            why = "the engine was closed"
        else:
            self.n_deaths += 1
            if not starting:  # else the caller of ``start`` reports it
                log.error("the engine died: %s", why)
        if self._first is not None and starting:
            self._first.set_exception(_start_error(self._fault, why))
            self._returns = False
        elif not self.closing:
            self._plan_restart(why, was_ready)
        self._lost(why)

    def _plan_restart(self, why: str, was_ready: bool) -> None:
        if was_ready and self._clock() - self._ready_at > FORGIVE_AFTER_S:
            self._n_tries = 0
        if self._n_tries >= self._max_restarts:
            self.gave_up_reason = f"the engine died {self._n_tries + 1} times, at last: {why}"
            self.gave_up.set()
            return
        self._n_tries += 1
        wait_s = min(self._backoff_s * 2 ** (self._n_tries - 1), MAX_BACKOFF_S)
        self._restart = self._loop.create_task(self._restart_after(wait_s))

    async def _restart_after(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self.n_restarts += 1
        self._launch()


def _end_of(code: int) -> str:
    """In words, where it said nothing itself."""
    why = "no progress, stacks are in its log" if code == EXIT_STUCK else ""
    return f"it ended with code {code}{f' ({why})' if why else ''}"


def _start_error(fault: Fault | None, why: str) -> JserveError:
    """The error of a start that failed; a config error keeps its class, so that the exit code is
    2."""
    for kind in (ConfigError, WeightsError):
        if fault is not None and fault.code == kind.code:
            return kind(fault.message, field=fault.field)
    return EngineDead(f"the engine did not start: {why}")
