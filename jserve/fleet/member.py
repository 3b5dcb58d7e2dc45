"""One replica as the fleet's face sees it: its number in the router, what was sent there, how long it is overdue."""

from __future__ import annotations

from collections.abc import Iterable

from jserve.engine.client import EngineClient
from jserve.engine.face import ReplicaState
from jserve.engine.health import HealthLimits
from jserve.engine.replica import Listener, Replica
from jserve.engine.streams import Stream
from jserve.engine.view import View
from jserve.engine.wire import Message, Stats
from jserve.fleet.roles import DECODE
from jserve.fleet.suspicion import TrustRecord
from jserve.ports import Clock
from jserve.types import Request

OVERDUE_STEPS, OVERDUE_S = 5, 0.9
"""A replica that has work is silent when it says nothing for so many of its usual steps and so many seconds: what it
worked on should go on elsewhere within a second and those steps, and who looks does so now and then."""
QUIET_S = 0.01
"""A replica that has work is quiet when it says nothing for so many seconds."""


class Member(Replica):
    """A replica whose engine somebody else keeps alive.

    Attributes:
        name: of the replica.
        number: in the router.
        silent: it was overdue, and has said nothing since.
        heard_at: when it last said something, or got something to do.
        n_requests: that it was given.
        role: of ``fleet.roles.ROLES``.
        updating: it gets nothing new, because it loads other weights, or has to.
        unfit: its ``degraded_reasons`` as they were looked at last; it gets nothing new while others are fit.
    """

    def __init__(
        self,
        name: str,
        number: int,
        client: EngineClient,
        listener: Listener,
        *,
        health: HealthLimits | None,
        clock: Clock,
    ) -> None:
        super().__init__(
            lambda: client, listener, max_restarts=0, backoff_s=0.0, health=health, clock=clock
        )
        self.name, self.number = name, number
        self.silent = self.updating = False
        self.unfit: list[str] = []
        self.n_requests = 0
        self.role = DECODE
        self.heard_at = clock()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Stats) and message.view is not None:
            # An earlier connection may have changed those that the replica started with.
            self.weights = message.view.weights
        super()._on_message(message)

    @property
    def page_weights(self) -> str:
        """``weights`` as names of pages have them."""
        weights = self.weights or ""
        return "" if weights == self.info.get("weights") else weights

    @property
    def view(self) -> View:
        return self.stats.view or View(ready=False)

    def work_on(self, stream: Stream, request: Request, ttl_s: float | None = None) -> None:
        idle = not self.n_open
        super().work_on(stream, request, ttl_s)
        self.n_requests += 1
        if idle:
            self.heard_at = self._clock()

    @property
    def may_get(self) -> bool:
        """Nothing but its engine speaks against requests."""
        return not self.silent and not self.updating

    @property
    def n_open(self) -> int:
        """Requests that it works on."""
        return sum(bool(stream.open) for stream in self.streams.values())

    def overdue(self) -> bool:
        """It has said nothing for too long while there is work: an engine that lives makes steps, or says that
        it cannot. One that loads other weights makes none."""
        limit_s = OVERDUE_STEPS * self.view.step_s + OVERDUE_S
        late = self._clock() - self.heard_at > limit_s
        return late and self.n_open > 0 and not self.updating

    def is_quiet(self) -> bool:
        """It has said nothing for a moment while there is work: it makes a long step, or is no more."""
        return self._clock() - self.heard_at >= QUIET_S and self.n_open > 0


def state_of(member: Member, record: TrustRecord, odd: int = 0) -> ReplicaState:
    """``member`` as those see it who watch, with what ``record`` holds of it and the audits in which it was ``odd``."""
    values, used = member.stats.values, ("pages_free", "pages_cached")
    return ReplicaState(
        name=member.name,
        state=_state(member, record),
        role=member.role,
        suspicion=record.factor,
        requests=member.n_requests,
        running=member.stats.running,
        waiting=member.stats.waiting,
        pages=values.get("pages_total", 0.0),
        pages_used=values.get("pages_total", 0.0) - sum(values.get(name, 0.0) for name in used),
        looked_up=values.get("cache_query_tokens", 0.0),
        found=values.get("cache_hit_tokens", 0.0),
        odd=odd,
        kv_events=member.info.get("kv_events", ""),
        pid=member.info.get("pid", 0),
    )


def _state(member: Member, record: TrustRecord) -> str:
    states = {"silent": member.silent, "updating": member.updating, "out": record.out}
    states |= {"unfit": bool(member.unfit), "suspected": record.factor > 1.0, "ready": True}
    return next(name for name, holds in states.items() if holds)


def all_unfit(members: Iterable[Member]) -> list[str]:
    """The reasons of all, each with its name, where none of ``members`` is fit."""
    reasons = {one.name: one.degraded_reasons() for one in members}
    if not all(reasons.values()):
        return []
    return [f"{name}: {reason}" for name, found in reasons.items() for reason in found]
