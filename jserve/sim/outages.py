"""Loses simulated replicas, has it noticed as a live front notices it, and starts others in their place.

A death is noticed soon after it, a hang as ``fleet.member`` says::

    at             noticed_at                        ready_at
    |--------------|---------------------------------|
    the router     its requests go on elsewhere,     another replica is ready,
    sends there    its pages are forgotten           with an empty cache
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from jserve.errors import ConfigError
from jserve.fleet.face import LOOKS_S
from jserve.fleet.member import OVERDUE_S, OVERDUE_STEPS
from jserve.sim.faults import DEATH, Outage, ReplicaFault
from jserve.sim.replica import SimReplica
from jserve.sim.trace import TraceItem

if TYPE_CHECKING:
    from jserve.sim.fleet import FleetSimulation

DEATH_NOTICED_S = 0.05
"""Until a front leaves a process that was killed: 24 to 43 ms were measured on one machine (docs/fleet.md)."""


class Outages:
    """The faults that ``fleet`` was asked for.

    Args:
        fleet: whose replicas are lost.

    Attributes:
        found: the replicas that were lost so far.
    """

    def __init__(self, fleet: FleetSimulation) -> None:
        self._fleet = fleet
        self._left = deque(sorted(fleet.setup.faults, key=lambda fault: fault.at))
        self.found: list[Outage] = []

    @property
    def next_at(self) -> float:
        """The time of the next fault; infinite: there is none."""
        return self._left[0].at if self._left else math.inf

    def times(self) -> list[float]:
        """The times of the next fault, of its being noticed, and of the end of a wait; none once all is served."""
        fleet = self._fleet
        if not fleet.clients.records.open and fleet.clients.next_at is None:
            return []
        noticed = [self._noticed_at(one) for one in fleet.replicas.values() if one.outage]
        return [self.next_at, *noticed, *(fleet.starting if fleet.lost else ())]

    def look(self, now: float) -> None:
        """Replicas are lost, are noticed to be, or are ready in the place of others."""
        fleet = self._fleet
        while self.next_at <= now:
            self._lose(self._left.popleft())
        for one in list(fleet.replicas.values()):
            if one.outage is not None and self._noticed_at(one) <= now:
                self._notice(one, one.outage, now)
        fleet.start_ready(now)
        for one in list(fleet.replicas.values()):
            if one.outputs is not None and one.now <= self.next_at:
                fleet.tell(one)

    def check_over(self, ended: float) -> None:
        """Raises ConfigError where the simulation ``ended`` before some fault."""
        if self._left:
            why = f"all requests ended at {ended:.3f} s, before {self._left[0]}"
            raise ConfigError(f"faults: {why}", field="faults")

    def _lose(self, fault: ReplicaFault) -> None:
        """The replica with the most open requests makes no more steps; the router knows nothing of it."""
        fleet, now = self._fleet, fault.at
        fleet.hear(now)
        fleet.start_ready(now)
        run = [one for one in fleet.replicas.values() if one.outage is None]
        if not run:
            raise ConfigError(f"faults: no replica runs at {fault}", field="faults")
        one = min(run, key=lambda one: (-len(fleet.sent_to(one)), one.number))
        outage = Outage(fault, one.number)
        self.found.append(outage)
        one.lose(outage)
        for _, sent in fleet.sent_to(one):
            if not sent.is_prefill and sent.hung_up:  # its engine has not said so yet
                fleet.end(sent.item, sent.hung_up, now)

    def _noticed_at(self, one: SimReplica) -> float:
        """The first look that finds ``one`` gone, or overdue: it has work and is silent for too long."""
        assert one.outage is not None
        fault = one.outage.fault
        if fault.kind == DEATH:
            return fault.at + DEATH_NOTICED_S
        if not self._fleet.sent_to(one):
            return math.inf
        step_s = self._fleet.router.candidates[one.number].view.step_s
        late_at = max(fault.at, one.heard_at + OVERDUE_STEPS * step_s + OVERDUE_S)
        return (math.floor(late_at / LOOKS_S) + 1) * LOOKS_S

    def _notice(self, one: SimReplica, outage: Outage, now: float) -> None:
        """As ``fleet.face`` does: its requests go on elsewhere, and another one is started in its place."""
        fleet = self._fleet
        fleet.hear(now)
        is_needed = not fleet.leaves(one)
        fleet.leave(one, now)
        one.ended, outage.noticed_at, outage.ready_at = outage.fault.at, now, now
        if is_needed:
            outage.ready_at = now + fleet.setup.start_s
            fleet.starting.append(outage.ready_at)
        lost: list[TraceItem] = []
        for id, sent in fleet.sent_to(one):
            if sent.is_prefill:
                fleet.answer(id, now, done=False)
            else:
                del fleet.sent[id]
                fleet.router.over(sent.asked, one.number)
                lost.append(sent.item)
        outage.n_requests = len(lost)
        fleet.lost.park(lost, now)
        fleet.go_on(now)
