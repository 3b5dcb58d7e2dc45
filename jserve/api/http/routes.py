"""The route tables of the public port and the operator's port.

``app`` makes applications of them; ``openapi`` and ``support`` are handed the public one to make documents of, so a
field or a path cannot be missing in one of them.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web

from jserve.api.anthropic.fields import CountBody, MessagesBody, parse_message
from jserve.api.anthropic.reply import MessageReply
from jserve.api.http.auth import Access
from jserve.api.http.dialect import Dialect, handle
from jserve.api.http.error_format import ANTHROPIC
from jserve.api.http.front import Front
from jserve.api.http.route import METRICS, Answer, Route, Table
from jserve.api.openai import caches, models, score, tokens
from jserve.api.openai.chat_reply import ChatReply
from jserve.api.openai.fields import ChatBody, CompletionBody, parse_chat, parse_completion
from jserve.api.openai.text_reply import CompletionReply
from jserve.api.ops import admin, health, openapi, support
from jserve.api.ops.dashboard import dashboard
from jserve.api.responses.fields import ResponseBody, parse_response
from jserve.api.responses.reply import ResponseReply

CHAT = Dialect(parse_chat, ChatReply)
COMPLETION = Dialect(parse_completion, CompletionReply)
RESPONSE = Dialect(parse_response, ResponseReply)
MESSAGE = Dialect(parse_message, MessageReply)


def _in(dialect: Dialect) -> Answer:
    return partial(handle, dialect=dialect)


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
        health.count_tokens,
        "Prompt tokens of a message",
        CountBody,
        error_format=ANTHROPIC,
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
        health.metrics,
        "Prometheus metrics",
        media=("text/plain", "application/openmetrics-text"),
    ),
    Route("GET", "/version", _USER, health.version, "The server's version"),
    Route("GET", "/health", _OPEN, health.health, "Whether steps make progress"),
    Route("GET", "/ready", _OPEN, health.ready, "Whether requests are taken"),
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
    Route("POST", "/pause", _ADMIN, admin.pause, "Let new requests wait", admin.PauseBody),
    Route("POST", "/resume", _ADMIN, admin.resume, "End a pause", admin.NothingBody),
    Route("GET", "/is_paused", _ADMIN, admin.is_paused, "Whether it is paused"),
    Route("POST", "/sleep", _ADMIN, admin.sleep, "Give device memory back", admin.SleepBody),
    Route("POST", "/wake_up", _ADMIN, admin.wake, "Take it again", admin.WakeBody),
    Route("GET", "/is_sleeping", _ADMIN, admin.is_sleeping, "Whether anything is asleep"),
    Route(
        "POST",
        "/update_weights",
        _ADMIN,
        admin.update_weights,
        "Replace the weights",
        admin.WeightsBody,
    ),
    Route(
        "POST",
        "/rollback_weights",
        _ADMIN,
        admin.rollback_weights,
        "Give replicas their previous weights",
        admin.NothingBody,
    ),
    Route("GET", "/weight_info", _ADMIN, admin.weight_info, "The version of the weights"),
    Route("GET", "/replicas", _ADMIN, admin.replicas, "The replicas and their state"),
    Route("GET", METRICS, _ADMIN, health.metrics, "Prometheus metrics"),
)
