"""The ``Route`` type: path, body fields, access level and handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from jserve.api.http.auth import Access
from jserve.api.http.error_format import OPENAI, ErrorFormat
from jserve.api.http.front import Front
from jserve.api.request.fields import Fields
from jserve.config import ServerOptions

Answer = Callable[[web.Request, Front], Awaitable[web.StreamResponse]]
METRICS = "/metrics"


@dataclass(frozen=True, slots=True)
class Route:
    """One path and method. ``fields``: of its body, None where it has none."""

    method: str
    path: str
    access: Access
    answer: Answer
    says: str
    """One line for the documents."""
    fields: type[Fields] | None = None
    streams: bool = False
    error_format: ErrorFormat = OPENAI
    media: tuple[str, ...] = ("application/json",)
    """Content types of an answer that is no stream."""


Table = tuple[Route, ...]


def hidden(options: ServerOptions) -> frozenset[str]:
    """Public paths that a server of these options does not have."""
    return frozenset() if options.public_metrics else frozenset({METRICS})
