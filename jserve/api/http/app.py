"""Builds the aiohttp applications of the public port and the operator's port from a route table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from jserve.api.http.auth import Access, Keys, load_tenants
from jserve.api.http.cors import allow_origins
from jserve.api.http.error_format import ErrorFormat
from jserve.api.http.front import Front, Limits
from jserve.api.http.middleware import Handler, expect, make_middlewares, stamp
from jserve.api.http.page import add_page
from jserve.api.http.repeated_refusals import Refusals
from jserve.api.http.route import Answer, Route, hidden
from jserve.api.http.routes import OPERATOR, PUBLIC
from jserve.api.openai import caches
from jserve.api.ops.metrics import Metrics
from jserve.api.request.parsed import ModelCard
from jserve.api.request.prepare import Preparer
from jserve.config import EngineConfig
from jserve.engine.face import EngineFace
from jserve.text.chat.speech import speech_of
from jserve.text.chat.template import ChatTemplate
from jserve.text.tokenizer import TextTokenizer

FRONT = web.AppKey("front", Front)
ACCESS = web.AppKey("access", dict)


def make_app(
    config: EngineConfig,
    engine: EngineFace,
    tokenizer: TextTokenizer,
    chat: ChatTemplate | None,
    card: ModelCard,
    *,
    limits: Limits | None = None,
) -> web.Application:
    """The public application over one engine. Its clean-up ends what it started.

    Raises:
        ConfigError: the parser of thoughts that was asked for does not fit the model; the file of
        keys or an allowed origin cannot be used.
    """
    keys = Keys(config.server.api_key, load_tenants(config.server.api_keys_file))
    card = replace(card, speech=speech_of(config.model, chat, tokenizer))
    metrics, limits = Metrics(card.name, engine), limits or Limits()
    front = Front(
        engine=engine,
        prepare=Preparer(tokenizer, chat, card, caches.HandleBook()),
        card=card,
        options=config.server,
        keys=keys,
        metrics=metrics,
        refusals=Refusals(metrics.refusals_repeated.inc, hold_s=limits.refusal_hold_s),
        limits=limits,
    )
    left_away = hidden(config.server)
    app = _application(front, [route for route in PUBLIC if route.path not in left_away])
    if config.server.allowed_origins:
        allow_origins(app, config.server.allowed_origins)
    if config.server.ui:
        add_page(app, app[ACCESS])
    app.on_cleanup.append(_close)
    return app


def make_admin_app(app: web.Application) -> web.Application:
    """The operator's application over the engine of ``app``, which must outlive it."""
    return _application(app[FRONT], OPERATOR)


def _application(front: Front, routes: Sequence[Route]) -> web.Application:
    access: dict[str, Access] = {}
    error_formats: dict[str, ErrorFormat] = {}
    app = web.Application(
        middlewares=make_middlewares(front, access, error_formats), client_max_size=front.max_bytes
    )
    app[FRONT], app[ACCESS] = front, access
    for route in routes:
        answer = _bound(route.answer, front)
        added = app.router.add_route(route.method, route.path, answer, expect_handler=expect)
        resource = added.resource
        assert resource is not None
        if route.method == "GET":  # aiohttp leaves the body away
            app.router.add_route("HEAD", route.path, answer, expect_handler=expect)
        access[resource.canonical] = route.access
        error_formats[resource.canonical] = route.error_format
    app.on_response_prepare.append(stamp)
    return app


async def _close(app: web.Application) -> None:
    app[FRONT].close()


def _bound(answer: Answer, front: Front) -> Handler:
    async def bound(request: web.Request) -> web.StreamResponse:
        return await answer(request, front)

    return bound
