"""Feeds many offline requests into a bounded queue, in order.

Offline work is not overload: what the engine's gate refuses for want of room goes back to the front and is handed
in again once the queue is shorter. An empty queue refuses no request, so all are admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jserve.engine.driven import DrivenEngine
from jserve.types import Output, Request

NO_ROOM = frozenset({"overloaded", "queue_full_tenant"})
"""Error codes of the gate that say nothing against the request."""
PART = 4
"""A quarter of the queue is filled: well before any lane or tenant meets its bound."""


class Feed:
    """``push`` before each step of ``engine``, ``sift`` its outputs after it.

    Args:
        requests: each is checked at once.

    Raises:
        BadRequest: one could never be served; nothing was handed in.
    """

    def __init__(self, engine: DrivenEngine, requests: Iterable[Request]) -> None:
        self._engine = engine
        self._outside = deque(requests)
        for request in self._outside:
            engine.check(request)
        self._inside: dict[str, Request] = {}
        """Submitted requests without an output so far."""
        self._most = max(1, engine.max_waiting // PART)
        self._until = self._most
        """Nobody is handed in while this many sequences wait."""

    def push(self) -> None:
        """Hand in as many as there is room for."""
        waiting = self._engine.n_waiting
        while self._outside and (waiting < self._until or not waiting):
            request = self._outside.popleft()
            self._inside[request.id] = request
            self._engine.submit(request)
            waiting += request.params.n

    def sift(self, outputs: Iterable[Output]) -> list[Output]:
        """``outputs`` without the refusals for want of room, whose requests are outside again."""
        heard, back = [], {}
        for out in outputs:
            if out.error_code in NO_ROOM and (out.request_id in self._inside or out.index):
                request = self._inside.pop(out.request_id, None)
                if request is not None:
                    back[request.id] = request
                continue
            self._inside.pop(out.request_id, None)
            heard.append(out)
        self._outside.extendleft(reversed(back.values()))
        self._until = self._engine.n_waiting if back else self._most
        return heard
