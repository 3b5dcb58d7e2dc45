"""Simulates several engines behind one router: the engines of ``sim.simulate``, each with its own clock.

The engine whose clock is behind steps next, so no arrival comes to one that is ahead of it. What a replica says of
itself reaches the router at the end of a step, ``VIEW_S`` seconds apart and when it becomes idle, as it does live: a
choice in the middle of a step knows nothing of it. Requests that wait move as live ones do (``fleet.rebalance``). With
``roles`` some replicas compute prompts for others, chosen as live (``fleet.roles``), and pages travel (``sim.pages``);
they may follow the load (``fleet.role_control``).
With ``max_replicas`` others are started and stopped by the load (``fleet.autoscale``); unlike a live one, a replica
that is stopped ends what it works on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as Seq
from heapq import heappop, heappush

from jserve.errors import ConfigError
from jserve.fleet.asking import Asking
from jserve.fleet.autoscale import Autoscaler
from jserve.fleet.rebalance import goes_elsewhere, longest_waits, waits_of
from jserve.fleet.remote_prefill import (
    after_prefill,
    is_done,
    may_be_remote,
    prefill_of,
    ready_behind,
)
from jserve.fleet.role_control import RoleControl
from jserve.fleet.roles import DECODE, lacking
from jserve.fleet.route import PREFILL, ReplicaChoice
from jserve.fleet.router import POLICIES, ReplicaRouter
from jserve.fleet.shared_pages import check_shares_pages
from jserve.fleet.suspicion import RetryBudget
from jserve.ports import RunnerLimits
from jserve.sim.pages import SharedPages
from jserve.sim.replica import Messages, SentItem, SimReplica
from jserve.sim.simulate import (
    Clients,
    Run,
    Setup,
    limits_of,
    no_gc,
    simulate,
    without_deadlines,
)
from jserve.sim.totals import together
from jserve.sim.trace import TraceItem, request_of
from jserve.types import Finish, Output, Request

VIEW_S = LOOKS_S = 0.05
"""Between two views of a replica, and between two looks for requests that had better wait elsewhere."""


def simulated(trace: Seq[TraceItem], setup: Setup) -> Run:
    """``trace`` on the engine of ``setup``, or on as many as it says."""
    if max(setup.replicas, setup.max_replicas) == 1:
        return simulate(trace, setup)
    return FleetSimulation(list(trace), setup, limits_of(setup)).run()


def check_roles(setup: Setup) -> None:
    """Raises ConfigError for roles that the other options of ``setup`` exclude."""
    if not setup.roles:
        return
    check_shares_pages(setup.config.cache)
    if setup.max_replicas > setup.replicas:
        raise ConfigError("the number of replicas with roles is fixed", field="max_replicas")
    if setup.transfer_gb_s and not setup.device.page_bytes:
        why = f"{setup.device.name} does not say how large a page is"
        raise ConfigError(f"transfer_gb_s: {why}", field="transfer_gb_s")


def _name(one: SimReplica) -> str:
    """Of the autoscaler's: numbers are given again."""
    return f"{one.number} since {one.began}"


