"""Holds back sequences whose prefix is being read from disk.

A sequence requests its pages once, before its first admission; a read that takes longer than ``PATIENCE_S`` is
abandoned, and the prefix is computed instead, with the same tokens.
"""

from __future__ import annotations

from jserve.sched.cache.retention import root_of
from jserve.sched.resources import Resources, reuses_cache
from jserve.types import Sequence

PATIENCE_S = 5.0


class DiskWaits:
    """The reads that sequences in the queue of ``resources`` wait for."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._waits: dict[Sequence, tuple[list[int], float]] = {}
        """Tickets and when they were asked for; no tickets once there is nothing to wait for."""

    def wait(self, seq: Sequence) -> bool:
        """True while pages of ``seq`` (in the queue) are being read."""
        cache = self._resources.cache
        tier = cache.tier
        source = seq.request.kv_source
        if tier is None or (not tier.on_disk and source is None and seq not in self._waits):
            return False
        if seq not in self._waits:
            key = root_of(seq.request)
            tickets = cache.fetch(key, seq.tokens, source) if reuses_cache(seq) else []
            self._waits[seq] = tickets, cache.now
        tickets, since = self._waits[seq]
        left = [ticket for ticket in tickets if tier.fetching(ticket)]
        if cache.now - since >= PATIENCE_S:
            left = []
        self._waits[seq] = left, since
        return bool(left)

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self._waits.pop(seq, None)

    def __len__(self) -> int:
        return len(self._waits)
