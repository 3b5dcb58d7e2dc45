"""How often drafts stand: decayed counts per lane and position for a proposer, per request for its text.

Owns the estimates. Must not know steps, times or who drafts. A *round* is one proposal of m drafts of which
the first a stood; it tries ``min(a + 1, m)`` drafts, each given that those before it stood::

    drafts   d1 d2 d3 d4 d5       stood: 2        tried: d1 d2 (stood), d3 (fell); d4 d5 say nothing

What a request's next draft at position j is worth is its own rate, pulled towards its proposer's at that
position while little is known of it; that is the rate of the request's lane, pulled towards that of the others.
Old rounds fade, so a text that changes is noticed.
"""

from __future__ import annotations

from jserve.types import Lane

FADE_REQUEST = 0.95
"""Per draft tried (or round, for offers)."""
FADE_PROPOSER = 0.99
PULL = 2.0
"""Tries of its own after which a request's rate counts as much as its proposer's. Few, since texts differ: what
nobody's draft stood for in two rounds is rarely one where most do."""
_GUESS, _GUESS_WEIGHT = 0.5, 4.0


class DecayedRate:
    """A decayed share: ``good`` of ``tried``."""

    __slots__ = ("good", "tried")

    def __init__(self, good: float = 0.0, tried: float = 0.0) -> None:
        self.good, self.tried = good, tried

    def fade(self, keep: float) -> None:
        self.good, self.tried = self.good * keep, self.tried * keep

    def add(self, good: float, tried: float, keep: float) -> None:
        self.good = self.good * keep + good
        self.tried = self.tried * keep + tried

    def towards(self, prior: float, weight: float) -> float:
        """The share, pulled to ``prior`` as if that had been tried ``weight`` times."""
        return (self.good + weight * prior) / (self.tried + weight)


class ProposerRates:
    """What is known of one proposer over all requests."""

    def __init__(self, most: int) -> None:
        self.offers = DecayedRate()
        """Rounds in which it had anything to propose."""
        self.positions = [DecayedRate() for _ in range(most)]
        self.lanes = {lane: [DecayedRate() for _ in range(most)] for lane in Lane}

    def add(self, n_drafts: int, n_stood: int, lane: Lane) -> None:
        """One round; ``n_drafts`` may be 0."""
        self.offers.add(n_drafts > 0, 1.0, FADE_PROPOSER)
        for j in range(min(n_stood + 1, n_drafts, len(self.positions))):
            for rates in (self.positions, *self.lanes.values()):
                rates[j].fade(FADE_PROPOSER)
            for rates in (self.positions, self.lanes[lane]):
                rates[j].add(j < n_stood, 1.0, 1.0)

    def offer(self) -> float:
        return self.offers.towards(_GUESS, _GUESS_WEIGHT)

    def rate(self, position: int, lane: Lane) -> float:
        """The chance that a draft at ``position`` stands, given those before it, of a new request."""
        j = min(position, len(self.positions) - 1)
        own, overall = self.lanes[lane][j], self.positions[j]
        others = DecayedRate(overall.good - own.good, overall.tried - own.tried)
        return own.towards(others.towards(_GUESS, _GUESS_WEIGHT), _GUESS_WEIGHT)


class RequestRates:
    """What is known of one sequence's text."""

    __slots__ = ("drafts", "offers")

    def __init__(self) -> None:
        self.drafts, self.offers = DecayedRate(), DecayedRate()

    def add(self, n_drafts: int, n_stood: int) -> None:
        self.offers.add(n_drafts > 0, 1.0, FADE_REQUEST)
        tried = min(n_stood + 1, n_drafts)
        if tried:
            self.drafts.add(n_stood, tried, FADE_REQUEST**tried)

    def offer(self, proposer: ProposerRates) -> float:
        """Chance that the next round has drafts at all."""
        return self.offers.towards(proposer.offer(), PULL)

    def gains(self, most: int, proposer: ProposerRates, lane: Lane) -> list[float]:
        """Expected drafts that stand of 0, 1 ... ``most``."""
        found, standing = [0.0], 1.0
        for j in range(most):
            standing *= self.drafts.towards(proposer.rate(j, lane), PULL)
            found.append(found[-1] + standing)
        return found


class Shadow:
    """What a proposal would have brought, seen in the tokens that came, drafted or not.

    Verification never changes a token, so the text without drafts tells exactly what drafts would have
    stood: acceptance is measured without spending a step on it.
    """

    __slots__ = ("expected", "n_stood")

    def __init__(self) -> None:
        self.expected: tuple[int, ...] | None = None
        """None: no round is open."""
        self.n_stood = 0

    def open(self, drafts: tuple[int, ...]) -> None:
        self.expected, self.n_stood = drafts, 0

    def see(self, token: int) -> tuple[int, int] | None:
        """The text goes on with ``token``; (drafts, stood) when that ends the round."""
        if self.expected is None:
            return None
        n = self.n_stood
        if n < len(self.expected) and self.expected[n] == token:
            self.n_stood += 1
            return None
        ended = (len(self.expected), n)
        self.expected = None
        return ended
