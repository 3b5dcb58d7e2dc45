"""A simulated replica as the simulated front knows it: its engine, what was sent to it, and what it says.

It owns no decision: ``sim.fleet`` has them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence as Seq
from heapq import heappop, heappush
from typing import NamedTuple

from jserve.engine.view import PageEvent, View
from jserve.fleet.autoscale import ReplicaLoad
from jserve.fleet.describe import view_of
from jserve.fleet.page_log import PageLog
from jserve.fleet.route import Asked
from jserve.ports import RunnerLimits
from jserve.sim.clients import Clients
from jserve.sim.device import SimClock
from jserve.sim.faults import Outage
from jserve.sim.pages import SharedPages
from jserve.sim.simulate import Setup, Simulation
from jserve.sim.trace import TraceItem
from jserve.types import Output


class Said(NamedTuple):
    """The message of a replica at the end of a step; ``number`` is that of the message."""

    at: float
    number: int
    by: SimReplica
    ended: Seq[tuple[str, int]]
    """Requests, with the tokens that were drawn."""
    prefills: Seq[Output]
    """Ends of prefills for other replicas."""
    view: View | None
    pages: list[PageEvent]


@dataclasses.dataclass(slots=True)
class SentItem:
    """A request on its way."""

    item: TraceItem
    asked: Asked
    to: SimReplica
    is_prefill: bool = False
    """Only its prompt is computed there, for whoever answers it."""
    still_open: set[int] = dataclasses.field(init=False)
    """Choices whose client did not hang up."""

    def __post_init__(self) -> None:
        self.still_open = {*range(len(self.item.outputs))}

    def hang_up(self, index: int | None) -> None:
        """Its client wants no more of choice ``index``, or of any."""
        self.still_open -= self.still_open if index is None else {index}

    @property
    def hung_up(self) -> set[int]:
        """Choices that its client wants no more."""
        return {*range(len(self.item.outputs))} - self.still_open


class SimReplica:
    """One engine, its number at the router, and what that was told of it; it runs from ``began`` to ``ended``."""

    def __init__(
        self,
        number: int,
        setup: Setup,
        limits: RunnerLimits,
        clients: Clients,
        shared: SharedPages | None,
    ) -> None:
        self.number, self.role, self.began, self.ended = number, "", 0.0, 0.0
        self.simulation = Simulation(setup, limits, clients, clock=SimClock(), shared=shared)
        self.log = PageLog()
        self.simulation.scheduler.resources.cache.listener = self.log
        self.n_sent = 0
        self.told_at = -math.inf
        self.heard_at = 0.0
        """The time at which it last said something, or got something to do."""
        self.outputs: list[Output] | None = None
        """Those of its last step, until its clients have them; None: they do."""
        self.outage: Outage | None = None
        """It is lost: its engine makes no more steps."""

    @property
    def now(self) -> float:
        return self.simulation.clock.now

    @property
    def busy(self) -> bool:
        return self.outage is None and self.simulation.engine.busy

    @property
    def idle(self) -> bool:
        """It has nothing to do and nothing to tell."""
        return self.outage is None and not self.busy and self.outputs is None

    def lose(self, outage: Outage) -> None:
        """Its engine ends, or hangs: nobody gets outputs of its last step that were not told yet."""
        self.outage, self.outputs = outage, None
        self.simulation.clock.now = outage.fault.at
        self.simulation.runner.lose(outage.fault.at)

    @property
    def load(self) -> ReplicaLoad:
        scheduler = self.simulation.scheduler
        demand = scheduler.demand
        queue_s = scheduler.gate.queue_s()
        return ReplicaLoad(offered_s=demand.offered_s, saved_s=demand.saved_s, queue_s=queue_s)


class Messages:
    """Those of replicas, in the order of time."""

    def __init__(self) -> None:
        self._heap: list[Said] = []
        self._n = 0

    def say(
        self,
        one: SimReplica,
        ended: Seq[tuple[str, int]] = (),
        prefills: Seq[Output] = (),
        *,
        tells: bool,
    ) -> None:
        """Queue what ``one`` says now; ``tells``: its view is among it."""
        if not tells and not ended and not prefills:
            return
        view, pages = None, []
        if tells:
            engine, one.told_at = one.simulation.engine, one.now
            n_taken = one.n_sent - engine.n_unread
            view = view_of(one.simulation.scheduler, n_taken, page_s=engine.page_s)
            pages = one.log.take()
        self._n += 1
        heappush(self._heap, Said(one.now, self._n, one, ended, prefills, view, pages))

    def until(self, now: float) -> Iterator[Said]:
        """Those that are said by ``now``, each once."""
        while self._heap and self._heap[0].at <= now:
            yield heappop(self._heap)
