"""Operator commands of the admin port: abort requests, reset the prefix cache, take profiles.

The port is off unless asked for, and never that of the public API. ::

    POST /abort                {"request_id": "..."} or {"all": true}
    POST /reset_prefix_cache   running requests are recomputed, named caches at their next use
    POST /start_profile  /stop_profile
"""

from __future__ import annotations

import uuid
from typing import Any

from aiohttp import web

from jserve.api.http.errors import HttpError
from jserve.api.http.front import Front, json_response
from jserve.api.request.fields import Fields, validate
from jserve.engine.wire import Control
from jserve.errors import BadRequest


class AbortBody(Fields):
    """POST /abort."""

    request_id: str | None = None
    all: bool | None = None


class NothingBody(Fields):
    """POST without fields."""


async def abort(request: web.Request, front: Front) -> web.StreamResponse:
    """End the requests of one label (their ``x-request-id``), or all."""
    body: AbortBody = await front.read(request, lambda raw: validate(AbortBody, raw, strict=True))
    if (body.request_id is None) == (not body.all):
        raise BadRequest("give either request_id or all", field="request_id")
    return json_response({"aborted": front.running.abort(body.request_id)})


async def reset_prefix_cache(request: web.Request, front: Front) -> web.StreamResponse:
    return await _controlled(request, front, "reset_prefix_cache")


async def start_profile(request: web.Request, front: Front) -> web.StreamResponse:
    return await _controlled(request, front, "start_profile")


async def stop_profile(request: web.Request, front: Front) -> web.StreamResponse:
    return await _controlled(request, front, "stop_profile")


async def _controlled(request: web.Request, front: Front, action: Any) -> web.StreamResponse:
    if request.can_read_body:
        await front.read(request, lambda raw: validate(NothingBody, raw, strict=True))
    try:
        await front.engine.control(Control(id=uuid.uuid4().hex, action=action))
    except BadRequest as e:
        if e.code in ("profiler_active", "profiler_idle"):
            raise HttpError(409, e.message, code=e.code) from None
        raise
    return json_response({"status": "done"})
