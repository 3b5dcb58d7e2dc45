"""Client connections with the limits that aiohttp lacks: header, idle and write timeouts.

It owns how long a request's head may take and a reader of answers, the size of the send buffer, the cap on
connections and the JSON of errors that no handler sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler

from jserve.api.http.errors import HttpError, as_error, error_body
from jserve.api.http.front import Limits, request_id

log = logging.getLogger("jserve.api")
_CLIENT_FAULTS = (web.RequestPayloadError, HttpProcessingError)


class Connection(RequestHandler):
    """aiohttp's connection and what it lacks: two timers, a small send buffer, JSON errors."""

    __slots__ = ("_body", "_header_timer", "_limits", "_reader_timer")

    def __init__(self, manager: web.Server, limits: Limits, **options: Any) -> None:
        super().__init__(manager, **options)
        self._limits = limits
        self._header_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._body: Any = EMPTY_PAYLOAD  # of the latest request; at its end, what comes is a head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._manager.connections) > self._limits.max_connections:  # type: ignore[union-attr]
            transport.write(_REFUSAL)  # type: ignore[attr-defined]
            transport.close()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._limits.send_buffer)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        # The parser does not say what it keeps. So the last byte comes alone: if the latest request is
        # complete without it, it belongs to the head of the next one.
        if len(data) > 1:
            self._feed(data[:-1])
        self._feed(data[-1:])

    def _feed(self, data: bytes) -> None:
        before, at_head = self._request_count, self._body.is_eof()
        super().data_received(data)
        if self._request_count > before:
            self._stop_timer()
            if self._messages:
                self._body = self._messages[-1][1]
        elif at_head and data and self._header_timer is None:
            self._await_headers()

    def pause_writing(self) -> None:
        """More waits for the reader than the kernel takes, of a stream or of one long answer."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._stop_watching()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what the parser refused, or a fault outside of every middleware, with an error body of ours."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if isinstance(exc, ContentEncodingError):
            status = 415  # one that this process cannot undo: aiohttp takes it for a broken message
        error = as_error(exc) if status >= 500 and exc is not None else HttpError(status)
        response = web.Response(
            body=orjson.dumps(error_body(error)),
            status=error.status,
            content_type="application/json",
            headers={"x-request-id": request_id(None), "Server": "jserve"},
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """aiohttp would log the exception with its words; these may hold a prompt."""
        exc = kwargs.get("exc_info")
        level = logging.DEBUG if isinstance(exc, _CLIENT_FAULTS) else logging.ERROR
        log.log(level, "connection failed: %s", type(exc).__name__)

    def _await_headers(self) -> None:
        self._header_timer = self._loop.call_later(self._limits.header_timeout_s, self._give_up)

    def _give_up(self) -> None:
        """The head of the next request did not come; no answer is cut off for it."""
        if self._current_request is not None or self._messages:
            self._await_headers()
        else:
            self.force_close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _watch_reader(self) -> None:
        left = self._unread()
        self._reader_timer = self._loop.call_later(
            self._limits.write_timeout_s, self._check_reader, left
        )

    def _check_reader(self, left: int) -> None:
        """A client that took something of the ``left`` bytes meanwhile may go on; others are disconnected. More may
        have been written since, but not for long: a writer waits soon."""
        if self._unread() != left:
            self._watch_reader()
        elif self.transport is not None:
            log.info("a client stopped reading")
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _unread(self) -> int:
        """Bytes that wait on our side of the connection."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()


def _refusal() -> bytes:
    body = orjson.dumps(
        {
            "error": {
                "message": "too many connections",
                "type": "server_error",
                "param": None,
                "code": "overloaded",
            }
        }
    )
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Retry-After: 1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _refusal()
