"""The asyncio interface of engines: one output stream per request.

It owns the requests that run, each with its queue of outputs and exactly one terminal output per choice. All state
is touched on one event loop::

    generate(request) --Submit--> replica --> engine
        ^                            |
        '---- queue of Outputs <-----'   one message per step, dealt out by request id

A subclass says how many replicas there are and which of them a request goes to: ``AsyncEngine`` has one,
``fleet.face.FleetEngine`` several. A request whose engine dies goes on in another one (``engine.resume``); its
consumer sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from jserve.engine.process import OnProgress
from jserve.engine.replica import Replica
from jserve.engine.resume import Resumption
from jserve.engine.streams import Stream
from jserve.engine.wire import (
    Control,
    Fault,
    HandleCommand,
    HandleReply,
    Message,
    Outputs,
    Ready,
    Stats,
    StepRecord,
)
from jserve.errors import BadRequest, NotReady, RequestFailed, error_of, where
from jserve.faults import point
from jserve.ports import Clock
from jserve.types import Finish, HandleInfo, Output, Request

log = logging.getLogger(__name__)

WATCHED_STEPS = 600
"""Records of steps that are kept for those who watch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica, for those who watch."""

    name: str
    state: str
    """ready; suspected: slower than it promises; unfit: degraded, it gets nothing while others are fit; out: it gets
    nothing; silent: it says nothing."""
    role: str
    """prefill: it computes prompts for the others; decode."""
    suspicion: float
    """By which its price is multiplied."""
    requests: int
    """That it was given."""
    running: int
    waiting: int
    pages: float
    pages_used: float
    """KV pages of sequences."""
    looked_up: float
    """Prompt tokens."""
    found: float
    """Of these, tokens that its prefix cache had."""
    odd: int = 0
    """Audits in which it did not say what the others said."""
    kv_events: str = ""
    """The address at which it publishes its KV events; empty: none."""
    pid: int = 0
    """Its process on its machine; 0: not known."""


class EngineFace(ABC):
    """Requests in, async iterators of outputs back.

    Args:
        stall_timeout_s: seconds without a step, with work waiting, until ``healthy`` is False.
        max_buffered_bytes: outputs of one request that may wait for its consumer; more end it in
            error. Until then a sequence runs on at its own pace, however slow its reader is.
        slow_reader_s: a consumer that takes nothing for so long ends the same way.
        clock: monotonic seconds.

    Attributes:
        draining: True once ``drain`` was called.
        steps: the latest steps as (number, record); numbers go on over restarts.
    """

    def __init__(
        self,
        *,
        stall_timeout_s: float = 120.0,
        max_buffered_bytes: int = 4 << 20,
        slow_reader_s: float = 30.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._max_buffered, self._slow_reader_s = max_buffered_bytes, slow_reader_s
        self._clock = clock
        self._resumption = Resumption()
        self._streams: dict[str, Stream] = {}
        self._asked: dict[str, tuple[Replica, asyncio.Future[HandleReply]]] = {}
        self._held = False
        """An operator holds the engine back, so that it makes no steps is no fault."""
        self.steps: deque[tuple[int, StepRecord]] = deque(maxlen=WATCHED_STEPS)
        self._n_watched = 0
        self.draining = False
        names = "faults aborted slow_readers dropped_outputs"
        self._counts = dict.fromkeys(names.split(), 0)

    # -- what a subclass says

    @property
    @abstractmethod
    def ready(self) -> bool:
        """New requests are taken."""

    @property
    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Facts about model, device and memory; {} before the start."""

    @property
    @abstractmethod
    def gave_up(self) -> asyncio.Event:
        """Set when no engine will come any more; ``gave_up_reason`` says why."""

    @property
    @abstractmethod
    def gave_up_reason(self) -> str: ...

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Events since the start, by name."""

    @abstractmethod
    async def start(self, on_progress: OnProgress | None = None) -> dict[str, Any]:
        """Start and wait until requests are taken; returns ``info``.

        Raises:
            ConfigError, WeightsError: an option or a file is at fault; ``field`` names it.
            EngineDead: the engine ended during its start. A first start is not tried again.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the engines; whatever still runs gets an error. Idempotent."""

    @abstractmethod
    def stats(self) -> Stats:
        """The engines' latest statistics."""

    @abstractmethod
    def healthy(self) -> bool:
        """The engine is up, and makes steps whenever work is waiting."""

    @abstractmethod
    def degraded_reasons(self) -> list[str]:
        """The reasons why an engine that is up should get no new requests; empty: it should."""

    @abstractmethod
    def lost(self, replica: Replica, streams: list[Stream], why: str) -> None:
        """The engine of ``replica`` is gone, and with it the work on ``streams``."""

    @abstractmethod
    async def control(self, message: Control) -> dict[str, Any]:
        """Send an operator's command to the engine; the facts that answer it. ``message.id`` must be new.

        Raises:
            BadRequest, WeightsError: as the engine says.
            NotReady, EngineDead: as ``generate``.
        """

    @abstractmethod
    async def handles(self, message: HandleCommand) -> list[HandleInfo]:
        """Renew, drop or look at cache handles; ``message.id`` must be new.

        Raises:
            CacheNotFound, BadRequest: as the engine says.
            NotReady, EngineDead: as ``generate``.
        """

    @abstractmethod
    def _check_open(self) -> None:
        """Raises NotReady or EngineDead where no request is taken now."""

    @abstractmethod
    def _place(self, stream: Stream, ttl_s: float | None) -> None:
        """Hand a new request to a replica; with ``ttl_s`` its prompt becomes a cache handle.

        Raises:
            JserveError: nobody takes it.
        """

    @abstractmethod
    def _go_on(self) -> None:
        """Resume all that wait for an engine, as far as there is one."""

    def replicas(self) -> list[ReplicaState]:
        """The replicas that take part, for those who watch; none where there is one engine."""
        return []

    def _over(self, stream: Stream) -> None:  # noqa: B027
        """Nobody waits for ``stream`` any more."""

    # -- requests

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Run a request: its outputs as they come, one terminal one per choice; then it ends.

        Leaving early (``aclose``, cancellation) cancels the request in the engine. Refusals by the
        scheduler and faults come as terminal outputs in error, see ``errors.error_of``.

        Raises:
            NotReady: starting or draining. EngineDead: restarting, or given up.
            BadRequest: the id is in use, or the request is too large to be sent.
        """
        return self._outputs(request, None)

    async def create(self, request: Request, ttl_s: float) -> list[Output]:
        """Compute the prompt of ``request`` and pin it as the handle ``request.cache``: its
        outputs, the last one in error if it failed. Cancelling this gives the handle up.

        Raises:
            As ``generate``.
        """
        async with aclosing(self._outputs(request, ttl_s)) as outputs:
            return [output async for output in outputs]

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it that reached a stop string: its consumer gets a
        terminal output with ABORT. Idempotent."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.end(Finish.ABORT, index=index):
            self._counts["aborted"] += index is None
            _cancel(stream, index if stream.open else None)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, wait for those that run, end the rest; returns how many were
        ended."""
        self.draining = True
        until = self._clock() + timeout_s
        while self._streams and self._clock() < until:
            await asyncio.sleep(0.02)
        return self._fail_all("the server is shutting down", "draining", cancel=True)

    @property
    def n_active(self) -> int:
        """Requests whose consumer has not finished."""
        return len(self._streams)

    @property
    def n_buffered_bytes(self) -> int:
        """Bytes of outputs that consumers have not taken yet, over all requests."""
        return sum(stream.n_bytes for stream in self._streams.values())

    def received(self, replica: Replica, message: Message) -> None:
        """Take over what the engine of ``replica`` says."""
        match message:
            case Outputs():
                for output in message.outputs:
                    self._hand_over(replica, output)
            case HandleReply():
                self._on_handles(message)
            case Stats():
                self.steps.extend(enumerate(message.steps, self._n_watched))
                self._n_watched += len(message.steps)
            case Ready():
                self._go_on()
            case Fault():
                self._on_fault(replica, message)

    def _obeyed(self, info: dict[str, Any]) -> dict[str, Any]:
        """``info``, which answers a command, once it was taken note of."""
        if "paused" in info:
            self._held = bool(info["paused"] or info["asleep"])
        return info

    async def _ask(self, replica: Replica, message: HandleCommand | Control) -> HandleReply:
        """The answer of ``replica`` to ``message``."""
        assert replica.client is not None
        answer: asyncio.Future[HandleReply] = asyncio.get_running_loop().create_future()
        self._asked[message.id] = replica, answer
        try:
            replica.client.ask(message)
            return await answer
        finally:
            self._asked.pop(message.id, None)

    async def _outputs(self, request: Request, ttl_s: float | None) -> AsyncGenerator[Output, None]:
        stream = self._open(request, ttl_s)
        try:
            while (output := await stream.get()) is not None:
                yield output
        finally:
            self._streams.pop(request.id, None)
            if stream.open:
                self._counts["aborted"] += 1
                _cancel(stream)
            if stream.replica is not None:
                stream.replica.streams.pop(request.id, None)
            self._resumption.forget(request.id)
            self._over(stream)

    @point("engine.open")
    def _open(self, request: Request, ttl_s: float | None) -> Stream:
        self._check_open()
        if request.id in self._streams:
            raise BadRequest(f"request id {request.id[:64]!r} is in use", field="id")
        stream = Stream(request, clock=self._clock)
        self._place(stream, ttl_s)
        self._streams[request.id] = stream
        return stream

    def _check_draining(self) -> None:
        if self.draining:
            raise NotReady("the server is shutting down", code="draining", retry_after=5.0)

    # -- outputs

    def _hand_over(self, replica: Replica, output: Output) -> None:
        """Deliver an output; an error on the way ends this request and no other."""
        try:
            self._deliver(replica, output)
        except Exception as error:
            log.error("an output was lost: %s", where(error))
            stream = self._streams.get(output.request_id)
            if stream is not None:
                _cancel(stream)
                stream.end(Finish.ERROR, "an output was lost", RequestFailed.code)

    def _deliver(self, replica: Replica, output: Output) -> None:
        """Hand an output to its stream, unless its choice has already ended or is no longer at ``replica``."""
        stream = self._streams.get(output.request_id)
        # Checked before this output is added: the consumer has had no time to take it, and one may be large.
        too_slow = stream is not None and self._too_slow(stream)
        if stream is None or stream.replica is not replica or not stream.put(output):
            self._counts["dropped_outputs"] += 1
        elif too_slow and stream.open:
            self._counts["slow_readers"] += 1
            _cancel(stream)
            stream.end(Finish.ERROR, "the client reads too slowly", "slow_reader")

    def _too_slow(self, stream: Stream) -> bool:
        return stream.n_bytes > self._max_buffered or stream.lag_s > self._slow_reader_s

    # -- ends

    def _fail_asked(self, message: str, code: str | None, replica: Replica | None = None) -> None:
        """Commands that were not answered, by ``replica`` or anyone, end in error."""
        for asked, answer in self._asked.values():
            if not answer.done() and replica in (None, asked):
                answer.set_exception(error_of(code, message))

    def _fail_all(self, message: str, code: str | None, *, cancel: bool) -> int:
        """End every running request in error; returns how many there were."""
        self._fail_asked(message, code)
        n = 0
        for stream in self._streams.values():
            if cancel and stream.open:
                _cancel(stream)
            n += stream.end(Finish.ERROR, message, code)
        return n

    def _on_handles(self, message: HandleReply) -> None:
        _, answer = self._asked.get(message.id, (None, None))
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(message)
        else:
            field = message.error_field
            answer.set_exception(error_of(message.error_code, message.error, field=field))

    def _on_fault(self, replica: Replica, fault: Fault) -> None:
        """Handle a fault that the engine reports: a fatal one says why it will end; after another one any request
        may lack an output, so all go on behind what came."""
        self._counts["faults"] += 1
        if not fault.fatal:
            log.error("engine: %s", fault.message)
            self._fail_asked(fault.message, RequestFailed.code, replica)
            self._give_up(replica, fault.message)
            self._go_on()

    def _give_up(self, replica: Replica, why: str) -> None:
        """End the work of ``replica`` on all its requests, which wait to go on."""
        self._resumption.park(replica.give_up(), why, RequestFailed.code)


def _cancel(stream: Stream, index: int | None = None) -> None:
    """End the work on a request, or on one choice of it, wherever it is."""
    if stream.replica is not None:
        stream.replica.cancel(stream.request.id, index)
