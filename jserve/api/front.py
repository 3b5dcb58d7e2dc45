"""Everything a handler needs, in one value, and the request's path from JSON to an answer.

Owns the order: read, check, prepare, run, answer; and that a status is sent only when the engine
has taken the request. Must not know a dialect's fields: those come in as functions. ::

    body -> wish (fields) -> requests (tokens) -> first piece --+-- JSON            (whole)
            400, 404         400, 503             4xx, 5xx      +-- 200, events     (stream)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from aiohttp import web

from jserve.api.ask import ModelCard, Wish
from jserve.api.auth import Keys
from jserve.api.body import parse_object, read_body
from jserve.api.errors import as_error, where
from jserve.api.generate import Engine, Generation, Piece, Reply
from jserve.api.metrics import Metrics, RequestTimer
from jserve.api.prepare import Preparer
from jserve.api.sse import EventStream
from jserve.config import ServerOptions
from jserve.engine.wire import Handle, StepRecord
from jserve.types import HandleInfo, Output, Request

log = logging.getLogger("jserve.api")

BIG_BODY = 64 << 10
"""Bodies above this are parsed in a thread."""


class ServedEngine(Engine, Protocol):
    """What the front needs of ``AsyncEngine``."""

    gave_up: asyncio.Event
    gave_up_reason: str
    steps: deque[tuple[int, StepRecord]]

    @property
    def counters(self) -> Mapping[Any, int]: ...

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def n_active(self) -> int: ...

    def healthy(self) -> bool: ...

    def stats(self) -> Any: ...

    async def drain(self, timeout_s: float) -> int: ...

    async def create(self, request: Request, ttl_s: float) -> list[Output]: ...

    async def handles(self, message: Handle) -> list[HandleInfo]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one connection that are no options."""

    header_timeout_s: float = 10.0
    body_timeout_s: float = 20.0
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    """How long a connection may stay open between requests."""
    send_buffer: int = 128 << 10
    """Bytes of SO_SNDBUF: what a reader that does not read can hide from us."""
    max_connections: int = 4096


@dataclass(slots=True, kw_only=True)
class Trace:
    """What is known of one HTTP request for headers, log and metrics."""

    id: str
    """The client's label, or ours; never a key."""
    arrival: float
    """Monotonic seconds."""
    error: str | None = None
    """Code of the error it ended with."""
    tenant: str = ""
    """Whose key it came with; "" where the server has no keys."""


TRACE = web.RequestKey("trace", Trace)


@dataclass(slots=True, kw_only=True)
class Front:
    """One server's parts. ``close`` ends its threads."""

    engine: ServedEngine
    prepare: Preparer
    card: ModelCard
    options: ServerOptions
    keys: Keys
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)

    def close(self) -> None:
        self.prepare.close()

    @property
    def max_bytes(self) -> int:
        return int(self.options.max_body_mb * 2**20)

    def tenant(self, request: web.Request) -> str:
        """Who asks."""
        return self.keys.tenant(request.headers)

    async def read(self, request: web.Request, wish: Callable[[dict[str, Any]], Any]) -> Any:
        """``wish`` of the JSON object in the body; big ones are worked on in a thread.

        Raises:
            JserveError: as ``read_body``, ``parse_object`` and ``wish`` do.
        """
        raw = await read_body(
            request, max_bytes=self.max_bytes, timeout_s=self.limits.body_timeout_s
        )
        if len(raw) < BIG_BODY:
            return wish(parse_object(raw))
        return await self.prepare.run(lambda: wish(parse_object(raw)))


async def answer(
    request: web.Request,
    front: Front,
    wish: Wish,
    requests: list[Request],
    reply: Reply,
) -> web.StreamResponse:
    """Runs ``requests`` and answers as ``reply`` shapes it, streamed or whole.

    Raises:
        JserveError: something went wrong before a status was sent.
    """
    timer = RequestTimer(front.metrics, requests, request[TRACE].arrival)
    run = Generation(front.engine, front.prepare.tokenizer, requests, timer)
    headers = ignored_header(wish.ignored)
    try:
        if wish.stream:
            return await _stream(request, front, run, reply, headers)
        return await _whole(run, reply, headers)
    finally:
        timer.end(run.usage.cached)


def ignored_header(ignored: tuple[str, ...]) -> dict[str, str]:
    """Tells a client which of its fields had no effect."""
    return {"x-jserve-ignored-params": ", ".join(ignored)} if ignored else {}


async def _whole(run: Generation, reply: Reply, headers: Mapping[str, str]) -> web.Response:
    async with aclosing(run.pieces()) as pieces:
        found = [piece async for piece in pieces]
    return json_response(reply.whole(found, run.usage), headers=headers)


async def _stream(
    request: web.Request,
    front: Front,
    run: Generation,
    reply: Reply,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    keep_alive = front.options.keep_alive_s
    async with aclosing(run.pieces()) as pieces, _started(pieces) as first:
        # The status waits for the first piece, but not for so long that a proxy takes us for dead.
        await asyncio.wait({first}, timeout=keep_alive or None)
        if first.done():
            first.result()
        stream = EventStream(
            request, keep_alive_s=keep_alive, write_timeout_s=front.limits.write_timeout_s
        )
        async with await stream.open(headers):
            try:
                await stream.send(reply.chunks(await first, lambda: run.usage))
                async for piece in pieces:
                    await stream.send(reply.chunks(piece, lambda: run.usage))
                await stream.send(reply.last(run.usage))
                return await stream.finish(reply.done)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as e:
                return await stream.fail(reported(request, e))


@contextlib.asynccontextmanager
async def _started(pieces: Any):
    """A task for the first piece, over on leaving: a running generator cannot be closed."""
    first: asyncio.Task[Piece] = asyncio.ensure_future(anext(pieces))
    try:
        yield first
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


def reported(request: web.Request, exc: BaseException) -> Any:
    """The client's error for ``exc``; faults of ours are logged by place, without their words."""
    error = as_error(exc)
    if error.code == "internal_error":
        log.error("request %s failed: %s", request[TRACE].id, where(exc))
    request[TRACE].error = error.code
    return error


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(value),
        status=status,
        content_type="application/json",
        charset="utf-8",
        headers=headers,
    )
