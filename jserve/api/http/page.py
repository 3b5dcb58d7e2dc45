"""Serves the chat page and the dashboard as static files of the package.

It owns their content types, caching and the policy that keeps a browser from running or fetching anything else. The
files hold nothing secret, so they need no key: the page asks for one and sends it with every call of the API. All
of them are read once, at the start.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from jserve.api.http.auth import Access
from jserve.api.http.middleware import Handler, expect

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGES = {"/": "index.html", "/dashboard": "dashboard.html"}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser may keep a file but asks each time whether it is still the same: an update shows at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, ready to be sent."""

    body: bytes
    kind: str
    etag: str

    def answer(self, request: web.Request) -> web.Response:
        """The file, or 304 to who has it already."""
        response = web.Response(headers=HEADERS)
        response.etag = self.etag
        known = request.if_none_match or ()
        if any(tag.value in (self.etag, "*") for tag in known):
            response.set_status(304)
        else:
            response.body = self.body
            response.headers["Content-Type"] = self.kind
        return response


def page_files() -> dict[str, PageFile]:
    """Every file of the page by name."""
    found = {}
    for entry in (resources.files("jserve.api") / "web").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in TYPES:
            body = entry.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:32]
            found[entry.name] = PageFile(body, TYPES[suffix], etag)
    return found


def add_page(app: web.Application, access: dict[str, Access]) -> None:
    """Adds the page's routes to ``app`` and their level to ``access``."""
    files = page_files()

    async def part(request: web.Request) -> web.StreamResponse:
        file = files.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        return file.answer(request)

    def whole(name: str) -> Handler:
        async def page(request: web.Request) -> web.StreamResponse:
            return files[name].answer(request)

        return page

    routes = {path: whole(name) for path, name in PAGES.items()} | {"/web/{name}": part}
    for path, handler in routes.items():
        app.router.add_get(path, handler, expect_handler=expect)
        access[path] = Access.OPEN
