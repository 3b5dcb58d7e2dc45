"""Judges a canary: other weights that a few replicas try, by what is measured of them and of the rest.

``verdict`` is a pure function of both sides' figures, in this order::

    roll back  a replica of the canary died, hung, was put out or had broken weights
               more requests failed than may of as many as are wanted
               a latency's quantile is above its bound, both taken at the far ends of what chance allows
    wait       fewer requests ended than are wanted, on either side
               the quantile itself is above its bound
    promote    else
    roll back  what would wait is over its deadline

Latencies are counted in buckets whose bounds grow by a ninth; a doubt of theirs is for the canary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from jserve.errors import (
    BadRequest,
    ConfigError,
    DeadlineUnreachable,
    NotReady,
    Overloaded,
    WeightsChanged,
    WeightsError,
    error_of,
)
from jserve.options import checked, opt
from jserve.types import Finish, Output

LEAST_S, GROWTH = 1e-4, 2**0.125
"""The upper bound of the first bucket, and of each bucket over that of the one before."""
DEVIATIONS = 3.0
"""Standard deviations by which the rank of a quantile may be wrong by chance."""
ROUNDING = 1e-9
"""A share times a count may be so much below a whole number that it stands for."""
UNCOUNTED = (Overloaded.code, DeadlineUnreachable.code, NotReady.code, WeightsChanged.code)
"""Ends that say nothing of the weights of whoever tells them."""

Action = Literal["promote", "roll_back", "wait"]


class Histogram:
    """Counts of seconds by bucket."""

    def __init__(self) -> None:
        self.n = 0
        self._counts: Counter[int] = Counter()

    def observe(self, seconds: float) -> None:
        self.n += 1
        self._counts[_bucket(seconds)] += 1

    def quantile(self, q: float, deviations: float = 0.0) -> float | None:
        """The upper bound of the bucket that has the ``q``-quantile, by nearest rank; its rank moved by so many
        standard deviations. None where so few were counted that there is no such rank."""
        if not self.n:
            return None
        off = deviations * math.sqrt(self.n * q * (1.0 - q))
        rank = math.ceil(self.n * q + off) if off >= 0.0 else math.floor(self.n * q + off)
        if not 1 <= rank <= self.n:
            return None
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return LEAST_S * GROWTH**bucket
        raise AssertionError("a rank is among the counts")


def _bucket(seconds: float) -> int:
    if seconds <= LEAST_S:
        return 0
    return math.ceil(math.log(seconds / LEAST_S, GROWTH))


@dataclass(slots=True)
class Figures:
    """The counts of one side since the analysis began, by choices."""

    ended: int = 0
    failed: int = 0
    """Of ``ended``, by a fault of ours."""
    ttft: Histogram = field(default_factory=Histogram)
    """Seconds from the arrival to the first token."""
    tpot: Histogram = field(default_factory=Histogram)
    """Seconds a token behind the first one, a mean of each choice."""
    faults: list[str] = field(default_factory=list)
    """Deaths and faults of replicas, of which none is allowed."""

    @property
    def error_share(self) -> float:
        return self.failed / self.ended if self.ended else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The bounds of a canary, as ``update_weights`` takes them."""

    min_requests: int = opt(100, "choices of each side that must have ended", min=1)
    max_error_share: float = opt(
        0.01, "of the canary's that fail, above the share of the others'", min=0.0, max=1.0
    )
    max_ttft_ratio: float = opt(
        1.25, "of the quantiles of the times to first token, the canary's over the others'", min=1.0
    )
    max_tpot_ratio: float = opt(1.25, "of the seconds a token, likewise", min=1.0)
    quantile: float = opt(0.9, "which quantile", min=0.01, max=0.999)
    progress_deadline_s: float = opt(
        3600.0, "after which a canary that is not promoted is rolled back", min=0.0
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Analysis:
        """Raises BadRequest, which names the field."""
        known = {each.name: each for each in fields(cls)}
        found = {}
        for name, value in given.items():
            where = f"analysis.{name}"
            if name not in known:
                raise BadRequest(f"{where}: there is no such bound", field=where)
            try:
                found[name] = checked(known[name], value, where)
            except ConfigError as error:
                raise BadRequest(error.message, field=where) from None
        return cls(**found)


class CanaryVerdict(NamedTuple):
    """The fate of a canary, and its reason."""

    action: Action
    why: str


def verdict(canary: Figures, rest: Figures, bounds: Analysis, waited_s: float) -> CanaryVerdict:
    """The fate of ``canary``, which has been compared with ``rest`` for ``waited_s``."""
    found = _judged(canary, rest, bounds)
    if found.action == "wait" and waited_s >= bounds.progress_deadline_s:
        return CanaryVerdict(
            "roll_back", f"the deadline of {bounds.progress_deadline_s:g} s: {found.why}"
        )
    return found


def _judged(canary: Figures, rest: Figures, bounds: Analysis) -> CanaryVerdict:
    if canary.faults:
        return CanaryVerdict("roll_back", canary.faults[0])
    may_fail = (rest.error_share + bounds.max_error_share) * max(canary.ended, bounds.min_requests)
    if canary.failed > may_fail + ROUNDING:
        why = (
            f"{canary.failed} of {canary.ended} failed, of the others {rest.failed} of {rest.ended}"
        )
        return CanaryVerdict("roll_back", why)
    slower = [
        _slower("time to first token", canary.ttft, rest.ttft, bounds.max_ttft_ratio, bounds),
        _slower("time a token", canary.tpot, rest.tpot, bounds.max_tpot_ratio, bounds),
    ]
    for each in slower:
        if each is not None and each.action == "roll_back":
            return each
    for name, n in (("canary", canary.ended), ("others", rest.ended)):
        if n < bounds.min_requests:
            return CanaryVerdict("wait", f"the {name} ended {n} of {bounds.min_requests}")
    why = f"{canary.ended} ended, {canary.failed} failed, no latency is above its bound"
    return next((each for each in slower if each is not None), CanaryVerdict("promote", why))


def _slower(
    name: str, canary: Histogram, rest: Histogram, ratio: float, bounds: Analysis
) -> CanaryVerdict | None:
    """Compares the canary's quantile with ``ratio`` times the others'. None: it is not above that, or nothing was
    counted; roll back where chance does not explain it."""
    q = bounds.quantile
    looks: tuple[tuple[Action, float], ...] = (("roll_back", DEVIATIONS), ("wait", 0.0))
    for action, sigmas in looks:
        own, others = canary.quantile(q, -sigmas), rest.quantile(q, sigmas)
        if own is not None and others is not None and own > ratio * GROWTH * others:
            why = f"{name}, {q:g}-quantile: {1e3 * own:.4g} ms, of the others {1e3 * others:.4g} ms"
            return CanaryVerdict(action, why)
    return None


@dataclass(slots=True)
class _RunningChoice:
    """A choice that runs. ``sent`` is the attempt that it was told by."""

    sent: object
    whole: bool
    """All of its tokens are of one attempt."""
    first_at: float = 0.0
    n: int = 0


class CanaryWatch:
    """Counts what both sides do.

    Args:
        bounds: of the analysis.
        running: the fate of running requests, for whoever promotes.
        began: seconds; requests that were sent before count for nothing.
    """

    def __init__(self, bounds: Analysis, running: str, began: float) -> None:
        self.bounds, self.running, self.began = bounds, running, began
        self.canary, self.rest = Figures(), Figures()
        self._open: dict[tuple[str, int], _RunningChoice] = {}

    def told(
        self, output: Output, sent: object, sent_at: float, now: float, *, tried: bool
    ) -> None:
        """``output`` of the attempt ``sent`` came; ``tried``: of a replica of the canary."""
        if sent_at < self.began:
            return
        figures = self.canary if tried else self.rest
        key = output.request_id, output.index
        choice = self._open.get(key)
        if choice is None or choice.sent is not sent:
            choice = self._open[key] = _RunningChoice(sent, whole=choice is None)
        if output.token_ids:
            if not choice.n and choice.whole:
                figures.ttft.observe(now - sent_at)
            choice.first_at = choice.first_at if choice.n else now
            choice.n += len(output.token_ids)
        if output.finish is not None:
            del self._open[key]
            self._ended(figures, output, choice, now)

    def _ended(self, figures: Figures, output: Output, choice: _RunningChoice, now: float) -> None:
        if output.finish is Finish.ERROR:
            error = error_of(output.error_code, "")
            if error.code in UNCOUNTED or error.status < 500:
                return
            figures.failed += 1
            if output.error_code == WeightsError.code:
                figures.faults.append(f"{WeightsError.code}: {output.error}")
        figures.ended += 1
        if choice.n > 1 and choice.whole and output.finish is not Finish.ERROR:
            figures.tpot.observe((now - choice.first_at) / (choice.n - 1))

    def forget(self, request_id: str, n: int) -> None:
        """Nobody waits for the ``n`` choices of this request any more."""
        for i in range(n):
            self._open.pop((request_id, i), None)

    def verdict(self, now: float) -> CanaryVerdict:
        return verdict(self.canary, self.rest, self.bounds, now - self.began)

    def facts(self, now: float) -> dict[str, Any]:
        """For an operator."""
        action, why = self.verdict(now)
        sides = {"canary": self.canary, "rest": self.rest}
        return {
            "verdict": action,
            "why": why,
            "seconds": round(now - self.began, 3),
            **{name: _facts(figures, self.bounds.quantile) for name, figures in sides.items()},
        }


def _facts(figures: Figures, q: float) -> dict[str, Any]:
    return {
        "ended": figures.ended,
        "failed": figures.failed,
        "ttft_s": figures.ttft.quantile(q),
        "tpot_s": figures.tpot.quantile(q),
    }
