"""Operator commands of the admin port: abort requests, reset the prefix cache, take profiles.

The port is off unless asked for, and never that of the public API. ::

    POST /abort                {"request_id": "..."} or {"all": true}
    POST /reset_prefix_cache   running requests are recomputed, named caches at their next use
    POST /start_profile  /stop_profile
    POST /pause  /resume       {"mode": "abort", "wait" or "keep"}; GET /is_paused
    POST /sleep  /wake_up      {"tags": ["kv_cache", "weights"]}; GET /is_sleeping
    POST /update_weights       {"weight_dir": "...", "version": "...", "running": "recompute"}; GET /weight_info
    POST /rollback_weights     with replicas: back to the previous weights
    GET  /replicas             each with its state, and where it publishes its KV events

Names and modes are vLLM's; those of ``/pause``, ``/sleep`` and ``/wake_up`` may stand in the query, as its clients send
them.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import Any, Literal

from aiohttp import web

from jserve.api.http.errors import HttpError
from jserve.api.http.front import Front, json_response
from jserve.api.request.fields import Fields, validate
from jserve.engine.wire import Control
from jserve.errors import BadRequest, WeightsError


class AbortBody(Fields):
    """POST /abort."""

    request_id: str | None = None
    all: bool | None = None


class NothingBody(Fields):
    """POST without fields."""


class PauseBody(Fields):
    """POST /pause."""

    mode: Literal["abort", "wait", "keep"] | None = None
    """Running requests end, are waited for, or stand still."""


class TagsBody(Fields):
    """POST /sleep and /wake_up."""

    tags: list[Literal["kv_cache", "weights"]] | None = None
    """The memory that leaves the device, or comes back; by default both."""


class AnalysisBody(Fields):
    """Bounds of a canary that is promoted or rolled back by what is measured, see ``fleet.canary.Analysis``."""

    min_requests: int | None = None
    max_error_share: float | None = None
    max_ttft_ratio: float | None = None
    max_tpot_ratio: float | None = None
    quantile: float | None = None
    progress_deadline_s: float | None = None


class WeightsBody(Fields):
    """POST /update_weights."""

    weight_dir: str
    """A directory of safetensors or Orbax that this server can read."""
    version: str | None = None
    running: Literal["recompute", "mix", "finish", "beside", "abort"] | None = None
    """The fate of running requests."""
    canary: float | None = None
    """With replicas, the share of new requests that get the new weights at first; by default all get them."""
    analysis: AnalysisBody | None = None
    """Of a canary: it is promoted or rolled back by these bounds; by default that is asked for."""


_MODES = {"wait": "finish"}
_TAGS: dict[str, str] = {"kv_cache": "kv"}
"""vLLM's name -> ours, where they differ."""


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


async def pause(request: web.Request, front: Front) -> web.StreamResponse:
    body = await _body(request, front, PauseBody, dict(request.query))
    mode = body.mode or "abort"
    return json_response(await _told(front, "pause", running=_MODES.get(mode, mode)))


async def resume(request: web.Request, front: Front) -> web.StreamResponse:
    await _body(request, front, NothingBody, {})
    return json_response(await _told(front, "resume"))


async def sleep(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response(await _told(front, "sleep", parts=await _tags(request, front)))


async def wake(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response(await _told(front, "wake", parts=await _tags(request, front)))


async def update_weights(request: web.Request, front: Front) -> web.StreamResponse:
    body = await _body(request, front, WeightsBody, {})
    given = {
        "version": body.version or "",
        "running": body.running or "",
        "canary": body.canary or 0.0,
        "analysis": body.analysis and body.analysis.model_dump(exclude_none=True),
    }
    return json_response(await _told(front, "update_weights", source=body.weight_dir, **given))


async def rollback_weights(request: web.Request, front: Front) -> web.StreamResponse:
    await _body(request, front, NothingBody, {})
    return json_response(await _told(front, "rollback_weights"))


async def weight_info(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response(await _told(front, "weight_info"))


async def replicas(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response({"replicas": [asdict(one) for one in front.engine.replicas()]})


async def is_paused(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response({"is_paused": (await _told(front, "weight_info"))["paused"]})


async def is_sleeping(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response({"is_sleeping": bool((await _told(front, "weight_info"))["asleep"])})


async def _tags(request: web.Request, front: Front) -> list[str]:
    tags = request.query.getall("tags", [])
    body = await _body(request, front, TagsBody, {"tags": tags} if tags else {})
    wanted: list[str] = body.tags or []
    return [_TAGS.get(tag, tag) for tag in wanted]


async def _body(request: web.Request, front: Front, kind: Any, query: dict[str, Any]) -> Any:
    """The body, with what ``query`` has beside it."""

    def make(raw: dict[str, Any]) -> Any:
        return validate(kind, {**query, **raw}, strict=True)

    return await front.read(request, make) if request.can_read_body else make({})


async def _told(front: Front, action: Any, **given: Any) -> dict[str, Any]:
    """The engine's answer to a command."""
    command = Control(id=uuid.uuid4().hex, action=action, **given)
    try:
        return await front.engine.control(command)
    except WeightsError as e:
        raise BadRequest(e.message, field=e.field, code=e.code) from None


async def _controlled(request: web.Request, front: Front, action: Any) -> web.StreamResponse:
    await _body(request, front, NothingBody, {})
    try:
        await front.engine.control(Control(id=uuid.uuid4().hex, action=action))
    except BadRequest as e:
        if e.code in ("profiler_active", "profiler_idle"):
            raise HttpError(409, e.message, code=e.code) from None
        raise
    return json_response({"status": "done"})
