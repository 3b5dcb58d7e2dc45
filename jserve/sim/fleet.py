"""Simulates several engines behind one router: the engines of ``sim.simulate``, each with its own clock.

The engine whose clock is behind steps next, so no arrival comes to one that is ahead of it. What a replica says of
itself reaches the router at the end of a step, ``VIEW_S`` seconds apart and when it becomes idle, as it does live: a
choice in the middle of a step knows nothing of it. Requests that wait move as live ones do (``fleet.rebalance``). With
``roles`` some replicas compute prompts for others, chosen as live (``fleet.roles``), and pages travel (``sim.pages``);
they may follow the load (``fleet.role_control``).
With ``max_replicas`` others are started and stopped by the load (``fleet.autoscale``); unlike a live one, a replica
that is stopped ends what it works on.

With ``faults`` replicas are lost (``sim.outages``), in the middle of a step too: where a step ends behind the next
fault, clients get its outputs once it is known that its replica is not the lost one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence as Seq
from heapq import heappop, heappush

from jserve.engine.engine import refusal
from jserve.errors import EngineDead, NotReady
from jserve.fleet.asking import Asking
from jserve.fleet.autoscale import Autoscaler
from jserve.fleet.candidates import PREFILL
from jserve.fleet.face import LOOKS_S
from jserve.fleet.rebalance import goes_elsewhere, longest_waits, waits_of
from jserve.fleet.remote_prefill import (
    after_prefill,
    is_done,
    may_be_remote,
    prefill_of,
    ready_behind,
)
from jserve.fleet.role_control import RoleControl
from jserve.fleet.roles import DECODE, exchanged, lacking
from jserve.fleet.route import ReplicaChoice
from jserve.fleet.router import ReplicaRouter
from jserve.fleet.suspicion import RetryBudget
from jserve.ports import RunnerLimits
from jserve.sim.clients import Clients
from jserve.sim.fleet_checks import check_fleet
from jserve.sim.lost_requests import LostRequests
from jserve.sim.outages import Outages
from jserve.sim.pages import SharedPages
from jserve.sim.replica import Messages, SentItem, SimReplica
from jserve.sim.simulate import Run, Setup, limits_of, no_gc, simulate
from jserve.sim.totals import together
from jserve.sim.trace import TraceItem
from jserve.types import Output, Request

VIEW_S = 0.05
"""Between two views of a replica."""


def simulated(trace: Seq[TraceItem], setup: Setup) -> Run:
    """``trace`` on the engine of ``setup``, or on as many as it says."""
    if max(setup.replicas, setup.max_replicas) == 1:
        return simulate(trace, setup)
    return FleetSimulation(list(trace), setup, limits_of(setup)).run()


def _name(one: SimReplica) -> str:
    """Of the autoscaler's: numbers are given again."""
    return f"{one.number} since {one.began}"


