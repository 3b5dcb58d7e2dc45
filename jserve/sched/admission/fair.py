"""Fair queueing: one virtual token counter per party; the lowest counter is served next.

Every party has a counter of the tokens it was served, divided by its weight; the one with the least is served next.
A party that returns after a pause starts at the current service level, so none accumulates credit. Between two
parties that both always wait, served tokens over weight differ by at most one request each. Sources: start-time
fair queueing (Goyal et al., 1996) and the virtual token counter of "Fairness in Serving Large Language Models"
(Sheng et al., OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MOST = 256
"""Counters kept; beyond it the lower half becomes one, that of the highest among them."""


class Shares:
    """Counters by party; ``weights`` default to 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._served: dict[str, float] = {}
        self._now = 0.0
        """The counter of the party served last."""

    def join(self, party: str) -> None:
        """``party`` has something to do again."""
        self._served[party] = max(self._served.get(party, 0.0), self._now)

    def at(self, party: str) -> float:
        return self._served.get(party, self._now)

    def least(self, parties: Iterable[str]) -> str:
        """The next of ``parties`` (at least one, in order of rank); the first among equals."""
        return min(parties, key=self.at)

    def serve(self, party: str, tokens: float) -> None:
        """``party`` is served now and charged for ``tokens``."""
        self._now = max(self._now, self.at(party))
        self.charge(party, tokens)
        if len(self._served) > MOST:
            self._merge()

    def charge(self, party: str, tokens: float) -> None:
        """Charge more, or less than 0 to give back, without it being a turn."""
        self._served[party] = self.at(party) + tokens / self._weights.get(party, 1.0)

    def _merge(self) -> None:
        """Forget the lower half: a party of it that returns starts at the highest counter forgotten."""
        ordered = sorted(self._served.items(), key=lambda item: item[1])
        self._now = max(self._now, ordered[len(ordered) // 2 - 1][1])
        self._served = {party: n for party, n in ordered if n > self._now}
