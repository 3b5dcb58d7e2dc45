"""Faults of simulated replicas: how they are asked for, and what is known of each afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jserve.errors import ConfigError

DEATH, HANG = "death", "hang"
KINDS = (DEATH, HANG)
NONE = "none"


@dataclass(frozen=True, slots=True)
class ReplicaFault:
    """At ``at`` the replica with the most open requests dies, or makes no more steps."""

    kind: str
    """One of ``KINDS``."""
    at: float
    """Seconds on the clock of the trace's arrivals."""

    def __str__(self) -> str:
        return f"{self.kind}={self.at:g}"


@dataclass(slots=True)
class Outage:
    """A replica that is lost. Times in simulated seconds; infinite for what has not come."""

    fault: ReplicaFault
    replica: int
    """Its number."""
    noticed_at: float = math.inf
    ready_at: float = math.inf
    """The time at which the one in its place is ready, or at which it is noticed that none is needed."""
    n_requests: int = 0
    """Requests that it answered, or was to answer."""

    def lasts(self, at: float) -> bool:
        """A replica is missing at ``at``."""
        return self.fault.at <= at < self.ready_at


def parse_faults(text: str) -> tuple[ReplicaFault, ...]:
    """The faults of ``death=60,hang=120.5``; (): there are none.

    Raises:
        ConfigError: it says something else.
    """
    if text.strip() in ("", NONE):
        return ()
    return tuple([_parsed(part, text) for part in text.split(",")])


def _parsed(part: str, text: str) -> ReplicaFault:
    kind, _, at = part.partition("=")
    try:
        fault = ReplicaFault(kind.strip(), float(at))
    except ValueError:
        fault = ReplicaFault("", 0.0)
    if fault.kind not in KINDS or not 0 <= fault.at < math.inf:
        why = f"must be {NONE} or like death=60,hang=120.5 (seconds), not {text[:80]!r}"
        raise ConfigError(f"faults {why}", field="faults")
    return fault


def check_faults(faults: Seq[ReplicaFault], most_replicas: int, batching: str) -> None:
    """Raises ConfigError for ``faults`` where nobody could go on."""
    if not faults:
        return
    if batching != "continuous":
        raise ConfigError(f"faults: {batching} batching is of one engine", field="faults")
    if most_replicas < 2:
        why = "nobody goes on with the requests of the only replica; replicas or max_replicas must be 2 or more"
        raise ConfigError(f"faults: {why}", field="faults")
