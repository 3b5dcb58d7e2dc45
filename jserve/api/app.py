"""The routes: which path does what, and who may call it.

Owns the table of routes and nothing of their work. Must not know fields of a dialect or how a
request runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from jserve.api import caches, openai, openai_reply, tokens
from jserve.api.ask import ModelCard, Wish
from jserve.api.auth import Access, Keys
from jserve.api.chat import ChatTemplate
from jserve.api.dashboard import dashboard
from jserve.api.errors import shown
from jserve.api.front import (
    TRACE,
    Front,
    Limits,
    ServedEngine,
    answer,
    ignored_header,
    json_response,
)
from jserve.api.metrics import Metrics
from jserve.api.middleware import Handler, expect, make_middlewares, request_id, stamp
from jserve.api.page import add_page
from jserve.api.prepare import Preparer
from jserve.api.speech import speech_of
from jserve.config import EngineConfig
from jserve.errors import EngineDead, NotFound, NotReady
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request

FRONT = web.AppKey("front", Front)
ACCESS = web.AppKey("access", dict)


def make_app(
    config: EngineConfig,
    engine: ServedEngine,
    tokenizer: TextTokenizer,
    chat: ChatTemplate | None,
    card: ModelCard,
    *,
    limits: Limits | None = None,
) -> web.Application:
    """The application: all routes over one engine. Its clean-up ends what it started.

    Raises:
        ConfigError: the parser of thoughts that was asked for does not fit the model.
    """
    card = replace(card, speech=speech_of(config.model, chat, tokenizer))
    front = Front(
        engine=engine,
        prepare=Preparer(tokenizer, chat, card, caches.HandleBook()),
        card=card,
        options=config.server,
        keys=Keys(config.server.api_key),
        metrics=Metrics(card.name, engine),
        limits=limits or Limits(),
    )
    access: dict[str, Access] = {}
    app = web.Application(
        middlewares=make_middlewares(front, access), client_max_size=front.max_bytes
    )
    app[FRONT], app[ACCESS] = front, access
    for method, path, level, handler in ROUTES:
        route = app.router.add_route(method, path, _bound(handler, front), expect_handler=expect)
        resource = route.resource
        assert resource is not None
        access[resource.canonical] = level
    if config.server.ui:
        add_page(app, access)
    app.on_response_prepare.append(stamp)
    app.on_cleanup.append(_close)
    return app


async def _close(app: web.Application) -> None:
    app[FRONT].close()


def _bound(handler: Callable[[web.Request, Front], Any], front: Front) -> Handler:
    async def bound(request: web.Request) -> web.StreamResponse:
        return await handler(request, front)

    return bound


async def chat_completions(request: web.Request, front: Front) -> web.StreamResponse:
    template, card = front.prepare.chat, front.card
    wish = await front.read(request, lambda raw: openai.chat_wish(raw, card, template))
    _relabel(request, wish.body.request_id)
    requests = await _requests(request, front, wish)
    reply = openai_reply.ChatReply(
        wish.body, card, front.prepare.tokenizer, requests, calls=wish.ask.shape.calls
    )
    return await answer(request, front, wish, requests, reply)


async def completions(request: web.Request, front: Front) -> web.StreamResponse:
    card = front.card
    wish = await front.read(request, lambda raw: openai.completion_wish(raw, card))
    _relabel(request, wish.body.request_id)
    requests = await _requests(request, front, wish)
    reply = openai_reply.CompletionReply(
        wish.body, card, front.prepare.tokenizer, requests, wish.ask.prompts
    )
    return await answer(request, front, wish, requests, reply)


async def _requests(request: web.Request, front: Front, wish: Wish) -> list[Request]:
    """What ``wish`` asks for, on the account of the key that came with it."""
    return await front.prepare.requests(replace(wish.ask, tenant=request[TRACE].tenant))


def _relabel(request: web.Request, label: str | None) -> None:
    if label is not None:
        request[TRACE].id = request_id(label)


async def models(request: web.Request, front: Front) -> web.Response:
    return json_response(openai_reply.model_list(front.card))


async def model(request: web.Request, front: Front) -> web.Response:
    name = request.match_info["model"]
    if not front.card.knows(name):
        raise NotFound(f"the model {shown(name)} does not exist", field="model")
    return json_response(openai_reply.model_object(front.card, name))


async def tokenize(request: web.Request, front: Front) -> web.Response:
    template, card = front.prepare.chat, front.card
    wish = await front.read(request, lambda raw: tokens.tokenize_wish(raw, card, template))
    (ids,) = await front.prepare.prompt_ids(wish.ask)
    body = tokens.tokenized(wish.body, ids, card, front.prepare.tokenizer)
    return json_response(body, headers=ignored_header(wish.ignored))


async def detokenize(request: web.Request, front: Front) -> web.Response:
    ids = await front.read(request, lambda raw: tokens.detokenize_ids(raw, front.card))
    text = await front.prepare.run(
        lambda: front.prepare.tokenizer.decode(ids, skip_special_tokens=False)
    )
    return json_response({"prompt": text})


async def health(request: web.Request, front: Front) -> web.Response:
    if not front.engine.healthy():
        raise EngineDead("the engine makes no progress", retry_after=5)
    return json_response({"status": "ok"})


async def ready(request: web.Request, front: Front) -> web.Response:
    if front.engine.draining:
        raise NotReady("the server is shutting down", code="draining", retry_after=5)
    if not front.engine.ready:
        raise NotReady("the engine is starting", retry_after=5)
    return json_response({"status": "ready"})


async def version(request: web.Request, front: Front) -> web.Response:
    return json_response({"version": front.card.version})


async def metrics(request: web.Request, front: Front) -> web.Response:
    body, content_type = front.metrics.scrape(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


ROUTES: tuple[tuple[str, str, Access, Callable[[web.Request, Front], Any]], ...] = (
    ("POST", "/v1/chat/completions", Access.USER, chat_completions),
    ("POST", "/v1/completions", Access.USER, completions),
    ("GET", "/v1/models", Access.USER, models),
    ("GET", "/v1/models/{model:.+}", Access.USER, model),
    ("POST", "/v1/caches", Access.USER, caches.create),
    ("GET", "/v1/caches", Access.USER, caches.listed),
    ("GET", "/v1/caches/{name}", Access.USER, caches.one),
    ("POST", "/v1/caches/{name}", Access.USER, caches.renew),
    ("DELETE", "/v1/caches/{name}", Access.USER, caches.drop),
    ("GET", "/v1/dashboard", Access.USER, dashboard),
    ("POST", "/tokenize", Access.USER, tokenize),
    ("POST", "/detokenize", Access.USER, detokenize),
    ("GET", "/metrics", Access.USER, metrics),
    ("GET", "/version", Access.USER, version),
    ("GET", "/health", Access.OPEN, health),
    ("GET", "/ready", Access.OPEN, ready),
)
