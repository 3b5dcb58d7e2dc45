"""Runs one replica: an engine in a thread of this process, and the fronts that use it.

It owns the connections of fronts, each with what it is to be told next. A front that is gone takes its requests with
it; an engine that is gone takes the process with it, so that whoever started it starts another one::

    front --fleet.link--> engine     Submit, Cancel, Create, HandleCommand, Control
    front <--fleet.link-- engine     Ready, Outputs, Stats, HandleReply, Fault
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import threading
import time
from collections import deque
from typing import Any

import msgspec

from jserve.config import EngineConfig
from jserve.engine.client import InprocClient
from jserve.engine.engine import Engine
from jserve.engine.kv_events import KvEvents
from jserve.engine.process import EXIT_CRASH, Build, OnProgress
from jserve.engine.view import PageEvent
from jserve.engine.wire import (
    Cancel,
    Control,
    Create,
    Fault,
    Gone,
    HandleCommand,
    HandleReply,
    Message,
    Outputs,
    Ready,
    Stats,
    Submit,
    ToEngine,
    decoder,
    pack,
)
from jserve.errors import EngineDead
from jserve.fleet.autoscale import LOAD_VALUES
from jserve.fleet.describe import describe
from jserve.fleet.exits import machine_id
from jserve.fleet.link import Endpoint, FrameLink, FrontServer
from jserve.fleet.serve_policy import RETIRED
from jserve.types import Output, Request

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LAST_WORDS_S = 0.5
"""Between the end of the engine and that of its process."""
RETIRED_S = 10.0
"""A retired replica lives on for so long, until Serve has heard of it: one that is gone by then is not replaced."""


class FrontConnection:
    """One front's side: its end of the connection, and the requests that are its own."""

    def __init__(self, link: FrameLink) -> None:
        self.link = link
        self.requests: dict[tuple[str, int], int] = {}
        """By id and attempt, choices that are open."""
        self.n_taken = 0
        """Requests of this front that the engine has read."""
        self._unread: deque[int] = deque()
        """Numbers of those that it has not."""

    def put(self, message: Message) -> None:
        """Send a message, from any thread. Raises TooLarge."""
        self.link.send(pack(message))

    def submitted(self, number: int, request: Request) -> None:
        """``request`` was handed to the engine as its ``number``-th."""
        self.requests[request.id, request.attempt] = len(request.open_choices)
        self._unread.append(number)

    def has(self, out: Output) -> bool:
        return (out.request_id, out.attempt) in self.requests

    def ended(self, out: Output) -> None:
        """One choice of the front's own has its end."""
        key = out.request_id, out.attempt
        self.requests[key] -= 1
        if not self.requests[key]:
            del self.requests[key]

    def told(self, n_read: int) -> int:
        """Of this front's requests, how many are among the first ``n_read`` of the engine."""
        while self._unread and self._unread[0] < n_read:
            self._unread.popleft()
            self.n_taken += 1
        return self.n_taken


