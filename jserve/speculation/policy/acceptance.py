"""Estimates acceptance by decayed counts of a request, of its lane and of all requests.

A *round* is one proposal of n drafts of which the first a were accepted; it tries ``min(a + 1, n)`` drafts, each
given that those before it were accepted::

    drafts   d1 d2 d3 d4 d5       accepted: 2        tried: d1 d2 (accepted), d3 (rejected); d4 d5 say nothing

A request's own rate is pulled towards that of its lane while little is known of it, and that towards the rate of
all requests. Old rounds fade, so a text that changes is noticed.
"""

from __future__ import annotations

from typing import NamedTuple

from jserve.types import Lane

FADE_REQUEST, FADE_LANE = 0.95, 0.99
"""Per draft tried, or per round for offers."""
PULL = 2.0
"""Tries of its own after which a request's rate counts as much as its lane's. Few, since texts differ: a request
whose drafts were rejected for two rounds is rarely one where most are accepted."""
_GUESS, _GUESS_WEIGHT = 0.5, 4.0


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


NEVER, SURE = Odds(0.0, 0.0), Odds(1.0, 1.0)


class DecayedRate:
    """A decayed share: ``good`` of ``tried``."""

    __slots__ = ("good", "tried")

    def __init__(self) -> None:
        self.good = self.tried = 0.0

    def add(self, good: float, tried: float, keep: float) -> None:
        self.good, self.tried = self.good * keep + good, self.tried * keep + tried

    def towards(self, prior: float, weight: float) -> float:
        """The share, pulled to ``prior`` as if that had been tried ``weight`` times."""
        return (self.good + weight * prior) / (self.tried + weight)


class Acceptance:
    """Rounds of one request, one lane or all."""

    __slots__ = ("drafts", "rounds")

    def __init__(self) -> None:
        self.drafts, self.rounds = DecayedRate(), DecayedRate()

    def add(self, n_drafts: int, n_accepted: int, fade: float) -> None:
        """One round; ``n_drafts`` may be 0."""
        self.rounds.add(n_drafts > 0, 1.0, fade)
        tried = min(n_accepted + 1, n_drafts)
        if tried:
            self.drafts.add(n_accepted, tried, fade**tried)

    def towards(self, prior: Odds, weight: float) -> Odds:
        return Odds(
            self.drafts.towards(prior.accepts, weight), self.rounds.towards(prior.offers, weight)
        )


class LaneAcceptance:
    """The measured acceptance of a proposer over all requests."""

    def __init__(self) -> None:
        self._all = Acceptance()
        self._lanes = {lane: Acceptance() for lane in Lane}

    def add(self, n_drafts: int, n_accepted: int, lane: Lane) -> None:
        for counts in (self._all, self._lanes[lane]):
            counts.add(n_drafts, n_accepted, FADE_LANE)

    def odds(self, own: Acceptance, lane: Lane) -> Odds:
        """Of a request with ``own`` rounds."""
        overall = self._all.towards(Odds(_GUESS, _GUESS), _GUESS_WEIGHT)
        return own.towards(self._lanes[lane].towards(overall, _GUESS_WEIGHT), PULL)


class Shadow:
    """Compares a proposal with the tokens that came, whether they were drafted or not.

    Verification never changes a token, so the text without drafts tells exactly which drafts would have been
    accepted: acceptance is measured without spending a step on it.
    """

    __slots__ = ("expected", "n_accepted")

    def __init__(self) -> None:
        self.expected: tuple[int, ...] | None = None
        """None: no round is open."""
        self.n_accepted = 0

    def open(self, drafts: tuple[int, ...]) -> None:
        self.expected, self.n_accepted = drafts, 0

    def see(self, token: int) -> tuple[int, int] | None:
        """The text goes on with ``token``; (drafts, accepted) when that ends the round."""
        if self.expected is None:
            return None
        n = self.n_accepted
        if n < len(self.expected) and self.expected[n] == token:
            self.n_accepted += 1
            return None
        ended = (len(self.expected), n)
        self.expected = None
        return ended
