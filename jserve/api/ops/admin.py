"""Operator commands of the admin port: abort requests, reset the prefix cache, take profiles.

The port is off unless asked for, and never that of the public API. ::

    POST /abort                {"request_id": "..."} or {"all": true}
    POST /reset_prefix_cache   running requests are recomputed, named caches at their next use
    POST /start_profile  /stop_profile
    POST /pause  /resume       {"mode": "abort", "wait" or "keep", "clear_cache": false}; GET /is_paused
    POST /sleep  /wake_up      {"tags": ["kv_cache", "weights"]}, "mode" of /sleep; GET /is_sleeping
    POST /update_weights       {"weight_dir": "...", "version": "...", "running": "recompute"}; GET /weight_info
    POST /rollback_weights     with replicas: back to the previous weights
    GET  /replicas             each with its state, and where it publishes its KV events

Names and modes are vLLM's. Fields may stand in the query, as its clients send them.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin

from aiohttp import web
from pydantic.fields import FieldInfo

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
    clear_cache: bool | None = None
    """Also what ``/reset_prefix_cache`` does, once they have; by default not."""


class WakeBody(Fields):
    """POST /wake_up."""

    tags: list[Literal["kv_cache", "weights"]] | None = None
    """The memory that comes back, or leaves the device; by default both."""


class SleepBody(WakeBody):
    """POST /sleep."""

    level: int | None = None
    """1: KV is dropped, weights go to host memory."""
    mode: Literal["abort", "wait", "keep"] | None = None
    """As of ``/pause``; those that are kept, which is the default, are computed anew afterwards."""


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
    body: AbortBody = await _body(request, front, AbortBody)
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
    body: PauseBody = await _body(request, front, PauseBody)
    told = await _told(front, "pause", running=_mode(body.mode or "abort"))
    if body.clear_cache:
        told = await _told(front, "reset_prefix_cache")
    return json_response(told)


async def resume(request: web.Request, front: Front) -> web.StreamResponse:
    await _body(request, front, NothingBody)
    return json_response(await _told(front, "resume"))


async def sleep(request: web.Request, front: Front) -> web.StreamResponse:
    body: SleepBody = await _body(request, front, SleepBody)
    _check_level(body)
    mode = _mode(body.mode or "keep")
    return json_response(await _told(front, "sleep", parts=_parts(body), running=mode))


async def wake(request: web.Request, front: Front) -> web.StreamResponse:
    body: WakeBody = await _body(request, front, WakeBody)
    return json_response(await _told(front, "wake", parts=_parts(body)))


async def update_weights(request: web.Request, front: Front) -> web.StreamResponse:
    body: WeightsBody = await _body(request, front, WeightsBody)
    given = {
        "version": body.version or "",
        "running": body.running or "",
        "canary": body.canary or 0.0,
        "analysis": body.analysis and body.analysis.model_dump(exclude_none=True),
    }
    return json_response(await _told(front, "update_weights", source=body.weight_dir, **given))


async def rollback_weights(request: web.Request, front: Front) -> web.StreamResponse:
    await _body(request, front, NothingBody)
    return json_response(await _told(front, "rollback_weights"))


async def weight_info(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response(await _told(front, "weight_info"))


async def replicas(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response({"replicas": [asdict(one) for one in front.engine.replicas()]})


async def is_paused(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response({"is_paused": (await _told(front, "weight_info"))["paused"]})


async def is_sleeping(request: web.Request, front: Front) -> web.StreamResponse:
    return json_response({"is_sleeping": bool((await _told(front, "weight_info"))["asleep"])})


def _mode(mode: str) -> str:
    return _MODES.get(mode, mode)


def _parts(body: WakeBody) -> list[str]:
    return [_TAGS.get(tag, tag) for tag in body.tags or ()]


def _check_level(body: SleepBody) -> None:
    """Raises BadRequest for a level that is not what this engine does."""
    instead = {
        0: "/pause with mode keep holds requests and frees nothing",
        2: "weights stay in host memory (level 1), where /update_weights replaces them after /wake_up",
    }
    if body.level not in (None, 1):
        why = f"must be 1, not {body.level}"
        raise BadRequest(
            f"level {why}; {instead.get(body.level, 'there is no other')}", field="level"
        )
    if body.level is not None and body.tags is not None:
        raise BadRequest("level 1 is both tags: give one of the two fields", field="level")


async def _body(request: web.Request, front: Front, kind: Any) -> Any:
    """The body, with what the query has beside it."""
    query = {
        name: _as_json(kind.model_fields.get(name), request.query.getall(name))
        for name in request.query
    }

    def make(raw: dict[str, Any]) -> Any:
        return validate(kind, {**query, **raw}, strict=True)

    return await front.read(request, make) if request.can_read_body else make({})


_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _as_json(field: FieldInfo | None, texts: list[str]) -> Any:
    """The value that stands in a query as a body would have it; a text where it is none of the field's."""
    kinds = [get_origin(kind) or kind for kind in get_args(field.annotation)] if field else []
    if list in kinds or len(texts) > 1:
        return texts
    if bool in kinds:
        return _WORDS.get(texts[0].lower(), texts[0])
    return int(texts[0]) if int in kinds and texts[0].isdecimal() else texts[0]


async def _told(front: Front, action: Any, **given: Any) -> dict[str, Any]:
    """The engine's answer to a command."""
    command = Control(id=uuid.uuid4().hex, action=action, **given)
    try:
        return await front.engine.control(command)
    except WeightsError as e:
        raise BadRequest(e.message, field=e.field, code=e.code) from None


async def _controlled(request: web.Request, front: Front, action: Any) -> web.StreamResponse:
    await _body(request, front, NothingBody)
    try:
        await front.engine.control(Control(id=uuid.uuid4().hex, action=action))
    except BadRequest as e:
        if e.code in ("profiler_active", "profiler_idle"):
            raise HttpError(409, e.message, code=e.code) from None
        raise
    return json_response({"status": "done"})
