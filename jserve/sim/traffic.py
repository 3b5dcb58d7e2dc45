"""Generates traces from seeded sources: arrivals, lengths, prefixes and sessions.

One source is a line of options, several are joined by ``;``, or are one per line in a ``.traffic`` file (# begins
a comment)::

    rate=8,n=2000,prompt=512,output=128 ; lane=bulk,rate=2,output=400,start=60,seconds=30

Lengths are log-normal with the stated mean (before they are cut to their range). Shared prefixes
are drawn with Zipf popularity. A session's next turn is its last prompt, the answer, and a new
message, sent a think time after the answer ended. Bursty arrivals are a Poisson process whose rate
switches between two levels (an MMPP) and whose mean is ``rate``.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jserve.errors import ConfigError
from jserve.options import checked, opt
from jserve.sim.trace import PromptPiece, TraceItem
from jserve.types import Lane

LANES = tuple(lane.value for lane in Lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSource:
    """One kind of client. Every field is a key of the text form."""

    rate: float = opt(1.0, "requests (first turns of sessions) per second", min=1e-6)
    n: int = opt(0, "requests (sessions) in all; 0 is as many as fit into seconds", min=0)
    start: float = opt(0.0, "seconds before the first one", min=0.0)
    seconds: float = opt(0.0, "seconds of arrivals; 0 is until n have come", min=0.0)
    arrivals: str = opt("poisson", "spacing", choices=("poisson", "bursty", "even"))
    burst: float = opt(5.0, "rate inside a burst over the mean rate", min=1.0)
    burst_s: float = opt(4.0, "mean seconds of a burst", min=1e-3)
    burst_share: float = opt(0.1, "share of the time that is bursts", min=1e-3, max=0.99)
    prompt: float = opt(512.0, "mean tokens of a first message", min=1.0)
    prompt_sigma: float = opt(0.8, "sigma of its logarithm", min=0.0, max=3.0)
    follow: float = opt(64.0, "mean tokens of a later message of a session", min=1.0)
    output: float = opt(128.0, "mean tokens of an answer", min=1.0)
    output_sigma: float = opt(0.6, "sigma of its logarithm", min=0.0, max=3.0)
    limit: int = opt(0, "max_tokens that the client states; 0 states the answer's length", min=0)
    context: int = opt(8192, "tokens that a request never exceeds; ends sessions", min=2)
    prefixes: int = opt(0, "shared prefixes", min=0)
    prefix: int = opt(0, "tokens of each shared prefix", min=0)
    zipf: float = opt(1.0, "exponent of the popularity of prefixes and tenants", min=0.0)
    turns: float = opt(1.0, "mean turns of a session (geometric)", min=1.0)
    think: float = opt(10.0, "mean seconds between an answer and the next turn", min=0.0)
    tenants: int = opt(0, "tenants, Zipf-distributed; 0 is one without a name", min=0)
    lane: str = opt("standard", "lane of the requests", choices=LANES)
    priority: int = opt(0, "lower runs first within the lane")
    ttft_ms: float = opt(0.0, "deadline of the first token; 0 is none", min=0.0)
    tpot_ms: float = opt(0.0, "deadline of the mean time between tokens; 0 is none", min=0.0)
    deadline_ms: float = opt(0.0, "deadline of the last token; 0 is none", min=0.0)

    def __post_init__(self) -> None:
        if not self.n and not self.seconds:
            raise ConfigError("a traffic source needs n or seconds", field="n")
        if self.arrivals == "bursty" and self.burst * self.burst_share > 1:
            raise ConfigError("burst times burst_share must not exceed 1", field="burst")
        if bool(self.prefixes) != bool(self.prefix):
            raise ConfigError("prefixes and prefix go together", field="prefixes")
        if self.prefix + 2 > self.context or self.limit + 2 > self.context:
            raise ConfigError("prefix and limit must fit into context", field="context")


def parse(text: str) -> tuple[TrafficSource, ...]:
    """Sources from their text form.

    Raises:
        ConfigError: an unknown key or a bad value; ``field`` names it.
    """
    return tuple(_source(part) for part in text.split(";") if part.strip())


def parse_file(path: Path) -> tuple[TrafficSource, ...]:
    """Sources from a file.

    Raises:
        ConfigError: the file cannot be read, or see ``parse``.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"traffic {path}: {e}", field="trace") from None
    return parse(";".join(line.partition("#")[0] for line in lines))


def _source(text: str) -> TrafficSource:
    known = {f.name: f for f in dataclasses.fields(TrafficSource)}
    given = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise ConfigError(f"traffic: {pair.strip()!r} is not key=value", field="trace")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"traffic: unknown key {name!r}{hint}", field=name)
        given[name] = checked(known[name], value)
    return TrafficSource(**given)


