"""Computes the pages that a sequence takes when it is admitted, and ever.

With a window a sequence takes pages a row ahead and gives others back. One that is protected and longer
than the bound of its window (``PageDemand``) rolls: it enters with that many pages of its own, which no other sequence
finds, so each that slides out of the window is free at once and becomes its next page ahead::

    own   [ 4 ][ 5 ][ 6 ][ 7 ][ 8 ]      slid: 4      [ 5 ][ 6 ][ 7 ][ 8 ][ 9 ]     never asks again

Where groups of layers look back differently far, each reach does so by itself: those that see all take their pages as
without a window.
"""

from __future__ import annotations

from jserve.kv.ledger import Cache, Lease
from jserve.kv.pages import PageLease
from jserve.sched import policy
from jserve.types import Sequence
from jserve.window import PageDemand, Window


class EntryPages:
    """The pages that sequences take of ``cache``; ``chunk``: most tokens of a prefill row."""

    def __init__(self, cache: Cache, demand: PageDemand, chunk: int) -> None:
        self.cache, self.demand, self.chunk = cache, demand, chunk
        self.slides = demand.slides
        """True where some group gives pages back."""

    def most(self, seq: Sequence) -> int:
        """Pages that ``seq`` ever holds at once."""
        shares = self._one_reach and self.rolls(seq)
        return self.demand.most(policy.kv_tokens(seq), scale=2 if shares else 1)

    def rolls(self, seq: Sequence) -> bool:
        """True for one that is protected and longer than a window of its pages."""
        if not (self.slides and policy.protected(seq)):
            return False
        return self.demand.exceeds(policy.kv_tokens(seq))

    def may_share(self, seq: Sequence) -> bool:
        """True if ``seq`` may hold pages of others beside its own: of those that roll, where there is room for both,
        and never with groups, whose tables have columns for its own alone."""
        if not self.rolls(seq):
            return True
        both = self.demand.most(policy.kv_tokens(seq), scale=2)
        return self._one_reach and self.cache.n_available >= both

    def rolled(self, seq: Sequence, lease: Lease) -> list[int]:
        """Tokens of each part whose pages ``seq``, which rolls, has when those it may hold are its own."""
        most = policy.kv_tokens(seq)
        return [
            min(most, self._own(part, bound) if bound else most)
            for part, (_, bound) in zip(lease.parts, self.demand.parts, strict=True)
        ]

    def tokens(
        self, seq: Sequence, n_cached: int, lease: Lease | None = None
    ) -> tuple[list[int], int]:
        """(tokens of each part whose pages ``seq`` takes at admission, pages that its prompt needs later beside
        those): with a window it takes them a row ahead, since it gives others back meanwhile."""
        later, first = 0, []
        parts = (None,) * len(self.demand.parts) if lease is None else lease.parts
        for (n, bound), part, cache in zip(self.demand.parts, parts, self.cache.parts, strict=True):
            tokens, more = self._of_part(seq, n_cached, bound, part, cache.window)
            first.append(tokens)
            later += n * more
        return first, later

    def pages(self, seq: Sequence) -> int:
        """Pages of ``tokens``, if nothing of ``seq`` is cached."""
        first, later = self.tokens(seq, 0)
        demand = self.demand
        taken = [n * demand.pages(t) for t, (n, _) in zip(first, demand.parts, strict=True)]
        return sum(taken) + later

    @property
    def _one_reach(self) -> bool:
        return len(self.demand.parts) == 1

    def _own(self, lease: PageLease, bound: int) -> int:
        """Tokens whose pages ``lease`` has when ``bound`` of them are its own."""
        return (len(lease.pages) + bound - lease.n_own) * self.demand.page_size

    def _of_part(
        self, seq: Sequence, n_cached: int, bound: int, lease: PageLease | None, window: Window
    ) -> tuple[int, int]:
        """``tokens`` of one part, in pages of one group."""
        wanted, Z = policy.tokens_wanted(seq), self.demand.page_size
        if not bound:
            return wanted, 0
        if policy.protected(seq):
            if policy.kv_tokens(seq) <= bound * Z:
                return wanted, 0
            return min(wanted, bound * Z if lease is None else self._own(lease, bound)), 0
        first = min(wanted, n_cached + self.chunk)
        n_gone = len(window.gone(n_cached))
        held, whole = -(-first // Z) - n_gone, -(-wanted // Z) - n_gone
        return first, max(0, min(whole, bound) - held)
