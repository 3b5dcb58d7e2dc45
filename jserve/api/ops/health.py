"""Liveness, readiness, version, metrics and token counting endpoints."""

from __future__ import annotations

from aiohttp import web

from jserve.api.anthropic import fields as anthropic
from jserve.api.http.front import Front, ignored_header, json_response
from jserve.engine.health import REST_S
from jserve.errors import EngineDead, NotReady


async def health(request: web.Request, front: Front) -> web.Response:
    if not front.engine.healthy():
        raise EngineDead("the engine makes no progress", retry_after=5)
    return json_response({"status": "ok"})


async def ready(request: web.Request, front: Front) -> web.Response:
    if front.engine.draining:
        raise NotReady("the server is shutting down", code="draining", retry_after=5)
    if not front.engine.ready:
        raise NotReady("the engine is starting", retry_after=5)
    degraded_reasons = front.engine.degraded_reasons()
    if degraded_reasons:
        raise NotReady("; ".join(degraded_reasons), code="degraded", retry_after=REST_S)
    return json_response({"status": "ready"})


async def version(request: web.Request, front: Front) -> web.Response:
    return json_response({"version": front.card.version})


async def metrics(request: web.Request, front: Front) -> web.Response:
    body, content_type = front.metrics.scrape(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def count_tokens(request: web.Request, front: Front) -> web.Response:
    """/v1/messages/count_tokens: as many as /v1/messages would count for the same fields."""
    served = front.served
    ask = await front.read(request, lambda raw: anthropic.parse_count(raw, served))
    (ids,) = await front.prepare.prompt_ids(ask)
    return json_response({"input_tokens": len(ids)}, headers=ignored_header(ask.ignored))
