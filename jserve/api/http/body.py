"""Reads a request body, bounded in size, time and depth, as strict JSON.

orjson already refuses NaN, infinities, numbers beyond a double, lone surrogates, bytes that are not UTF-8 and a
byte order mark.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from jserve.api.http.errors import HttpError
from jserve.errors import BadRequest

MAX_DEPTH = 64
_CHARSETS = (None, "utf-8", "utf8")
_ENCODINGS = ("identity", "gzip", "deflate")


async def read_body(request: web.Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The body, inflated.

    Raises:
        HttpError: 408 late, 413 too large (announced or inflated), 415 not JSON in UTF-8.
        BadRequest: its encoding is broken.
    """
    _check_headers(request, max_bytes)
    try:
        return await asyncio.wait_for(request.read(), timeout_s)
    except web.RequestPayloadError:
        raise BadRequest("the request body could not be decoded", code="invalid_body") from None
    except TimeoutError:
        raise HttpError(408) from None


def _check_headers(request: web.Request, max_bytes: int) -> None:
    if (request.content_length or 0) > max_bytes:
        raise HttpError(413)
    if request.headers.get("Content-Encoding", "identity").lower() not in _ENCODINGS:
        raise HttpError(415, "content-encoding must be gzip, deflate or identity")
    kind = request.content_type
    stated = "Content-Type" in request.headers
    if stated and kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(415, "content-type must be application/json")
    charset = request.charset
    if (charset.lower() if charset else None) not in _CHARSETS:
        raise HttpError(415, "the body must be UTF-8")


def parse_object(raw: bytes) -> dict[str, Any]:
    """``raw`` as a JSON object of at most 64 levels.

    Raises:
        BadRequest: malformed, too deep, or not an object.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise BadRequest(f"the body is not valid JSON: {e.msg}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_json")
