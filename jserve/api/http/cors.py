"""CORS: allows browser requests from configured origins.

Without allowed origins nothing of this is there, and a browser lets no page but ours read an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web

from jserve.api.http.middleware import Handler
from jserve.errors import ConfigError

ANY = "*"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]{1,255}")
_HEADERS = re.compile(r"[A-Za-z0-9\-, ]{1,1024}")
_METHODS = "GET, POST, DELETE"
_MAX_AGE_S = "600"


def allow_origins(app: web.Application, allowed: Sequence[str]) -> None:
    """Lets pages of the ``allowed`` origins ("*": all) call ``app``.

    Raises:
        ConfigError: an origin that is none, as "https://example.org" is one.
    """
    for origin in allowed:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"allowed_origins: {origin[:64]!r} is no origin such as https://example.org",
                field="allowed_origins",
            )

    def origin_of(request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        return origin if origin is not None and (origin in allowed or ANY in allowed) else None

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers before any key is asked for: a browser sends none with this."""
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or origin_of(request) is None:
            return await handler(request)
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _MAX_AGE_S}
        if _HEADERS.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add("Vary", "Origin")
        origin = origin_of(request)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = ANY

    app.middlewares.insert(1, preflight)  # behind what logs and counts, before the keys
    app.on_response_prepare.append(add_headers)
