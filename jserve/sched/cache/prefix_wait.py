"""Holds back sequences whose prefix a running sequence is computing, so that it is computed once.

It owns the waits: which sequence leads, until which page, and when a wait is given up. The leader's pages appear in
the tree chunk by chunk, as its steps are committed; a follower stays in the queue until the last page they share is
there, then finds them all::

    leader     [ published ][ in flight ][ to be computed ]...
    follower   [ known ....][ shared, unpublished: saved   ][ its own ]
                                                           ^ waits until the leader is here

What is saved is what the leader has yet to publish, so a wait never costs more tokens of work than
it saves; it costs the latency of the steps in flight, which a lone page of a long prompt is not
worth. A leader that finished, was preempted, or made no progress for ``PATIENCE`` steps is waited for no
longer. Choices of one request (``n`` > 1) need no rule of their own: the first one leads.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jserve.sched.cache.retention import root_of
from jserve.sched.resources import Resources, reuses_cache
from jserve.types import Sequence

PATIENCE = 8
"""Steps without progress of the leader."""
MIN_PAGES = 2
"""Pages worth waiting for; fewer are if they are half of what is to be computed."""


@dataclass(slots=True, kw_only=True)
class Wait:
    """A follower waits for ``leader`` to have published ``n_pages``."""

    leader: Sequence
    n_pages: int
    seen: tuple[int, int, int]
    """The leader's progress when it last moved: scheduled, published, rows in flight."""
    step: int


class PrefixWaits:
    """The waits of the sequences in the queue of ``resources``."""

    def __init__(self, resources: Resources) -> None:
        self._floor = resources
        self._waits: dict[Sequence, Wait] = {}
        self._let_go: dict[Sequence, int] = {}
        """The step in which a wait ended: its sequence may be admitted in it."""
        self.n_waits = 0
        """Counter of waits begun."""

    def wait(self, seq: Sequence, step: int) -> bool:
        """True while ``seq`` (in the queue) had better wait; ``step`` counts plans. It may be asked
        more than once a step and says the same."""
        wait = self._waits.get(seq)
        if self._let_go.get(seq) == step:
            return False
        if wait is None:
            wait = self._find(seq, step)
            if wait is None:
                return False
            self._waits[seq] = wait
            self.n_waits += 1
        elif not _goes_on(wait, step):
            del self._waits[seq]
            self._let_go[seq] = step
            return False
        return True

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self._waits.pop(seq, None)
        self._let_go.pop(seq, None)

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {"prefix_waits_total": float(self.n_waits)}

    def __len__(self) -> int:
        return len(self._waits)

    def _find(self, seq: Sequence, step: int) -> Wait | None:
        cache = self._floor.cache
        if not cache.reuse or not reuses_cache(seq):
            return None
        Z, key = cache.page_size, root_of(seq.request)
        most, leader = 0, None
        for other in self._floor.running:
            lease = other.lease
            if lease is None or lease.n_weights != cache.n_weights:
                continue
            if _computes(other, Z) and root_of(other.request) == key:
                n = common_pages(seq.tokens[:-1], other.tokens[: other.given], Z)
                if n > most and n > lease.n_published:
                    most, leader = n, other
        if leader is None:
            return None
        known = self._floor.n_known(seq)
        saved, left = most - known, len(seq.tokens) - known * Z
        if saved < MIN_PAGES and (saved < 1 or 2 * saved * Z < left):
            return None
        return Wait(leader=leader, n_pages=most, seen=_progress(leader), step=step)


def common_pages(a: Seq[int], b: Seq[int], page_size: int) -> int:
    """Whole pages that two sequences of tokens begin with alike."""
    n = min(len(a), len(b)) // page_size
    for i in range(n):
        page = slice(i * page_size, (i + 1) * page_size)
        if a[page] != b[page]:
            return i
    return n


def _computes(seq: Sequence, page_size: int) -> bool:
    """True while known tokens of ``seq`` fill pages that others cannot find yet."""
    lease = seq.lease
    return lease is not None and lease.cacheable and lease.n_published < seq.given // page_size


def _progress(leader: Sequence) -> tuple[int, int, int]:
    published = 0 if leader.lease is None else leader.lease.n_published
    return leader.scheduled, published, leader.pending


def _goes_on(wait: Wait, step: int) -> bool:
    lease = wait.leader.lease
    if lease is None or lease.n_published >= wait.n_pages:
        return False
    progress = _progress(wait.leader)
    if progress != wait.seen:
        wait.seen, wait.step = progress, step
    return step - wait.step < PATIENCE
