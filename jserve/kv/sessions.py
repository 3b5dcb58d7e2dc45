"""Keeps the pages of a session's newest turn longer, for its next turn.

A session's pages carry a priority above any hint, so they outlive all other cached pages for ``ttl_s`` after a
turn; under pressure they go too, and the next turn computes them again. A session holds one branch: when a turn
leaves an older one, that is a prefix like any other::

    turn 1   [ system ][ q1 ][ a1 ]                    after turn 2:
    turn 2   [ system ][ q1'][ a1'][ q2 ][ a2 ]        q1, a1 are free to go
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from jserve.kv.ledger import Cache, Lease
from jserve.kv.retention import SESSION, Keep


@dataclass(slots=True, kw_only=True)
class Session:
    """The ends of the turn of ``request_id`` in the cache: the ``node`` of a lease per choice."""

    request_id: str
    nodes: list[Any]
    until: float


class Sessions:
    """All sessions over one ``PageCache``; each lives for ``ttl_s`` after its last turn."""

    def __init__(self, cache: Cache, ttl_s: float) -> None:
        self.cache = cache
        self.ttl_s = ttl_s
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self) -> Keep:
        """The retention of a turn's pages."""
        return Keep(priority=SESSION, seconds=self.ttl_s)

    def ended(self, tenant: str, name: str, request_id: str, lease: Lease) -> None:
        """A choice of a turn is over, its ``lease`` just given back."""
        self.expire()
        old = self._sessions.pop((tenant, name), None)
        nodes = [lease.node]
        if old is not None and old.request_id == request_id:
            nodes += old.nodes
        elif old is not None:
            self._leave(old, lease.node)
        self._sessions[tenant, name] = Session(
            request_id=request_id, nodes=nodes, until=self.cache.now + self.ttl_s
        )

    def expire(self) -> None:
        """Forget those whose time is over; as all live equally long, these are the first ones."""
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if session.until > self.cache.now:
                return
            del self._sessions[key]

    def lose(self) -> None:
        """The device lost its pages."""
        self._sessions.clear()

    def _leave(self, old: Session, now_at: Any) -> None:
        for end in old.nodes:
            self.cache.leave_branch(end, now_at)
