"""Converts any exception into a ``JserveError`` and that into an HTTP error body.

It owns the words and bounds of error answers (OpenAI's ``{"error": {message, type, param, code}}``). Nothing here
ever holds a traceback, a path, a prompt or a key.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from aiohttp import web

from jserve.errors import MAX_CLIENT_TEXT, BadRequest, EngineDead, JserveError, RequestFailed

MAX_MESSAGE = 300

_HTTP = {
    404: ("not_found", "there is nothing at this path"),
    405: ("method_not_allowed", "this path does not take this method"),
    408: ("body_timeout", "the request body did not arrive in time"),
    413: ("body_too_large", "the request body is larger than this server takes"),
    414: ("url_too_long", "the request line is too long"),
    415: ("unsupported_media_type", "this content type or encoding is not supported"),
    417: ("expectation_failed", "only 'Expect: 100-continue' is supported"),
    431: ("headers_too_large", "the request headers are too large"),
}


class HttpError(JserveError):
    """An answer decided by HTTP itself: wrong path, method, size or media type."""

    kind = "invalid_request_error"
    code = "http_error"

    def __init__(self, status: int, message: str | None = None, *, code: str | None = None) -> None:
        usual, words = _HTTP.get(status, ("invalid_request", "the request could not be read"))
        super().__init__(message or words, code=code or usual)
        self.status = status
        self.kind = {408: "timeout_error", 409: "conflict_error"}.get(status, self.kind)


class Forbidden(JserveError):
    status = 403
    kind = "permission_error"
    code = "forbidden"


class Aborted(JserveError):
    """An operator ended this request; to send it again is for the client to decide."""

    status = 409
    kind = "conflict_error"
    code = "request_aborted"


def as_error(exc: BaseException) -> JserveError:
    """The error a client gets for ``exc``; an unknown one becomes a 500 without details."""
    if isinstance(exc, EngineDead):
        return EngineDead("the engine is not running; try again later", retry_after=5)
    if isinstance(exc, JserveError):
        return exc
    if isinstance(exc, web.HTTPException):
        return HttpError(exc.status_code)
    if isinstance(exc, web.RequestPayloadError):
        return BadRequest("the request body could not be decoded", code="invalid_body")
    if isinstance(exc, asyncio.TimeoutError):
        return HttpError(408)
    return RequestFailed("internal error", code="internal_error")


def error_body(error: JserveError) -> dict[str, Any]:
    """The JSON body: ``message`` of at most 300 characters, ``type``, ``param`` and ``code``."""
    message = error.message.encode("utf-8", "replace").decode()
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 3] + "..."
    param = error.field[:MAX_CLIENT_TEXT] if error.field else None
    return {
        "error": {"message": message, "type": error.kind, "param": param, "code": error.code},
    }


def error_headers(error: JserveError) -> dict[str, str]:
    """Headers that steer a client's retries: how long to wait, or that retrying is of no use."""
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1)))
    if error.status == 500 or isinstance(error, Aborted):
        headers["x-should-retry"] = "false"
    return headers