class FleetSimulation:
    """One trace on ``setup.replicas`` engines.

    Raises:
        ConfigError: no such router, static batching, which is of one engine, or roles that the options exclude.
    """

    def __init__(self, trace: Seq[TraceItem], setup: Setup, limits: RunnerLimits) -> None:
        check_fleet(setup)
        self.clients = Clients(trace, setup)
        self.router = ReplicaRouter(policy=setup.router, seed=setup.seed)
        self.setup, self.limits, self.page_size = setup, limits, limits.page_size
        self._asking = Asking()
        self.lost = LostRequests(self.clients, self._asking, self.page_size)
        """Requests that no replica has."""
        self._outages = Outages(self)
        self.replicas: dict[int, SimReplica] = {}
        """Those that run, by number."""
        self.ended: list[SimReplica] = []
        self.samples: list[tuple[float, int, int, int, int]] = []
        self.autoscaler = Autoscaler()
        self.n_moved = 0
        """Times that a request was moved elsewhere."""
        self.n_remote = self.n_remote_failed = 0
        """Prompts that a prefill replica computed, and did not."""
        self._roles = setup.roles
        self._shared = SharedPages(setup.transfer_s) if setup.roles else None
        self._role_control = RoleControl() if setup.auto_roles else None
        self._role_changes: list[tuple[float, int, str]] = []
        self._prefills: dict[str, str] = {}
        """By request id, that of its prefill, while this is under way."""
        self._n_prefills = 0
        self._ends: list[float] = []
        """A heap of the times at which prefills ended that the router may not have heard of."""
        self.starting: list[float] = []
        """Times at which those that were started will be ready."""
        self._next_sample = 0.0
        self._messages = Messages()
        """Those that the router has not heard yet."""
        self.sent: dict[str, SentItem] = {}
        """By id of a request or prefill, in the order in which they were sent."""
        self._rebalances, self._next_look = RetryBudget(), 0.0
        for _ in range(setup.replicas):
            self._join(self.clients.next_at or 0.0)

    def run(self) -> Run:
        """Until all is served, or who watches has seen enough.

        Raises:
            ConfigError: a fault comes when all is served, or no replica runs.
        """
        with no_gc():
            return self._run()

    def _run(self) -> Run:
        clients, began = self.clients, self.clients.next_at or 0.0
        while not clients.enough:
            busy = [one for one in self.replicas.values() if one.busy]
            behind = min(busy, key=lambda one: one.now, default=None)
            next_at = self._next_at
            if next_at is not None and (behind is None or next_at <= behind.now):
                self._deliver(next_at)
            elif behind is not None:
                self.start_ready(behind.now)
                self._look(behind.now)
                self._step(behind)
            else:
                break
        return self._result(began)

    @property
    def _next_at(self) -> float | None:
        """The time at which a client, or the end of a prefill, has something sent next, or a replica is lost."""
        times = [at for at in (self.clients.next_at, *self._ends[:1]) if at is not None]
        if self.setup.faults:
            times += [at for at in self._outages.times() if at < math.inf]
        return min(times, default=None)

    def _deliver(self, now: float) -> None:
        """Hand in what is due at ``now``."""
        while self._ends and self._ends[0] <= now:
            heappop(self._ends)
            self.hear(now)
        if self.setup.faults:
            self._outages.look(now)
        for at, item, index, hangs_up in self.clients.due(now):
            if hangs_up:
                self._hang_up(item, index, at)
            else:
                self._send(item, at)

    def _send(self, item: TraceItem, at: float) -> None:
        for one in self.replicas.values():
            if not one.busy:
                one.simulation.clock.now = max(one.now, at)
        self.hear(at)
        self.start_ready(at)
        self._scale(at)
        request = self.clients.sent(item, at)
        try:
            self._place(item, request, at)
        except NotReady as error:
            if not self.replicas:
                error = EngineDead("no replica is ready", retry_after=error.retry_after)
            self.clients.receive(refusal(request, error), at)
            self.clients.take_ended()

    def _place(self, item: TraceItem, request: Request, at: float) -> None:
        asked = self._asking.of(request, self.page_size)
        apart = self.setup.roles and may_be_remote(request)
        choice = self.router.choose_prefill(asked) if apart else None
        if choice is None:
            sent = SentItem(item, asked, self._chosen(self.router.choose(asked)))
            self._submit(sent, request, at)
            return
        self._n_prefills += 1
        id = self._prefills[item.id] = f"{item.id} prompt {self._n_prefills}"
        sent = SentItem(item, asked, self._chosen(choice), is_prefill=True)
        self._submit(sent, prefill_of(request, id), at)

    def _chosen(self, choice: ReplicaChoice) -> SimReplica:
        return self.replicas[choice.replica]

    def _submit(self, sent: SentItem, request: Request, now: float) -> None:
        """Hand ``request`` to the replica of ``sent``."""
        to = sent.to
        if not to.busy:
            to.simulation.clock.now = max(to.now, now)
        if self.setup.faults and not self.sent_to(to):
            to.heard_at = now
        self.sent[request.id] = sent
        to.n_sent += 1
        to.simulation.engine.submit(request)

    def sent_to(self, one: SimReplica) -> list[tuple[str, SentItem]]:
        """(id, request or prefill) of all that ``one`` has, oldest first."""
        return [(id, sent) for id, sent in self.sent.items() if sent.to is one]

    def _hang_up(self, item: TraceItem, index: int | None, at: float) -> None:
        """The client of ``item`` wants no more of choice ``index``, or of any."""
        self.hear(at)
        prefill = self._prefills.get(item.id)
        sent = self.sent.get(prefill or item.id)
        if sent is not None:
            sent.hang_up(index)
        if sent is not None and prefill is None and sent.to.outage is None:
            sent.to.simulation.engine.cancel(item.id, index)
        elif sent is not None or item.id in self.lost:
            self.end(item, range(len(item.outputs)) if index is None else (index,), at)

    def end(self, item: TraceItem, choices: Collection[int], at: float) -> None:
        """The client of ``item``, which no engine answers, wants no more of ``choices``."""
        for id, n_tokens in self.lost.end(item, choices, at):
            self.lost.forget(id)
            self._over(id, n_tokens)
            prefill = self._prefills.get(id, "")
            sent = self._take_prefill(prefill)
            if sent is not None:
                sent.to.simulation.engine.cancel(prefill)

    def _over(self, id: str, n_tokens: int) -> None:
        """The request ``id`` ended after ``n_tokens``."""
        sent = self.sent.pop(id, None)
        if sent is not None:  # else its client hung up before it was answered
            self._asking.learn(n_tokens)
            self.router.over(sent.asked, sent.to.number)
            self._rebalances.earned()

    def _take_prefill(self, id: str) -> SentItem | None:
        """The prefill ``id``, which nobody computes or wants any more; None: nobody did before."""
        sent = self.sent.pop(id, None)
        if sent is not None:
            del self._prefills[sent.item.id]
            self.router.over(sent.asked, sent.to.number)
        return sent

    def answer(self, id: str, now: float, *, done: bool) -> None:
        """As ``fleet.placement`` does: a request whose prefill ``id`` is over is answered where that costs least.
        ``done``: its pages are written."""
        prefill = self._take_prefill(id)
        if prefill is None:
            return
        self.n_remote += done
        self.n_remote_failed += not done
        item = prefill.item
        request = self.clients.again(item)
        asked = ready_behind(self._asking.of(request, self.page_size), ready=done)
        try:
            sent = SentItem(item, asked, self._chosen(self.router.choose(asked)))
        except NotReady:
            self.lost.park([item], now)
            return
        self._submit(sent, after_prefill(request, prefill.still_open, ""), now)

    def _look(self, now: float) -> None:
        """Every ``LOOKS_S``, by what the router has heard; nothing that is sent before ``now`` comes later."""
        if now >= self._next_look and (self.router.by_price or self._role_control):
            self._next_look = now + LOOKS_S
            self.hear(now)
            if self.router.by_price:
                self._rebalance(now)
            self._follow_load(now)

    def _follow_load(self, now: float) -> None:
        """As ``fleet.face`` does: give a replica the other role where the load asks for it."""
        control, router = self._role_control, self.router
        if control is None:
            return
        number = control.look(now, router.prefill_s, router.decode_s, router.candidates)
        if number is None:
            return
        one = self.replicas[number]
        one.role = DECODE if one.role == PREFILL else PREFILL
        self._roles = exchanged(self._roles, one.role)
        router.candidates.change(number, role=one.role)
        self._role_changes.append((now, number, one.role))

    def _rebalance(self, now: float) -> None:
        """As ``fleet.placement`` does: requests that wait go where they cost less than the wait that is left."""
        sent = [
            (id, one.asked, one.to.number)
            for id, one in self.sent.items()
            if not self._has_told(id, now)
        ]
        waiting = waits_of(sent, self.router.candidates)
        for one in longest_waits([each for each in waiting if self._may_move(each.id)]):
            if goes_elsewhere(one, self.router.candidates, self.router.pages):
                if not self._rebalances.spend(1):
                    return
                self._move(self.sent.pop(one.id), now)

    def _has_told(self, id: str, now: float) -> bool:
        if self.sent[id].is_prefill:
            return False
        record = self.clients.records.open.get(id)
        return record is None or any([times and times[0] <= now for times in record.times])

    def _may_move(self, id: str) -> bool:
        sent = self.sent[id]
        if sent.is_prefill or sent.asked.n_ready > 0 or sent.hung_up:
            return False
        record = self.clients.records.open[id]
        told = any(record.times)  # by a step that may be under way
        return not record.attempt and not told

    def _move(self, sent: SentItem, now: float) -> None:
        """The request, which is ``sent`` no longer, goes to the cheapest other replica."""
        item = sent.item
        sent.to.simulation.engine.cancel(item.id)
        self.router.over(sent.asked, sent.to.number)
        to = self._chosen(self.router.choose(sent.asked, leave_out=(sent.to.number,)))
        self.clients.records.open[item.id].attempt += 1
        self.n_moved += 1
        self._submit(SentItem(item, sent.asked, to), self.clients.again(item), now)

    def _step(self, one: SimReplica) -> None:
        one.outputs = one.simulation.step()
        if one.now <= self._outages.next_at:
            self.tell(one)

    def tell(self, one: SimReplica) -> None:
        """Clients and router get what the last step of ``one`` told."""
        outputs, one.outputs = one.outputs or [], None
        self.clients.receive(outputs, one.now)
        prefills = [out for out in outputs if self._ends_prefill(out)]
        if prefills:
            heappush(self._ends, one.now)
        tells = one.now - one.told_at > VIEW_S or not one.busy
        if outputs or tells:
            one.heard_at = one.now
        self._messages.say(one, self.clients.take_ended(), prefills, tells=tells)
        if one.now >= self._next_sample:
            self._sample(one.now)
        self._scale(one.now)

    def _ends_prefill(self, output: Output) -> bool:
        sent = None if output.finish is None else self.sent.get(output.request_id)
        return sent is not None and sent.is_prefill

    def hear(self, now: float) -> None:
        """The router hears what was said until ``now``."""
        for said in self._messages.until(now):
            self.router.ended(said.by.number, len(said.ended) + len(said.prefills))
            for id, n_tokens in said.ended:
                self._over(id, n_tokens)
            for end in said.prefills:
                self.answer(end.request_id, said.at, done=is_done(end))
            if said.view is not None:
                self.router.update(said.by.number, said.view, said.pages)
                if self.lost:
                    self.go_on(said.at)

    def go_on(self, now: float) -> None:
        """Those that wait for a replica go to the one that costs least."""
        for item, asked, number, request in self.lost.resumed(self.router):
            self._submit(SentItem(item, asked, self.replicas[number]), request, now)

    # -- their number

    def _scale(self, now: float) -> None:
        """Start and stop replicas as the load needs it."""
        setup = self.setup
        if setup.max_replicas <= setup.replicas:
            return
        for one in [one for one in self.replicas.values() if self.leaves(one) and one.idle]:
            self.leave(one, now)
        stay = [one for one in self.replicas.values() if not self.leaves(one)]
        loads = {_name(one): one.load for one in stay}
        self.autoscaler.observe(now, loads, setup.start_s)
        n = len(stay) + len(self.starting)
        wanted = min(self.autoscaler.needed, setup.max_replicas)
        self.starting += [now + setup.start_s] * max(0, wanted - n)
        enough = self.autoscaler.enough(now)
        if enough is not None and n > max(enough, setup.replicas) and not self.starting:
            saved_s = self.autoscaler.saved_s
            worst = min(stay, key=lambda one: saved_s.get(_name(one), 0.0))
            self.router.candidates.change(worst.number, out=True)

    def start_ready(self, now: float) -> None:
        """Those that were started and are ready take part."""
        for ready_at in sorted([at for at in self.starting if at <= now]):
            self.starting.remove(ready_at)
            self._join(ready_at)

    def leaves(self, one: SimReplica) -> bool:
        return self.router.candidates[one.number].out

    def _join(self, now: float) -> None:
        made = SimReplica(self.router.join(), self.setup, self.limits, self.clients, self._shared)
        made.began = made.simulation.clock.now = now
        if self.setup.roles:
            made.role = lacking(self._roles, [one.role for one in self.replicas.values()])
            self.router.candidates.change(made.number, role=made.role)
        self.replicas[made.number] = made
        self._messages.say(made, tells=True)
        self.hear(now)
        made.told_at = -math.inf  # it says how its first step went too

    def leave(self, one: SimReplica, now: float) -> None:
        self.hear(one.now)
        one.ended = now
        self.ended.append(self.replicas.pop(one.number))
        self.autoscaler.forget(_name(one))
        self.router.leave(one.number)

    # -- what came of it

    def _sample(self, now: float) -> None:
        seen = [one.simulation.seen() for one in self.replicas.values() if one.outage is None]
        self.samples.append((now, *(sum(column) for column in zip(*seen, strict=True))))  # type: ignore[arg-type]
        self._next_sample = now + self.setup.sample_s

    def _result(self, began: float) -> Run:
        ended = max([one.now for one in [*self.ended, *self.replicas.values()]])
        if not self.clients.enough:
            self._outages.check_over(ended)
        for one in self.replicas.values():
            one.ended = ended if one.outage is None else one.outage.fault.at
        every = [*self.ended, *self.replicas.values()]
        return dataclasses.replace(
            together(every, began, ended),
            samples=self.samples,
            n_remote=self.n_remote if self.setup.roles else None,
            role_changes=self._role_changes if self.setup.auto_roles else None,
            outages=self._outages.found,
            n_remote_failed=self.n_remote_failed,
        )