class EngineHost:
    """One engine, started when this returns.

    Args:
        config: ``EngineConfig.flat()``.
        build: ``module:function`` of an ``engine.process.Build``.
        address: of this machine, as fronts reach it.
        end: ends the process.

    Raises:
        EngineDead: the engine did not start; says why.
    """

    def __init__(
        self, config: dict[str, Any], build: str, address: str = LOOPBACK, end: Any = os._exit
    ) -> None:
        self._end = end
        self._server = FrontServer(address, self._joined, self._took, self._left)
        self._lock = threading.Lock()
        self._fronts: dict[FrameLink, FrontConnection] = {}
        self._asked: dict[str, FrontConnection] = {}
        self._pages: set[bytes] = set()
        self._stats = Stats()
        self._n_submitted = 0
        self._why, self._gone = "", False
        self._retired = False
        self._decoder = decoder(ToEngine)
        self._started = threading.Event()
        self._client = InprocClient(EngineConfig.of(**config), described(build), alone=True)
        self._client.start(self._on_message)
        self._started.wait()
        if self._gone:
            raise EngineDead(f"the engine did not start: {self._why}")

    def check_health(self) -> None:
        """Raises EngineDead where the engine is gone."""
        if self._gone:
            raise EngineDead(self._why)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures that ``fleet.serve_policy`` reads; called by Serve, which finds this method by its name."""
        values = self._stats.values
        load = {name: values.get(name, 0.0) for name in LOAD_VALUES}
        return {**load, RETIRED: float(self._retired)}

    async def retire(self, name: str) -> None:
        """Nobody needs this replica, called ``name``, any more: it ends soon, and is not replaced."""
        if not self._retired:
            self._retired = True
            timer = threading.Timer(RETIRED_S, self._client.close)
            timer.daemon = True
            timer.start()

    async def endpoint(self, name: str) -> Endpoint:
        """The endpoint for fronts. ``name`` is this replica's, for whoever routes the call."""
        return await self._server.endpoint()

    # -- fronts, on the event loop

    def _joined(self, link: FrameLink) -> None:
        front = FrontConnection(link)
        with self._lock:
            front.put(Ready(info=self._client.info))
            pages = [PageEvent(True, digest) for digest in self._pages]
            front.put(self._as_told(front, self._stats, pages))
            self._fronts[link] = front
        if self._gone:
            link.close()

    def _left(self, link: FrameLink) -> None:
        with self._lock:
            front = self._fronts.pop(link)
        for id, _ in list(front.requests):
            self._client.cancel(id)

    def _took(self, link: FrameLink, payload: bytes) -> None:
        self._send(self._fronts[link], self._decoder.decode(payload))

    def _send(self, front: FrontConnection, message: Message) -> None:
        match message:
            case Submit() | Create():
                arrival = 0.0 if message.age_s is None else time.monotonic() - message.age_s
                request = dataclasses.replace(message.request, arrival=arrival)
                with self._lock:
                    front.submitted(self._n_submitted, request)
                    self._n_submitted += 1
                if isinstance(message, Submit):
                    self._client.submit(request)
                else:
                    self._client.create(request, message.ttl_s)
            case Cancel():
                self._client.cancel(message.request_id, message.index)
            case HandleCommand() | Control():
                self._asked[message.id] = front
                self._client.ask(message)

    # -- the engine's thread

    def _on_message(self, message: Message) -> None:
        with self._lock:
            match message:
                case Ready():
                    self._started.set()
                case Outputs():
                    self._deal(message)
                case Stats():
                    self._on_stats(message)
                case HandleReply():
                    front = self._asked.pop(message.id, None)
                    if front is not None:
                        front.put(message)
                case Fault():
                    self._why = message.message
                    for front in self._fronts.values():
                        front.put(message)
                case Gone():
                    self._on_gone(message)

    def _deal(self, message: Outputs) -> None:
        """Each front gets the outputs of its own requests."""
        for front in self._fronts.values():
            own = [out for out in message.outputs if front.has(out)]
            if own:
                front.put(Outputs(step=message.step, outputs=own))
            for out in own:
                if out.finish is not None:
                    front.ended(out)

    def _on_stats(self, stats: Stats) -> None:
        for event in stats.pages:
            (self._pages.add if event.added else self._pages.discard)(event.digest)
        self._stats = msgspec.structs.replace(stats, steps=[], pages=[])
        for front in self._fronts.values():
            front.put(self._as_told(front, stats, stats.pages))

    def _as_told(self, front: FrontConnection, stats: Stats, pages: list[PageEvent]) -> Stats:
        """``stats`` with ``pages``, where only the front's own requests count as read."""
        view = stats.view
        if view is not None:
            view = msgspec.structs.replace(view, n_taken=front.told(view.n_taken))
        return msgspec.structs.replace(stats, view=view, pages=pages)

    def _on_gone(self, message: Gone) -> None:
        self._gone = True
        self._why = self._why or f"it ended with code {message.exit_code}"
        for link in self._fronts:
            link.close()
        if self._started.is_set():
            if not self._retired:
                log.error("the engine is gone, and this replica with it: %s", self._why)
            code = 0 if self._retired else message.exit_code or EXIT_CRASH
            timer = threading.Timer(LAST_WORDS_S, self._end, [code])
            timer.daemon = True
            timer.start()
        self._started.set()


def described(build: str) -> Build:
    """``build`` with an engine that describes itself to fronts, and publishes its KV events as one of several."""
    module, _, name = build.partition(":")

    def built(config: EngineConfig, progress: OnProgress) -> tuple[Engine, dict[str, Any]]:
        cache = config.cache
        own = {"kv_events": "", "kv_events_replay": "", "kv_events_topic": ""}
        alone = dataclasses.replace(config, cache=dataclasses.replace(cache, **own))
        engine, info = getattr(importlib.import_module(module), name)(alone, progress)
        page_size = engine.scheduler.resources.cache.page_size
        limits = engine.scheduler.limits
        names = {"page_size": page_size, "short_context": limits.short_context}
        own_facts = {"pid": os.getpid(), "machine": machine_id()}
        info = {**info, **names, "kv_features": sorted(limits.kv_names), **own_facts}
        if not cache.kv_events:
            describe(engine)
            return engine, info
        events = KvEvents(
            cache.kv_events, cache.kv_events_replay, cache.kv_events_topic, page_size, ranked=True
        )
        describe(engine, events)
        return engine, {**info, "kv_events": events.address}

    return built
