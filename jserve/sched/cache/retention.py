"""Turns the cache fields of requests (handles, sessions, hints) into pins and retention of pages.

It owns how a request's fields (``retain``, ``session``, ``cache``) become keeps, pins and tokens of its prompt. The
rules themselves are in ``kv.handles``, ``kv.sessions`` and ``kv.retention``, which know pages and no requests.
"""

from __future__ import annotations

from dataclasses import replace

from jserve.errors import BadRequest
from jserve.kv.handles import Handle, Handles
from jserve.kv.ledger import Cache, Lease
from jserve.kv.radix import RootKey
from jserve.kv.retention import Keep, keeps_of
from jserve.kv.sessions import Sessions
from jserve.types import Request


class CacheRetention:
    """Handles and sessions over one page cache.

    Args:
        handle_pages: quota of all handles together.
        session_ttl_s: how long a session's KV is kept for its next turn.
    """

    def __init__(self, cache: Cache, *, handle_pages: int = 0, session_ttl_s: float = 0.0) -> None:
        self.cache = cache
        self.handles = Handles(cache, handle_pages)
        self.sessions = Sessions(cache, session_ttl_s)
        self.n_uses = 0

    def advance(self, now: float) -> None:
        """It is ``now``: what was kept until then is kept no longer."""
        self.cache.advance(now)
        self.handles.expire()
        self.sessions.expire()

    def keeps(self, request: Request) -> tuple[Keep, ...]:
        """Retention of the pages of ``request``."""
        keeps = keeps_of(request.retain, self.cache.page_size)
        return keeps if request.session is None else (*keeps, self.sessions.keep())

    def open(self, request: Request, ttl_s: float) -> Handle:
        """The handle ``request.cache`` that ``request`` is to compute. Raises as ``Handles.open``."""
        if request.skip_prefix_cache:
            raise BadRequest("what skips the cache cannot be cached", field="skip_prefix_cache")
        tokens, name = request.prompt_ids, request.cache or ""
        return self.handles.open(root_of(request), name, tokens, ttl_s, request.id)

    def with_prefix(self, request: Request) -> Request:
        """``request`` with the tokens of the handle that it names in front, if it lacks them.

        Raises:
            CacheNotFound: it names none.
            BadRequest: one that was made with another salt or adapter.
        """
        if request.cache is None:
            return request
        handle = self.handles.find(request.tenant, request.cache)
        if handle.root != root_of(request):
            field = "cache_salt" if handle.root[1] != request.cache_salt else "model"
            raise BadRequest(
                f"cache {handle.name!r} was made with another {field} than this request's",
                field=field,
            )
        handle.n_uses += 1
        self.n_uses += 1
        if request.prompt_ids[: len(handle.tokens)] == handle.tokens:
            return request
        return replace(request, prompt_ids=(*handle.tokens, *request.prompt_ids))

    def settle(self, request: Request, lease: Lease | None) -> None:
        """Pin the handle that ``request`` uses, once all of it is published and nothing pins it."""
        handle = self.handles.get(request.tenant, request.cache)
        if lease is None or lease.n_weights != self.cache.n_weights:
            return
        if handle is not None and handle.root == root_of(request):
            self.handles.settle(handle, lease)

    def ended(self, request: Request, lease: Lease) -> None:
        """A choice of ``request`` is over; its ``lease`` was just given back."""
        if request.session is not None:
            self.sessions.ended(request.tenant, request.session, request.id, lease)

    def abandon(self, request: Request) -> None:
        """``request`` is over: a handle that it was to make and did not is gone."""
        handle = self.handles.get(request.tenant, request.cache)
        if handle is not None:
            self.handles.abandon(handle, request.id)

    def lose(self) -> None:
        """The device lost its pages."""
        self.handles.lose()
        self.sessions.lose()

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "cache_handles": float(len(self.handles)),
            "cache_handle_pages": float(self.handles.n_pages),
            "cache_handle_quota_pages": float(self.handles.quota),
            "cache_handle_uses_total": float(self.n_uses),
            "cache_sessions": float(len(self.sessions)),
        }


def root_of(request: Request) -> RootKey:
    """The root that the prefixes of ``request`` hang on."""
    longrope = "longrope" if request.is_long else ""
    changed = [name for name in (request.adapter, request.kv_name, longrope) if name]
    return request.tenant, request.cache_salt, " ".join(changed) or None
