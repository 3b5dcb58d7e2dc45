"""The tables of routes: the public port's and the operator's.

Owns the tables and nothing of the work. ``app`` makes applications of them; ``openapi`` and ``support``
are handed the public one to make documents of, so a field or a path cannot be missing in one of them.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web

from jserve.api import admin, caches, models, openapi, score, service, support, tokens
from jserve.api.anthropic import CountBody, MessagesBody, message_ask
from jserve.api.anthropic_reply import MessageReply
from jserve.api.auth import Access
from jserve.api.converse import Dialect, converse
from jserve.api.dashboard import dashboard
from jserve.api.front import Front
from jserve.api.manners import ANTHROPIC
from jserve.api.openai import ChatBody, CompletionBody, chat_ask, completion_ask
from jserve.api.openai_chat_reply import ChatReply
from jserve.api.openai_text_reply import CompletionReply
from jserve.api.responses import ResponseBody, response_ask
from jserve.api.responses_reply import ResponseReply
from jserve.api.route import METRICS, Answer, Route, Table

CHAT = Dialect(chat_ask, ChatReply)
COMPLETION = Dialect(completion_ask, CompletionReply)
RESPONSE = Dialect(response_ask, ResponseReply)
MESSAGE = Dialect(message_ask, MessageReply)


def _in(dialect: Dialect) -> Answer:
    return partial(converse, dialect=dialect)


_OPEN, _USER, _ADMIN = Access.OPEN, Access.USER, Access.ADMIN


async def _openapi(request: web.Request, front: Front) -> web.StreamResponse:
    return await openapi.answer(front, PUBLIC)


async def _support(request: web.Request, front: Front) -> web.StreamResponse:
    return support.answer(PUBLIC)


PUBLIC: Table = (
    Route("POST", "/v1/chat/completions", _USER, _in(CHAT), "Chat, OpenAI's way", ChatBody, True),
    Route("POST", "/v1/completions", _USER, _in(COMPLETION), "Text", CompletionBody, True),
    Route("POST", "/v1/responses", _USER, _in(RESPONSE), "Chat, stateless", ResponseBody, True),
    Route(
        "POST", "/v1/messages", _USER, _in(MESSAGE), "Anthropic's", MessagesBody, True, ANTHROPIC
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        _USER,
        service.count_tokens,
        "Prompt tokens of a message",
        CountBody,
        manner=ANTHROPIC,
    ),
    Route("POST", "/v1/score", _USER, score.score, "Log-probabilities of texts", score.ScoreBody),
    Route("GET", "/v1/models", _USER, models.listed, "The served model's names"),
    Route("GET", "/v1/models/{model:.+}", _USER, models.one, "One of them"),
    Route("POST", "/v1/caches", _USER, caches.create, "Make a named cache", caches.CreateBody),
    Route("GET", "/v1/caches", _USER, caches.listed, "The caller's caches"),
    Route("GET", "/v1/caches/{name}", _USER, caches.one, "One of them"),
    Route("POST", "/v1/caches/{name}", _USER, caches.renew, "Let it live on", caches.RenewBody),
    Route("DELETE", "/v1/caches/{name}", _USER, caches.drop, "Drop it"),
    Route("GET", "/v1/dashboard", _USER, dashboard, "What the server does right now"),
    Route("POST", "/tokenize", _USER, tokens.tokenize, "Text to ids", tokens.TokenizeBody),
    Route("POST", "/detokenize", _USER, tokens.detokenize, "Ids to text", tokens.DetokenizeBody),
    Route("GET", "/v1/support", _USER, _support, "What every field does"),
    Route("GET", "/openapi.json", _USER, _openapi, "This interface as OpenAPI 3.1"),
    Route(
        "GET",
        METRICS,
        _USER,
        service.metrics,
        "Prometheus metrics",
        media=("text/plain", "application/openmetrics-text"),
    ),
    Route("GET", "/version", _USER, service.version, "The server's version"),
    Route("GET", "/health", _OPEN, service.health, "Whether steps make progress"),
    Route("GET", "/ready", _OPEN, service.ready, "Whether requests are taken"),
)

OPERATOR: Table = (
    Route("POST", "/abort", _ADMIN, admin.abort, "End requests", admin.AbortBody),
    Route(
        "POST",
        "/reset_prefix_cache",
        _ADMIN,
        admin.reset_prefix_cache,
        "Forget every cached prefix",
        admin.NothingBody,
    ),
    Route(
        "POST",
        "/start_profile",
        _ADMIN,
        admin.start_profile,
        "Begin a profile of the device",
        admin.NothingBody,
    ),
    Route(
        "POST", "/stop_profile", _ADMIN, admin.stop_profile, "Write the profile", admin.NothingBody
    ),
    Route("GET", METRICS, _ADMIN, service.metrics, "Prometheus metrics"),
)
