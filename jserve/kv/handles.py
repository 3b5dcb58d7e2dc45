"""Named prefixes: computed once, pinned until their TTL expires, shared by many requests.

It owns the handles of all tenants, their pins in the tree and the quota of pages they may pin. A handle is three
things in a row::

    open     name, tokens and quota are taken; a request computes the tokens
    settled  the path of its full pages is pinned: no eviction reaches it
    lost     the device lost its pages: the handle stays, and settles again at its next use

The quota leaves room for one sequence of full length, so pins can never starve the running: what
handles pin and what the longest sequence needs fit the pool together.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from jserve.errors import BadRequest, CacheFull, CacheNotFound
from jserve.kv.ledger import Cache, Lease
from jserve.kv.radix import RootKey
from jserve.types import HandleInfo

MAX_TTL_S = 7 * 86400.0
MAX_NAME = 128


@dataclass(slots=True, eq=False, kw_only=True)
class Handle:
    """A named prefix. ``pin`` is what the cache holds for it, None while it is not settled."""

    name: str
    root: RootKey
    tokens: tuple[int, ...]
    n_pages: int
    """Pages that its pin holds at the most."""
    maker: str
    """Id of the request that computes it first."""
    ttl_s: float
    expires: float
    pin: Any = None
    settled: bool = False
    """True once it was pinned: from then on it no longer goes when its maker fails."""
    n_uses: int = 0


class Handles:
    """All handles over one ``PageCache``. ``quota`` is in pages."""

    def __init__(self, cache: Cache, quota: int) -> None:
        self.cache = cache
        self.quota = quota
        self.n_pages = 0
        """Pages taken from the quota, by settled handles and others."""
        self._handles: dict[tuple[str, str], Handle] = {}
        self._ends: list[tuple[float, int, Handle]] = []
        """Heap of (expires, serial, handle); stale when it was renewed or dropped."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._handles)

    def open(
        self, root: RootKey, name: str, tokens: tuple[int, ...], ttl_s: float, maker: str
    ) -> Handle:
        """A new handle that ``maker`` is about to compute.

        Raises:
            BadRequest: a name that is in use or no name, a TTL out of range, tokens that fill no
            page.
            CacheFull: the quota has no room for it.
        """
        self._check(root[0], name, tokens, ttl_s)
        n_pages = self.cache.hit_pages(len(tokens) // self.cache.page_size)
        if self.n_pages + n_pages > self.quota:
            raise CacheFull(
                f"cache {name!r} needs {n_pages} pages; {self.n_pages} of the {self.quota} that"
                " handles may pin are taken: drop one or wait until one expires",
                field="name",
            )
        self.n_pages += n_pages
        handle = self._handles[root[0], name] = Handle(
            name=name,
            root=root,
            tokens=tokens,
            n_pages=n_pages,
            maker=maker,
            ttl_s=ttl_s,
            expires=0.0,
        )
        self._prolong(handle, ttl_s)
        return handle

    def get(self, tenant: str, name: str | None) -> Handle | None:
        return None if name is None else self._handles.get((tenant, name))

    def find(self, tenant: str, name: str) -> Handle:
        """Raises:
        CacheNotFound: the tenant has no such handle (any more).
        """
        handle = self._handles.get((tenant, name))
        if handle is None:
            raise CacheNotFound(f"there is no cache named {name[:64]!r}", field="cache")
        return handle

    def of(self, tenant: str) -> list[Handle]:
        """The tenant's handles, oldest first."""
        return [handle for (owner, _), handle in self._handles.items() if owner == tenant]

    def settle(self, handle: Handle, lease: Lease) -> None:
        """Pin ``handle`` on the path of ``lease``, as soon as that holds all its pages."""
        n = len(handle.tokens) // self.cache.page_size
        if handle.pin is not None or not lease.cacheable or lease.n_published < n:
            return
        handle.pin = self.cache.pin(lease, n)
        if handle.pin is None:
            return  # part of its window was evicted meanwhile; whoever uses it next computes it
        if not handle.settled:
            handle.settled = True
            self._prolong(handle, handle.ttl_s)

    def renew(self, tenant: str, name: str, ttl_s: float) -> Handle:
        """Let it live for ``ttl_s`` from now. Raises CacheNotFound, BadRequest."""
        handle = self.find(tenant, name)
        _check_ttl(ttl_s)
        self._prolong(handle, ttl_s)
        return handle

    def drop(self, tenant: str, name: str) -> Handle:
        """Forget it; its pages stay findable until they are evicted. Raises CacheNotFound."""
        handle = self.find(tenant, name)
        self._remove(handle)
        return handle

    def abandon(self, handle: Handle, request_id: str) -> None:
        """``request_id`` ended in vain: a handle that it was to make goes with it."""
        if not handle.settled and handle.maker == request_id:
            self._remove(handle)

    def expire(self) -> None:
        """Drop all whose time is over."""
        while self._ends and self._ends[0][0] <= self.cache.now:
            expires, _, handle = heapq.heappop(self._ends)
            live = self._handles.get((handle.root[0], handle.name)) is handle
            if live and handle.expires == expires:
                self._remove(handle)

    def lose(self) -> None:
        """The device lost its pages: nothing is pinned any more."""
        for handle in self._handles.values():
            self._unpin(handle)

    def pinned(self) -> list[Any]:
        """The pins, one per settled handle."""
        return [handle.pin for handle in self._handles.values() if handle.pin is not None]

    def info(self, handle: Handle, now: float = 0.0) -> HandleInfo:
        """Its info; ``now`` counts where it is later than the cache's time."""
        return HandleInfo(
            name=handle.name,
            n_tokens=len(handle.tokens),
            n_pages=handle.n_pages,
            pinned=handle.pin is not None,
            expires_in_s=max(0.0, handle.expires - max(now, self.cache.now)),
            n_uses=handle.n_uses,
        )

    def _check(self, tenant: str, name: str, tokens: tuple[int, ...], ttl_s: float) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise BadRequest(f"name must be a string of 1 to {MAX_NAME} characters", field="name")
        if (tenant, name) in self._handles:
            raise BadRequest(f"a cache named {name!r} exists already", field="name")
        _check_ttl(ttl_s)
        if not self.cache.reuse:
            raise BadRequest("prefix caching is switched off on this server", field="cache")
        if len(tokens) < self.cache.page_size:
            raise BadRequest(
                f"the prompt has {len(tokens)} tokens; a cache holds whole pages of"
                f" {self.cache.page_size}",
                field="prompt",
            )

    def _prolong(self, handle: Handle, ttl_s: float) -> None:
        handle.ttl_s, handle.expires = ttl_s, self.cache.now + ttl_s
        self._serial += 1
        heapq.heappush(self._ends, (handle.expires, self._serial, handle))

    def _remove(self, handle: Handle) -> None:
        self._unpin(handle)
        self.n_pages -= handle.n_pages
        del self._handles[handle.root[0], handle.name]

    def _unpin(self, handle: Handle) -> None:
        if handle.pin is not None:
            self.cache.unpin(handle.pin)
            handle.pin = None


def quota_of(n_pages: int, pages_per_slot: int, wanted: int) -> int:
    """Pages that handles may pin in a pool of ``n_pages`` (scratch included): ``wanted``, or half
    of it where that is 0, but never so many that a sequence of full length no longer fits."""
    usable = n_pages - 1
    return max(0, min(wanted or usable // 2, usable - pages_per_slot))


def _check_ttl(ttl_s: float) -> None:
    if not isinstance(ttl_s, int | float) or not 0 < ttl_s <= MAX_TTL_S:
        raise BadRequest(f"ttl_s must be seconds in (0, {MAX_TTL_S:.0f}]", field="ttl_s")