def generate(sources: tuple[TrafficSource, ...], seed: int) -> list[TraceItem]:
    """The requests of all sources in order of arrival; sessions' later turns behind their first."""
    streams = itertools.count(1)
    sessions = [
        (at, k, turns)
        for k, source in enumerate(sources)
        for at, turns in _Draw(source, k, seed, streams).sessions()
    ]
    sessions.sort(key=lambda session: session[:2])
    return [item for _, _, turns in sessions for item in turns]


class _Draw:
    """The draws of one source; each quantity has a generator of its own."""

    def __init__(
        self, source: TrafficSource, number: int, seed: int, streams: Iterator[int]
    ) -> None:
        self.source, self.number, self.streams = source, number, streams
        self.times, self.sizes, self.picks = (
            np.random.default_rng((seed, number, what)) for what in range(3)
        )
        self.prefixes = [next(streams) for _ in range(source.prefixes)]
        self.prefix_p = _zipf(source.prefixes, source.zipf)
        self.tenant_p = _zipf(source.tenants, source.zipf)

    def sessions(self) -> Iterator[tuple[float, list[TraceItem]]]:
        source = self.source
        for i, at in enumerate(self.arrivals()):
            if (source.n and i >= source.n) or (source.seconds and at >= source.seconds):
                return
            yield source.start + at, list(self.session(i, source.start + at))

    def arrivals(self) -> Iterator[float]:
        source, at = self.source, 0.0
        if source.arrivals == "even":
            yield from (i / source.rate for i in itertools.count())
        elif source.arrivals == "bursty":
            yield from self.bursts()
        while True:
            at += float(self.times.exponential(1 / source.rate))
            yield at

    def bursts(self) -> Iterator[float]:
        source, share, now = self.source, self.source.burst_share, 0.0
        calm = source.rate * (1 - share * source.burst) / (1 - share)
        calm_s = source.burst_s * (1 - share) / share
        levels = ((calm, calm_s), (source.rate * source.burst, source.burst_s))
        for rate, mean_s in itertools.cycle(levels):
            end = now + float(self.times.exponential(mean_s))
            while rate > 0:
                now += float(self.times.exponential(1 / rate))
                if now >= end:
                    break
                yield now
            now = end

    def session(self, number: int, at: float) -> Iterator[TraceItem]:
        """The turns of one session, as far as the context goes."""
        source, pieces = self.source, self.prefix()
        tenant = f"t{self.pick(self.tenant_p)}" if source.tenants else ""
        n_turns = int(self.picks.geometric(1 / source.turns)) if source.turns > 1 else 1
        before = ""
        for turn in range(n_turns):
            room = source.context - sum(piece[2] for piece in pieces)
            mean = source.follow if turn else source.prompt
            n_user = min(self.length(mean, source.prompt_sigma), room - 1 - source.limit)
            if n_user < 1:
                return
            n_out = self.length(source.output, source.output_sigma)
            n_out = min(n_out, source.limit or room - n_user)
            pieces = (*pieces, (next(self.streams), 0, n_user))
            answer = next(self.streams)
            id = f"s{self.number}.{number}" + (f".{turn}" if source.turns > 1 else "")
            wait = float(self.picks.exponential(source.think)) if turn else at
            yield self.item(id, wait, before, pieces, answer, n_out, tenant)
            before = id
            if n_out > 1:
                pieces = (*pieces, (answer, 0, n_out - 1))

    def item(
        self,
        id: str,
        at: float,
        after: str,
        pieces: tuple[PromptPiece, ...],
        answer: int,
        n_out: int,
        tenant: str,
    ) -> TraceItem:
        source = self.source
        return TraceItem(
            id=id,
            at=round(at, 6),
            after=after,
            prompt=pieces,
            outputs=(((answer, 0, n_out),),),
            max_tokens=source.limit or n_out,
            lane=Lane(source.lane),
            tenant=tenant,
            priority=source.priority,
            ttft_deadline_ms=source.ttft_ms or None,
            tpot_deadline_ms=source.tpot_ms or None,
            deadline_ms=source.deadline_ms or None,
        )

    def prefix(self) -> tuple[PromptPiece, ...]:
        if not self.prefixes:
            return ()
        return ((self.prefixes[self.pick(self.prefix_p)], 0, self.source.prefix),)

    def pick(self, cumulative: np.ndarray) -> int:
        found = np.searchsorted(cumulative, self.picks.random(), side="right")
        return min(int(found), len(cumulative) - 1)

    def length(self, mean: float, sigma: float) -> int:
        value = self.sizes.lognormal(math.log(mean) - sigma**2 / 2, sigma)
        return max(1, round(min(value, self.source.context)))


def _zipf(n: int, exponent: float) -> np.ndarray:
    """Cumulative probabilities of ranks 0 .. n-1."""
    weights = 1.0 / np.arange(1, n + 1) ** exponent
    return np.cumsum(weights / weights.sum()) if n else weights