class FleetSimulation:
    """One trace on ``setup.replicas`` engines.

    Raises:
        ConfigError: no such router, static batching, which is of one engine, or roles that the options exclude.
    """

    def __init__(self, trace: Seq[TraceItem], setup: Setup, limits: RunnerLimits) -> None:
        if setup.router not in POLICIES:
            raise ConfigError(f"router must be one of {', '.join(POLICIES)}", field="router")
        if setup.batching != "continuous":
            raise ConfigError("static batching is simulated for one engine", field="batching")
        check_roles(setup)
        self.clients = Clients(trace, setup)
        self.router = ReplicaRouter(policy=setup.router, seed=setup.seed)
        self._asking = Asking()
        self.setup, self.limits, self.page_size = setup, limits, limits.page_size
        self.replicas: dict[int, SimReplica] = {}
        """Those that run, by number."""
        self.ended: list[SimReplica] = []
        self.samples: list[tuple[float, int, int, int, int]] = []
        self.autoscaler = Autoscaler()
        self.n_moved = 0
        """Times that a request was moved elsewhere."""
        self.n_remote = 0
        """Prompts that a prefill replica computed."""
        self._shared = SharedPages(setup.transfer_s) if setup.roles else None
        self._role_control = RoleControl() if setup.auto_roles else None
        self._role_changes: list[tuple[float, int, str]] = []
        self._prefills: dict[str, str] = {}
        """By request id, that of its prefill, while this is under way."""
        self._n_prefills = 0
        self._ends: list[float] = []
        """A heap of the times at which prefills ended that the router may not have heard of."""
        self._starting: list[float] = []
        """Times at which those that were started will be ready."""
        self._next_sample = 0.0
        self._messages = Messages()
        """Those that the router has not heard yet."""
        self._sent: dict[str, SentItem] = {}
        """By id of a request or prefill, in the order in which they were sent."""
        self._rebalances, self._next_look = RetryBudget(), 0.0
        for _ in range(setup.replicas):
            self._join(self.clients.next_at or 0.0)

    def run(self) -> Run:
        """Until all is served, or who watches has seen enough."""
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
                self._look(behind.now)
                self._step(behind)
            else:
                break
        return self._result(began)

    @property
    def _next_at(self) -> float | None:
        """The time at which a client, or the end of a prefill, has something sent next."""
        times = [at for at in (self.clients.next_at, *self._ends[:1]) if at is not None]
        return min(times, default=None)

    def _deliver(self, now: float) -> None:
        """Hand in what is due at ``now``."""
        while self._ends and self._ends[0] <= now:
            heappop(self._ends)
            self._hear(now)
        for at, item, index, hangs_up in self.clients.due(now):
            if hangs_up:
                self._hang_up(item, index, at)
            else:
                self._send(item, at)

    def _send(self, item: TraceItem, at: float) -> None:
        for one in self.replicas.values():
            if not one.busy:
                one.simulation.clock.now = max(one.now, at)
        self._hear(at)
        self._scale(at)
        request = self.clients.sent(item, at)
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
        to, self._sent[request.id] = sent.to, sent
        if not to.busy:
            to.simulation.clock.now = max(to.now, now)
        to.n_sent += 1
        to.simulation.engine.submit(request)

    def _hang_up(self, item: TraceItem, index: int | None, at: float) -> None:
        """The client of ``item`` wants no more of choice ``index``, or of any."""
        self._hear(at)
        prefill = self._prefills.get(item.id)
        if prefill is None:
            if item.id in self._sent:
                self._sent[item.id].to.simulation.engine.cancel(item.id, index)
            return
        sent = self._sent[prefill]
        gone = sent.still_open & ({index} if index is not None else sent.still_open)
        sent.still_open -= gone
        ends = [Output(request_id=item.id, index=i, finish=Finish.ABORT) for i in sorted(gone)]
        self.clients.receive(ends, at)
        if not sent.still_open:
            self._take_prefill(prefill)
            sent.to.simulation.engine.cancel(prefill)

    def _take_prefill(self, id: str) -> SentItem | None:
        """The prefill ``id``, which nobody computes or wants any more; None: nobody did before."""
        sent = self._sent.pop(id, None)
        if sent is not None:
            del self._prefills[sent.item.id]
            self.router.over(sent.asked, sent.to.number)
        return sent

    def _answer(self, end: Output, now: float) -> None:
        """As ``fleet.placement`` does: a request whose prefill is over is answered where that costs least."""
        prefill = self._take_prefill(end.request_id)
        if prefill is None:
            return
        self.n_remote += is_done(end)
        item = prefill.item
        request = self._request(item)
        asked = ready_behind(self._asking.of(request, self.page_size), ready=is_done(end))
        sent = SentItem(item, asked, self._chosen(self.router.choose(asked)))
        self._submit(sent, after_prefill(request, prefill.still_open, ""), now)

    def _request(self, item: TraceItem) -> Request:
        """That of ``item``, which was sent before."""
        record = self.clients.records.open[item.id]
        request = request_of(item, self.clients.streams, record.at)
        request = dataclasses.replace(request, attempt=record.attempt)
        return request if self.setup.deadlines else without_deadlines(request)

    def _look(self, now: float) -> None:
        """Every ``LOOKS_S``, by what the router has heard; nothing that is sent before ``now`` comes later."""
        if now >= self._next_look and (self.router.by_price or self._role_control):
            self._next_look = now + LOOKS_S
            self._hear(now)
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
        router.candidates[number].role = one.role
        self._role_changes.append((now, number, one.role))

    def _rebalance(self, now: float) -> None:
        """As ``fleet.placement`` does: requests that wait go where they cost less than the wait that is left."""
        sent = [
            (id, one.asked, one.to.number)
            for id, one in self._sent.items()
            if not self._has_told(id, now)
        ]
        waiting = waits_of(sent, self.router.candidates)
        for one in longest_waits([each for each in waiting if self._may_move(each.id)]):
            if goes_elsewhere(one, self.router.candidates, self.router.pages):
                if not self._rebalances.spend(1):
                    return
                self._move(self._sent.pop(one.id), now)

    def _has_told(self, id: str, now: float) -> bool:
        if self._sent[id].is_prefill:
            return False
        record = self.clients.records.open.get(id)
        return record is None or any([times and times[0] <= now for times in record.times])

    def _may_move(self, id: str) -> bool:
        sent = self._sent[id]
        apart = sent.is_prefill or sent.asked.n_ready > 0
        return not apart and not self.clients.records.open[id].attempt

    def _move(self, sent: SentItem, now: float) -> None:
        """The request, which is ``sent`` no longer, goes to the cheapest other replica."""
        item = sent.item
        sent.to.simulation.engine.cancel(item.id)
        self.router.over(sent.asked, sent.to.number)
        candidate = self.router.candidates[sent.to.number]
        out, candidate.out = candidate.out, True
        to = self._chosen(self.router.choose(sent.asked))
        candidate.out = out
        self.clients.records.open[item.id].attempt += 1
        self.n_moved += 1
        self._submit(SentItem(item, sent.asked, to), self._request(item), now)

    def _step(self, one: SimReplica) -> None:
        outputs = one.simulation.advance()
        prefills = [out for out in outputs if self._ends_prefill(out)]
        if prefills:
            heappush(self._ends, one.now)
        tells = one.now - one.told_at > VIEW_S or not one.busy
        self._messages.say(one, self.clients.take_ended(), prefills, tells=tells)
        if one.now >= self._next_sample:
            self._sample(one.now)
        self._scale(one.now)

    def _ends_prefill(self, output: Output) -> bool:
        sent = None if output.finish is None else self._sent.get(output.request_id)
        return sent is not None and sent.is_prefill

    def _hear(self, now: float) -> None:
        """The router hears what was said until ``now``."""
        for said in self._messages.until(now):
            self.router.ended(said.by.number, len(said.ended) + len(said.prefills))
            for id, n_tokens in said.ended:
                sent = self._sent.pop(id, None)
                if sent is not None:  # else its client hung up before it was answered
                    self._asking.learn(n_tokens)
                    self.router.over(sent.asked, sent.to.number)
                    self._rebalances.earned()
            for end in said.prefills:
                self._answer(end, said.at)
            if said.view is not None:
                self.router.update(said.by.number, said.view, said.pages)

    # -- their number

    def _scale(self, now: float) -> None:
        """Start and stop replicas as the load needs it."""
        setup = self.setup
        if setup.max_replicas <= setup.replicas:
            return
        for ready_at in [at for at in self._starting if at <= now]:
            self._starting.remove(ready_at)
            self._join(ready_at)
        for one in [one for one in self.replicas.values() if self._leaves(one) and not one.busy]:
            self._leave(one, now)
        stay = [one for one in self.replicas.values() if not self._leaves(one)]
        loads = {_name(one): one.load for one in stay}
        self.autoscaler.observe(now, loads, setup.start_s)
        n = len(stay) + len(self._starting)
        wanted = min(self.autoscaler.needed, setup.max_replicas)
        self._starting += [now + setup.start_s] * max(0, wanted - n)
        enough = self.autoscaler.enough(now)
        if enough is not None and n > max(enough, setup.replicas) and not self._starting:
            saved_s = self.autoscaler.saved_s
            worst = min(stay, key=lambda one: saved_s.get(_name(one), 0.0))
            self.router.candidates[worst.number].out = True

    def _leaves(self, one: SimReplica) -> bool:
        return self.router.candidates[one.number].out

    def _join(self, now: float) -> None:
        made = SimReplica(self.router.join(), self.setup, self.limits, self.clients, self._shared)
        made.began = made.simulation.clock.now = now
        if self.setup.roles:
            made.role = lacking(self.setup.roles, [one.role for one in self.replicas.values()])
            self.router.candidates[made.number].role = made.role
        self.replicas[made.number] = made
        self._messages.say(made, tells=True)
        self._hear(now)
        made.told_at = -math.inf  # it says how its first step went too

    def _leave(self, one: SimReplica, now: float) -> None:
        self._hear(one.now)
        one.ended = now
        self.ended.append(self.replicas.pop(one.number))
        self.autoscaler.forget(_name(one))
        self.router.leave(one.number)

    # -- what came of it

    def _sample(self, now: float) -> None:
        seen = [one.simulation.seen() for one in self.replicas.values()]
        self.samples.append((now, *(sum(column) for column in zip(*seen, strict=True))))  # type: ignore[arg-type]
        self._next_sample = now + self.setup.sample_s

    def _result(self, began: float) -> Run:
        ended = max([one.now for one in self.replicas.values()])
        for one in self.replicas.values():
            one.ended = ended
        return dataclasses.replace(
            together([*self.ended, *self.replicas.values()], began, ended),
            samples=self.samples,
            n_remote=self.n_remote if self.setup.roles else None,
            role_changes=self._role_changes if self.setup.auto_roles else None,
        )
