"""Judges replicas that answer and are slow: suspicion, ejection, the way back.

A pure function of what was observed and when; no clock, no chance. Each replica is measured by how many times longer
it takes than it should, against the fleet's median, in windows of ``WINDOW_S``::

    ratio < 1.5            trusted: its price is its price
    1.5 <= ratio           suspected: its price times the ratio, so that it gets fewer requests
    3 <= ratio, 3 windows  out: it gets none, and what it has goes on elsewhere
    out for REST_S         tried with one copy of a request at a time (``fleet.probes``); ``PROBES`` good ones and it
                           is trusted again, a bad one and it rests for twice as long

At most a third of the fleet is out at once, and never the last one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

SUSPECT, OUT = 1.5, 3.0
WINDOW_S, WINDOWS = 2.0, 3
REST_S, MAX_REST_S = 10.0, 160.0
PROBES = 2
SHARE_OUT = 3
"""At most one in so many replicas is out."""


@dataclass(slots=True)
class TrustRecord:
    """The standing of one replica."""

    ratios: list[float] = field(default_factory=list)
    """Of the window that is open."""
    factor: float = 1.0
    """By which its price is multiplied."""
    n_bad: int = 0
    """Windows in a row in which it was as slow as one that is put out."""
    out: bool = False
    rest_s: float = REST_S
    rests_until: float = 0.0
    probe: str | None = None
    """Id of the copy that it is tried with."""
    n_good: int = 0
    """Probes in a row that went well."""


class Suspicion:
    """The records of all replicas, by name."""

    def __init__(self) -> None:
        self.records: dict[str, TrustRecord] = {}
        self.n_ejected = 0
        self._window_ends, self._usual = 0.0, 1.0

    def join(self, name: str) -> None:
        self.records[name] = TrustRecord()

    def leave(self, name: str) -> None:
        self.records.pop(name, None)

    def observe(self, name: str, ratio: float) -> None:
        """``name`` took ``ratio`` times what it should have."""
        record = self.records.get(name)
        if record is not None:
            record.ratios.append(ratio)

    def look(self, now: float) -> list[str]:
        """Close the window if it is over; those who are put out by it."""
        if now < self._window_ends:
            return []
        self._window_ends = now + WINDOW_S
        means = {n: statistics.fmean(r.ratios) for n, r in self.records.items() if r.ratios}
        for record in self.records.values():
            record.ratios.clear()
        if not means:
            return []
        self._usual = max(1.0, statistics.median_low(means.values()))
        for name, mean in means.items():
            self._judge(self.records[name], mean / self._usual)
        return self._eject(now, [n for n in means if self.records[n].n_bad >= WINDOWS])

    def _judge(self, record: TrustRecord, ratio: float) -> None:
        record.factor = ratio if ratio >= SUSPECT else 1.0
        record.n_bad = record.n_bad + 1 if ratio >= OUT else 0

    def _eject(self, now: float, names: Iterable[str]) -> list[str]:
        """The worst of ``names`` are out, as far as the fleet can do without them."""
        inside = [n for n in names if not self.records[n].out]
        room = n_may_be_out(len(self.records)) - sum(r.out for r in self.records.values())
        worst = sorted(inside, key=lambda n: -self.records[n].factor)[: max(0, room)]
        for name in worst:
            self._put_out(self.records[name], now)
        self.n_ejected += len(worst)
        return worst

    def _put_out(self, record: TrustRecord, now: float) -> None:
        record.out, record.n_bad, record.n_good, record.probe = True, 0, 0, None
        record.rests_until = now + record.rest_s
        record.rest_s = min(2 * record.rest_s, MAX_REST_S)

    def due(self, now: float) -> list[str]:
        """Those that have rested and may be tried."""
        return [
            name
            for name, record in self.records.items()
            if record.out and record.probe is None and now >= record.rests_until
        ]

    def probe(self, name: str, request_id: str) -> None:
        """``name`` is tried with this copy of a request."""
        self.records[name].probe = request_id

    def release(self, name: str, request_id: str) -> None:
        """The probe is over: where nobody knows how it went, the next one says so."""
        record = self.records.get(name)
        if record is not None and record.probe == request_id:
            record.probe = None

    def probed(self, name: str, request_id: str, ratio: float, now: float) -> None:
        """The probe took ``ratio`` times what it should have, and is over."""
        record = self.records.get(name)
        if record is None or record.probe != request_id:
            return
        record.probe = None
        if ratio / self._usual >= SUSPECT:
            self._put_out(record, now)
            return
        record.n_good += 1
        if record.n_good >= PROBES:
            self.records[name] = TrustRecord(rest_s=record.rest_s)


def n_may_be_out(n: int) -> int:
    """Of ``n`` replicas."""
    return 0 if n < 2 else max(1, n // SHARE_OUT)


class RetryBudget:
    """Requests that may be moved for no fault of an engine: a tenth of those that end well, so that
    moving them cannot become a storm.

    Args:
        share: of one more end, what may be moved.
        most: that may be saved.
    """

    def __init__(self, share: float = 0.1, most: float = 20.0) -> None:
        self._share, self._most, self._left = share, most, most

    def earned(self) -> None:
        """A request ended well."""
        self._left = min(self._most, self._left + self._share)

    def spend(self, n: int) -> int:
        """Of ``n`` requests, how many may be moved, which they then are."""
        n = min(n, int(self._left))
        self._left -= n
        return n
