"""Keeps what happened to findable pages until somebody takes it: a ``kv.cache.PageListener``."""

from __future__ import annotations

from jserve.engine.view import DIGEST_BYTES, PageEvent
from jserve.kv.cache import PageListener
from jserve.kv.radix import Node
from jserve.kv.tiers import digest_of


class PageLog:
    """Page events in order.

    They need no numbers: a front hears all pages when it connects, and each event in order on that one stream; a stream
    that loses something ends.
    """

    def __init__(self) -> None:
        self._events: list[PageEvent] = []

    def added(self, node: Node) -> None:
        self._events.append(PageEvent(True, digest_of(node)[:DIGEST_BYTES]))

    def removed(self, node: Node) -> None:
        self._events.append(PageEvent(False, digest_of(node)[:DIGEST_BYTES]))

    def close(self) -> None:
        """Nobody takes any more."""
        self._events.clear()

    def take(self) -> list[PageEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


class Both:
    """A ``PageListener`` that passes on what it hears to two."""

    def __init__(self, first: PageListener, second: PageListener) -> None:
        self._both = first, second

    def added(self, node: Node) -> None:
        for one in self._both:
            one.added(node)

    def removed(self, node: Node) -> None:
        for one in self._both:
            one.removed(node)

    def close(self) -> None:
        for one in self._both:
            one.close()
