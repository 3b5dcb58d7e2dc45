"""Handles a request from JSON to reply, the same for every API dialect.

It owns the order: read, check, prepare, run, answer; and that a status is sent only when the engine has taken the
request. ::

    body -> ask (fields) --> requests (tokens) -> first piece --+-- JSON            (whole)
            400, 404         400, 503             4xx, 5xx      +-- 200, events     (stream)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from jserve.api.http.front import (
    RESUMED,
    TRACE,
    Front,
    ignored_header,
    json_response,
    reported,
    request_id,
)
from jserve.api.http.sse import EventStream
from jserve.api.ops.metrics import RequestTimer
from jserve.api.reply.generate import Generation, TextPiece
from jserve.api.reply.reply import Reply
from jserve.api.request.parsed import ParsedRequest, Served
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request

Reader = Callable[[Mapping[str, Any], Served], ParsedRequest]
"""From a JSON object. Raises BadRequest, NotFound."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API dialect: how a request is parsed and a reply written."""

    read: Reader
    reply: Callable[[ParsedRequest, Served, TextTokenizer, Sequence[Request]], Reply]


async def handle(request: web.Request, front: Front, dialect: Dialect) -> web.StreamResponse:
    """Answers ``request`` in ``dialect``, streamed or whole.

    Raises:
        JserveError: something went wrong before a status was sent.
    """
    ask = await read_request(request, front, dialect.read)
    requests = await front.prepare.requests(ask)
    reply = dialect.reply(ask, front.served, front.prepare.tokenizer, requests)
    headers = ignored_header(ask.ignored)
    with generation(request, front, ask, requests) as run:
        if ask.stream:
            return await _stream(request, front, run, reply, headers)
        return await _whole(run, reply, headers)


async def read_request(request: web.Request, front: Front, read: Reader) -> ParsedRequest:
    """The body of ``request``, read by ``read``; a name that it gives the request is taken over.

    Raises:
        JserveError: as ``Front.read`` does; Overloaded, RateLimited as the engine answered a moment ago.
    """
    served, trace = front.served, request[TRACE]
    tenant = trace.tenant.name

    def checked(raw: Mapping[str, Any]) -> ParsedRequest:
        front.refusals.check(raw.get("lane"), tenant)  # before the work of reading it closely
        return read(raw, served)

    ask: ParsedRequest = await front.read(request, checked)
    if ask.body.request_id is not None:
        trace.id = request_id(ask.body.request_id)
    return ask.of(tenant)


@contextlib.contextmanager
def generation(
    request: web.Request,
    front: Front,
    ask: ParsedRequest,
    requests: Sequence[Request],
    *,
    charge_output: bool = True,
) -> Iterator[Generation]:
    """``requests`` ready to run; inside, they are timed, charged to their tenant and can be aborted.

    Args:
        charge_output: False where the tokens drawn are not what was asked for.
    """
    trace = request[TRACE]
    timer = RequestTimer(front.metrics, requests, trace.arrival)
    run = Generation(front.engine, front.prepare.tokenizer, requests, timer, ask.named)
    try:
        with (
            trace.account.answer(run.usage.prompt, lambda: charge_output * run.usage.completion),
            front.running.entered(trace.id, run),
            front.refusals.noted(ask.options.lane, ask.options.tenant),
        ):
            yield run
    finally:
        timer.end(run.usage.cached)


async def _whole(run: Generation, reply: Reply, headers: Mapping[str, str]) -> web.Response:
    async with aclosing(run.pieces()) as pieces:
        found = [piece async for piece in pieces]
    told = {**headers, **(RESUMED if run.resumed else {})}
    return json_response(reply.whole(found, run.usage), headers=told)


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
            request,
            keep_alive_s=keep_alive,
            named=reply.named,
        )
        async with await stream.open(headers):
            try:
                await stream.send(reply.chunks(await first, lambda: run.usage))
                async for piece in pieces:
                    if run.resumed:
                        await stream.remark_once(RESUMED)
                    await stream.send(reply.chunks(piece, lambda: run.usage))
                return await stream.finish(reply.last(run.usage), reply.done)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as e:
                return await stream.fail(reply.failed(reported(request, e)))


@contextlib.asynccontextmanager
async def _started(pieces: Any):
    """A task for the first piece, over on leaving: a running generator cannot be closed.

    Leaving waits only for a task that is not done: a client that has read the end of its stream may close
    the connection, which cancels the handler at whatever it awaits.
    """
    first: asyncio.Task[TextPiece] = asyncio.ensure_future(anext(pieces))
    first.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio logs it
    try:
        yield first
    finally:
        if not first.done():
            first.cancel()
            await asyncio.wait({first})
