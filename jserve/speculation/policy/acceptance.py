"""Estimates acceptance by decayed counts of a request and of all requests.

A *round* is one proposal of n drafts of which the first a were accepted; it tries ``min(a + 1, n)`` drafts, each
given that those before it were accepted::

    drafts   d1 d2 d3 d4 d5       accepted: 2        tried: d1 d2 (accepted), d3 (rejected); d4 d5 say nothing

A request's own rate is pulled towards that of all requests while little is known of it. Old rounds fade.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

KEEP_REQUEST, KEEP_ALL = 0.95, 0.99
"""The share of a count that stays, per draft tried, or per round for offers."""
PULL, PULL_OFFERS = 8.0, 2.0
"""Tries of its own after which a request's rate counts as much as that of all, and rounds for offers: fewer, since
whether there is anything to copy differs most between texts."""
_GUESS_WEIGHT = 4.0


class Odds(NamedTuple):
    """The expected acceptance of the next round."""

    accepts: float
    """The chance that a draft is accepted, given those before it."""
    offers: float
    """The chance that there are drafts at all."""

    def expected(self, n: int) -> float:
        """Drafts accepted of a chain of ``n``."""
        a = self.accepts
        return self.offers * (n if a >= 1.0 else a * (1.0 - a**n) / (1.0 - a))


NEVER, SURE, GUESS = Odds(0.0, 0.0), Odds(1.0, 1.0), Odds(0.5, 0.5)


class Acceptance:
    """Decayed counts of rounds, over all requests."""

    __slots__ = ("accepted", "offered", "rounds", "tried")

    def __init__(self) -> None:
        self.accepted = self.tried = self.offered = self.rounds = 0.0

    def add(self, n_drafts: int, n_accepted: int, keep: float = KEEP_ALL) -> None:
        """One round; ``n_drafts`` may be 0."""
        tried = min(n_accepted + 1, n_drafts)
        fade = keep**tried
        self.accepted = self.accepted * fade + n_accepted
        self.tried = self.tried * fade + tried
        self.offered = self.offered * keep + (n_drafts > 0)
        self.rounds = self.rounds * keep + 1.0

    def odds(
        self, prior: Odds = GUESS, pull: float = _GUESS_WEIGHT, pull_offers: float = _GUESS_WEIGHT
    ) -> Odds:
        """Of the next round, pulled to ``prior`` as if that had been tried so many times."""
        return Odds(
            (self.accepted + pull * prior.accepts) / (self.tried + pull),
            (self.offered + pull_offers * prior.offers) / (self.rounds + pull_offers),
        )


class SequenceAcceptance:
    """The measured acceptance of one sequence, and the drafts it holds.

    Verification never changes a token, so any text tells which drafts of a proposal would have been accepted.
    """

    __slots__ = ("expected", "left", "n_right", "overall", "own")

    def __init__(self, overall: Acceptance) -> None:
        self.own, self.overall = Acceptance(), overall
        self.left = 0
        """Drafts that the device holds for it."""
        self.expected: Seq[int] | None = None
        """The proposal whose round is open; None: there is none."""
        self.n_right = 0
        """Tokens of it that came."""

    def add(self, n_drafts: int, n_accepted: int) -> None:
        """One round of this sequence, hence of all."""
        self.own.add(n_drafts, n_accepted, KEEP_REQUEST)
        self.overall.add(n_drafts, n_accepted)

    def odds(self) -> Odds:
        """Of its next round."""
        return self.own.odds(self.overall.odds(), PULL, PULL_OFFERS)

    def expect(self, drafts: Seq[int]) -> None:
        """``drafts`` are proposed: a round begins."""
        self.expected, self.n_right = drafts, 0

    def see(self, token: int) -> None:
        """The text goes on with ``token``."""
        if self.expected is None:
            return
        if self.n_right < len(self.expected) and self.expected[self.n_right] == token:
            self.n_right += 1
            return
        self.add(len(self.expected), self.n_right)
        self.expected = None
