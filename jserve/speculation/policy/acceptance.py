"""Estimates acceptance by decayed counts of a request and of all requests.

A *round* is one proposal of n drafts of which the first a were accepted; it tries ``min(a + 1, n)`` drafts, each
given that those before it were accepted::

    drafts   d1 d2 d3 d4 d5       accepted: 2        tried: d1 d2 (accepted), d3 (rejected); d4 d5 say nothing

A request's own rate is pulled towards that of all requests while little is known of it. Old rounds fade.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import eq
from typing import NamedTuple

KEEP_REQUEST, KEEP_ALL = 0.95, 0.99
"""The share of a count that stays, per draft tried, or per round for offers."""
PULL, PULL_OFFERS = 8.0, 2.0
"""Tries of its own after which a request's rate counts as much as that of all, and rounds for offers: fewer, since
whether there is anything to copy differs most between texts."""


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
    """Decayed counts of rounds: of all requests, or of one sequence, whose rounds are ``overall``'s too.

    Verification never changes a token, so any text tells which drafts of a proposal would have been accepted.
    """

    __slots__ = ("accepted", "left", "offered", "overall", "proposal", "rounds", "tried")

    def __init__(self, overall: Acceptance | None = None) -> None:
        self.overall = overall
        self.accepted = self.tried = self.offered = self.rounds = 0.0
        self.left = 0
        """Drafts that the device holds for the sequence."""
        self.proposal: tuple[int, Seq[int]] | None = None
        """Tokens that the text had when the open round began, and its drafts; None: there is none."""

    def add(self, n_drafts: int, n_accepted: int) -> None:
        """One round; ``n_drafts`` may be 0."""
        keep = KEEP_ALL if self.overall is None else KEEP_REQUEST
        tried = min(n_accepted + 1, n_drafts)
        fade = keep**tried
        self.accepted = self.accepted * fade + n_accepted
        self.tried = self.tried * fade + tried
        self.offered = self.offered * keep + (n_drafts > 0)
        self.rounds = self.rounds * keep + 1.0
        if self.overall is not None:
            self.overall.add(n_drafts, n_accepted)

    def odds(self) -> Odds:
        """Of the next round."""
        prior = GUESS if self.overall is None else self.overall.odds()
        return Odds(
            (self.accepted + PULL * prior.accepts) / (self.tried + PULL),
            (self.offered + PULL_OFFERS * prior.offers) / (self.rounds + PULL_OFFERS),
        )

    def ended(self, tokens: Seq[int]) -> bool:
        """True when no round is open any more: it is counted as soon as the text, ``tokens``, shows all of it."""
        if self.proposal is not None:
            at, drafts = self.proposal
            right = [*map(eq, drafts, tokens[at:]), False].index(False)
            if len(tokens) <= at + right:
                return False
            self.add(len(drafts), right)
            self.proposal = None
        return True
