"""Request middleware: id, authentication, error responses, access log, metrics.

The log line holds our own words only: method, route (not the path), status, milliseconds and the request id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.hdrs import METH_ALL

from jserve.api.http.auth import Access
from jserve.api.http.error_format import OPENAI, ErrorFormat
from jserve.api.http.errors import Forbidden, HttpError, error_headers
from jserve.api.http.front import (
    TRACE,
    Front,
    Trace,
    json_response,
    log,
    reported,
    request_id,
)
from jserve.api.http.unknown_path import explained
from jserve.errors import JserveError

Levels = Mapping[str, Access]
ErrorFormats = Mapping[str, ErrorFormat]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CLIENT_LEFT = 499


def route_name(request: web.Request) -> str:
    """The route's pattern, or "unknown": never text from a client."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def make_middlewares(front: Front, access: Levels, error_formats: ErrorFormats) -> list[Any]:
    """[around, guard]: errors, ids, log and counts outside; keys and quotas inside.

    Args:
        access: level of every route by its pattern; a route that is not in it takes a key.
        error_formats: error format of a route, by its pattern; a route that is not in it has OpenAI's.
    """

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[TRACE] = Trace(
            id=request_id(request.headers.get("x-request-id")),
            arrival=time.monotonic(),
            error_format=error_formats.get(route_name(request), OPENAI),
        )
        status = CLIENT_LEFT
        front.metrics.in_flight.inc()
        try:
            response = await _answered(request, handler, access)
            if front.engine.draining and not response.prepared:
                response.force_close()
            status = response.status
            return response
        finally:
            front.metrics.in_flight.dec()
            _record(front, request, status)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        level, trace = access.get(route_name(request), Access.USER), request[TRACE]
        if level is Access.OPEN:
            return await handler(request)
        if level is Access.USER or front.keys.any_admin:
            trace.tenant = front.keys.check(request.headers)
        if level is Access.ADMIN and front.keys.any_admin and not trace.tenant.admin:
            raise Forbidden("this path takes an operator's key", code="admin_only")
        if request.method != "POST" or level is Access.ADMIN:
            return await handler(request)
        trace.account = front.accounts.of(trace.tenant.name, trace.tenant.quota)
        with trace.account.request():
            return await handler(request)

    return [around, guard]


async def expect(request: web.Request) -> web.StreamResponse | None:
    """Answers an ``Expect`` header; aiohttp asks this before any middleware runs."""
    if request.version < HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        response = error_response(HttpError(417))
        response.headers["x-request-id"] = request_id(request.headers.get("x-request-id"))
        return response
    if (request.content_length or 0) > request.client_max_size:
        return None  # the answer is a refusal, and nobody should send the body for that
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The bytes of this line are not those of the answer, which may still be replaced by an error.
    request.writer.output_size = 0
    return None


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every answer, streams included; a signal, called before the headers go out."""
    response.headers["Server"] = "jserve"
    if (trace := request.get(TRACE)) is not None:
        response.headers["x-request-id"] = trace.id
        response.headers["request-id"] = trace.id  # Anthropic's name
        # In a stream the answer's own tokens are not yet spent.
        response.headers.update(trace.error_format.limits(trace.account.standings))


async def _answered(request: web.Request, handler: Handler, access: Levels) -> web.StreamResponse:
    try:
        return await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as e:
        allow = getattr(e, "headers", {}).get("Allow")
        error = reported(request, explained(request, e, access))
        return error_response(error, request[TRACE].error_format, allow=allow)


def error_response(
    error: JserveError, error_format: ErrorFormat = OPENAI, *, allow: str | None = None
) -> web.Response:
    headers = error_headers(error) | ({"Allow": allow} if allow else {})
    response = json_response(error_format.error(error), status=error.status, headers=headers)
    if error.status in (408, 413) or error.code == "invalid_body":
        # The rest of the body is still on its way: it must not be read as the next request.
        response.force_close()
    return response


def _record(front: Front, request: web.Request, status: int) -> None:
    route = route_name(request)
    front.metrics.answered(route, status)
    trace = request[TRACE]
    ms = 1000 * (time.monotonic() - trace.arrival)
    log.info(
        "%s %s %d %.1f ms %s%s",
        request.method if request.method in METH_ALL else "?",
        route,
        status,
        ms,
        trace.id,
        f" {trace.error}" if trace.error else "",
    )
