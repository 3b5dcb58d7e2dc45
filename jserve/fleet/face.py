"""The asyncio interface over several engines, of which requests choose by price and outlive any.

It owns who is a member, which request is where, and what becomes of requests whose replica is lost, silent, slow or
stopped: they go on elsewhere behind what was told (``engine.resume``). Who places replicas and starts others is the
``ReplicaSource``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from jserve.engine.face import EngineFace, ReplicaState
from jserve.engine.health import HealthLimits
from jserve.engine.process import OnProgress
from jserve.engine.replica import Replica
from jserve.engine.resume import Resumption
from jserve.engine.streams import Stream
from jserve.engine.wire import Control, HandleCommand, HandleReply, Message, Stats
from jserve.errors import EngineDead, JserveError, NotReady, Overloaded
from jserve.fleet.autoscale import Autoscaler
from jserve.fleet.commands import HandlePlaces, check_for_all
from jserve.fleet.member import Member, all_unfit, state_of
from jserve.fleet.remote_prefill import RemotePrefills, after_prefill, may_be_remote
from jserve.fleet.roles import lacking
from jserve.fleet.rollout import ACTIONS, Rollout
from jserve.fleet.route import Asked, ReplicaChoice
from jserve.fleet.router import ReplicaRouter
from jserve.fleet.scale_down import ScaleDown
from jserve.fleet.sent import Sent, SentRequests
from jserve.fleet.source import ReplicaSource
from jserve.fleet.suspicion import RetryBudget, Suspicion
from jserve.fleet.totals import totals
from jserve.ports import Clock
from jserve.types import Finish, HandleInfo, Lane, Output, Request

log = logging.getLogger(__name__)

STARTING, LOOKS_S = "start replicas", 0.05
PATIENCE = 2
"""A machine takes several replicas with it, so a request may meet more than one loss by chance."""
REJOIN_S = 0.25
"""Until a replica that runs and whose connection broke is connected to again."""


class FleetEngine(EngineFace):
    """Requests in, async iterators of outputs back, over the replicas of ``source``.

    Args:
        source: places replicas and keeps them alive.
        policy: one of ``fleet.router.POLICIES``.
        roles: of ``fleet.roles.parse_roles``.
        model: the weights that replicas start with, as ``update_weights`` takes them.
        autoscaler: says which replicas are no longer needed, where ``source`` starts more by the load.
        health: limits of ``degraded_reasons`` of each replica.
        clock: monotonic seconds.
        rest: as ``EngineFace``.

    Attributes:
        counters: engine_deaths (replicas lost without being stopped), resumed, silent and ejected (times that a
            replica was found so), moved (requests that went on elsewhere though their replica lives), remote_prefills
            and remote_prefills_failed (prompts that a prefill replica computed, and did not), aborted ...
    """

    def __init__(
        self,
        source: ReplicaSource,
        *,
        policy: str = "seconds",
        roles: dict[str, int] | None = None,
        model: str = "",
        autoscaler: Autoscaler | None = None,
        health: HealthLimits | None = None,
        clock: Clock = time.monotonic,
        **rest: Any,
    ) -> None:
        super().__init__(clock=clock, **rest)
        self._source, self._health = source, health
        self._resumption = Resumption(PATIENCE)
        self._router = ReplicaRouter(policy=policy)
        self.suspicion, self._budget = Suspicion(), RetryBudget()
        self._scale_down = ScaleDown(source, self.suspicion, autoscaler or Autoscaler())
        self._prefills, self._roles = RemotePrefills(clock), roles or {}
        self._rollout = Rollout(model, self._ask, self._weigh)
        self._sent = SentRequests(self._router, self._rollout)
        self._members: dict[str, Member] = {}
        self._listed: set[str] = set()
        self._handles = HandlePlaces()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._info: dict[str, Any] = {}
        self._closing = False
        self._gave_up = asyncio.Event()
        self._fleet = dict.fromkeys(["engine_deaths", "silent", "moved"], 0)

    @property
    def members(self) -> list[Member]:
        """Those that take part, oldest first."""
        return [one for one in self._members.values() if one.ready]

    @property
    def ready(self) -> bool:
        return bool(self.members)

    @property
    def info(self) -> dict[str, Any]:
        return self._info

    @property
    def gave_up(self) -> asyncio.Event:
        return self._gave_up

    @property
    def gave_up_reason(self) -> str:
        return "the fleet was closed"

    @property
    def counters(self) -> dict[str, int]:
        told = {"resumed": self._resumption.n_resumed, "ejected": self.suspicion.n_ejected}
        done, failed = self._prefills.n_done, self._prefills.n_failed
        remote = {"remote_prefills": done, "remote_prefills_failed": failed}
        degraded = sum(one.health.n_degraded for one in self.members)
        return {**told, **remote, **self._fleet, "degraded": degraded, **self._counts}

    async def start(self, on_progress: OnProgress | None = None) -> dict[str, Any]:
        told, n = on_progress or (lambda *_: None), self._source.n
        told(STARTING, 0, n)
        await self._source.start(self._on_change)
        while len(self.members) < n:
            await asyncio.sleep(LOOKS_S)
        told(STARTING, n, n)
        self._info = dict(self.members[0].info)
        self._spawn(self._watch())
        return self._info

    async def close(self) -> None:
        self._closing = True
        self._fail_all("the engine was closed", EngineDead.code, cancel=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.supervisor.close() for one in self._members.values()))
        await self._source.close()

    def stats(self) -> Stats:
        summed = totals(one.stats for one in self.members)
        return msgspec.structs.replace(summed, values=summed.values | self._scale_down.values())

    def healthy(self) -> bool:
        moves = [one.without_step_s() <= self._stall_timeout_s for one in self.members]
        return any(moves) or (self._held and self.ready)

    def degraded_reasons(self) -> list[str]:
        """Those of all replicas; none while any is fit."""
        return ["paused"] if self._held else all_unfit(self.members)

    def replicas(self) -> list[ReplicaState]:
        return [state_of(one, self.suspicion.records[one.name]) for one in self.members]

    # -- members

    def _on_change(self, names: Iterable[str]) -> None:
        """The source has these replicas now."""
        self._listed = set(names)
        self._scale_down.listed(self._listed)
        self._join_and_leave()

    def _join_and_leave(self) -> None:
        wanted = self._listed - self._scale_down.retired
        for name in [name for name in self._members if name not in wanted]:
            self._leave(self._members[name])
        for name in wanted - set(self._members):
            self._join(name)

    def _join(self, name: str) -> None:
        wanted = name in self._listed and name not in self._scale_down.retired
        if self._closing or name in self._members or not wanted:
            return
        client = self._source.client(name)
        number = self._router.join()
        made = Member(name, number, client, self, health=self._health, clock=self._clock)
        made.role = lacking(self._roles, [one.role for one in self._members.values()])
        self._members[name] = made
        self.suspicion.join(name)
        self._spawn(self._connect(made))

    async def _connect(self, member: Member) -> None:
        with contextlib.suppress(JserveError):  # ``lost`` has heard of it
            await member.supervisor.start()

    def _leave(self, member: Member) -> None:
        """It is being stopped: what it works on goes on elsewhere."""
        self._forget(member)
        member.supervisor.stop()
        self._move(member, "the replica was stopped", blamed=False)
        self._spawn(member.supervisor.close())

    def lost(self, replica: Replica, streams: list[Stream], why: str) -> None:
        """Its requests go on elsewhere, or waits for the next replica."""
        assert isinstance(replica, Member)
        if self._members.get(replica.name) is not replica:
            return
        self._forget(replica)
        if not self._closing:
            self._fleet["engine_deaths"] += 1
            log.warning("replica %s is lost: %s", replica.name, why)
        self._park(streams, f"the engine died: {why}")
        self._fail_asked(f"the engine died: {why}", EngineDead.code, replica)
        if not self._closing:
            asyncio.get_running_loop().call_later(REJOIN_S, self._join, replica.name)
            self._go_on()

    def _forget(self, member: Member) -> None:
        del self._members[member.name]
        self.suspicion.leave(member.name)
        self._handles.leave(member)
        self._rollout.leave(member)
        self._router.leave(member.number)

    def received(self, replica: Replica, message: Message) -> None:
        assert isinstance(replica, Member)
        if self._members.get(replica.name) is not replica:
            return
        replica.heard_at, replica.silent = self._clock(), False
        match message:
            case Stats() if message.view is not None:
                self._router.update(replica.number, message.view, message.pages)
                if message.steps and message.values.get("step_slowness"):
                    self.suspicion.observe(replica.name, message.values["step_slowness"])
                self._check_weights(replica)
                self._weigh(replica)
                self._go_on()
        super().received(replica, message)

    def _check_weights(self, member: Member) -> None:
        """Have ``member`` load the weights that it should have, before it gets another request."""
        if self._rollout.begin_catch_up(member, self.members):
            self._spawn(self._rollout.catch_up(member, lambda: self.members))

    def _weigh(self, member: Member) -> None:
        """Let the router know how far ``member`` is trusted."""
        if self._members.get(member.name) is not member:
            return
        record = self.suspicion.records[member.name]
        candidate = self._router.candidates[member.number]
        candidate.suspicion = record.factor
        candidate.out = record.out or member.silent or member.updating
        candidate.role = member.role

    # -- requests

    def _check_open(self) -> None:
        self._check_draining()
        if self._closing:
            raise NotReady("the server is shutting down", code="draining", retry_after=5.0)
        if not self.ready:
            raise EngineDead("no replica is ready", retry_after=5.0)

    def _place(self, stream: Stream, ttl_s: float | None) -> None:
        request, router = stream.request, self._router
        asked = self._asked_of(request)
        bound = self._bound_to(request, ttl_s)
        if bound is None and self._roles and may_be_remote(request):
            prefill = router.choose_prefill(asked)
            if prefill is not None:
                self._send_prefill(self._prefills.begin(stream), asked, prefill)
                return
        choice = router.choose(asked) if bound is None else router.assign(asked, bound.number)
        self._send(stream, request, asked, choice, ttl_s)

    def _send(
        self,
        stream: Stream,
        request: Request,
        asked: Asked,
        choice: ReplicaChoice,
        ttl_s: float | None = None,
    ) -> None:
        """Hand ``request``, an attempt at that of ``stream``, to the replica of ``choice``."""
        member = self._numbered(choice.replica)
        self._sent.add(request.id, Sent(asked, member, choice, self._clock()))
        try:
            member.work_on(stream, request, ttl_s)
        except JserveError:
            self._over(stream)
            raise

    def _send_prefill(self, prefill: Stream, asked: Asked, choice: ReplicaChoice) -> None:
        try:
            self._send(prefill, prefill.request, asked, choice)
        except JserveError:
            self._prefills.lost(prefill)
            raise

    def _answer(self, stream: Stream, source: str, *, ready: bool) -> None:
        """Answer ``stream``, whose prefill is over, where that costs least. ``ready``: all its full pages are at
        ``source``; otherwise some may be."""
        if not stream.open or self._closing:
            return
        asked = self._asked_of(stream.request)
        if ready:
            asked = replace(asked, n_ready=len(asked.pages) * asked.page_size)
        try:
            choice = self._router.choose(asked)
            self._send(stream, after_prefill(stream, source), asked, choice)
        except NotReady:
            self._park([stream], "no replica")
        except JserveError as error:
            stream.end(Finish.ERROR, error.message, error.code)

    def _on_prefill(self, replica: Replica, output: Output) -> None:
        """``output`` of a request that only computes a prompt."""
        sent = self._sent.get(output.request_id)
        if sent is None or sent.member is not replica:
            return
        stream = self._prefills.ended(output)
        if stream is not None:
            self._sent.settle(output.request_id)
            replica.streams.pop(output.request_id, None)
            ready = output.finish in (Finish.STOP, Finish.LENGTH)
            self._answer(stream, replica.info.get("kv_transfer_address") or "", ready=ready)

    def _asked_of(self, request: Request, resumed: Stream | None = None) -> Asked:
        return self._sent.asked(request, self.members, self._info["page_size"], resumed)

    def _bound_to(self, request: Request, ttl_s: float | None) -> Member | None:
        """The replica that has to take ``request`` at any price: that of its cache, or one that has rested and is
        tried with a request that is in no hurry."""
        if request.cache is not None:
            if ttl_s is None:
                return self._handles.find(request.tenant, request.cache)
            return self._handles.make(request.tenant, request.cache, self.members)
        if request.lane == Lane.INTERACTIVE or request.ttft_deadline_ms is not None:
            return None
        name = self.suspicion.due(self._clock())
        if name is None or not (self._members[name].may_get and self._members[name].ready):
            return None
        self.suspicion.probe(name, request.id)
        return self._members[name]

    def _numbered(self, number: int) -> Member:
        return next(one for one in self._members.values() if one.number == number)

    def _deliver(self, replica: Replica, output: Output) -> None:
        if self._prefills.has(output.request_id):
            self._on_prefill(replica, output)
            return
        sent = self._sent.get(output.request_id)
        if sent is not None and sent.member is replica and sent.first and output.token_ids:
            sent.first, now = False, self._clock()
            self.suspicion.observe(sent.member.name, sent.ratio(now))
            self.suspicion.probed(sent.member.name, output.request_id, sent.ratio(now), now)
        if output.finish in (Finish.STOP, Finish.LENGTH):
            self._budget.earned()
        if output.error_code != Overloaded.code or not self._asks_another(replica, output):
            super()._deliver(replica, output)

    def _asks_another(self, replica: Replica, refusal: Output) -> bool:
        """A refused request goes to another replica, if one is left that may have room: views are never new
        enough to know."""
        stream, sent = self._streams.get(refusal.request_id), self._sent.get(refusal.request_id)
        if stream is None or sent is None or sent.member is not replica:
            return False
        left = len(self.members) - 1 - stream.attempt
        late = refusal.attempt != stream.attempt
        if late or any(stream.said) or left <= 0 or not self._budget.spend(1):
            return False
        candidate = self._router.candidates[sent.member.number]
        out, candidate.out = candidate.out, True
        replica.streams.pop(refusal.request_id)
        stream.replica = None
        stream.excuse()
        self._fleet["moved"] += 1
        self._park([stream], refusal.error or "refused")
        self._go_on()
        candidate.out = out
        return True

    def _over(self, stream: Stream) -> None:
        prefill = self._prefills.forget(stream.request.id)
        if prefill is not None:
            sent = self._sent.settle(prefill)
            if sent is not None and sent.member.streams.pop(prefill, None) is not None:
                sent.member.cancel(prefill)
        sent = self._sent.settle(stream.request.id)
        if sent is not None:
            self._sent.learn(stream)
            self.suspicion.probed(sent.member.name, stream.request.id, None, self._clock())

    def _park(self, streams: list[Stream], why: str) -> None:
        for stream in streams:
            self._sent.settle(stream.request.id)
        prefills = [stream for stream in streams if self._prefills.has(stream.request.id)]
        self._resumption.park([s for s in streams if s not in prefills], why, EngineDead.code)
        for prefill in prefills:
            waits = self._prefills.lost(prefill)
            if waits is not None:
                self._answer(waits, "", ready=False)

    def _move(self, member: Member, why: str, *, blamed: bool, n: int | None = None) -> None:
        """All that it works on, or the ``n`` oldest, go on elsewhere. ``blamed``: they may be why it hangs."""
        streams = member.give_up(n)
        for stream in () if blamed else streams:
            stream.excuse()
        self._fleet["moved"] += len(streams)
        self._park(streams, why)
        self._go_on()

    def _go_on(self) -> None:
        """Resume all that wait, each at the replica that is cheapest for it; those for whom there is none now
        wait on."""
        for stream in self._resumption.take():
            target = self._target(stream)
            if target is None:
                self._resumption.park([stream], "no replica", EngineDead.code)
            else:
                self._sent.add(stream.request.id, target)
                self._resumption.go_on(stream, target.member)

    def _target(self, stream: Stream) -> Sent | None:
        """The replica that goes on with ``stream``, if there is one now: with the same weights, where something was
        told."""
        if self._closing or not self._info:
            return None
        asked = self._asked_of(stream.request, stream)
        try:
            choice = self._router.choose(asked)
        except NotReady:
            able = [one for one in self.members if one.may_get and one.view.ready]
            if not able or any(one.weights == stream.weights for one in self._members.values()):
                return None
            choice = self._router.assign(asked, able[0].number)  # which ends it: other weights
        return Sent(asked, self._numbered(choice.replica), choice, self._clock())

    # -- commands

    async def control(self, message: Control) -> dict[str, Any]:
        """As ``EngineFace``, of all replicas; the facts are those of the first."""
        self._check_open()
        if message.action in ACTIONS:
            return await self._roll_out(message)
        check_for_all(message)
        info = (await self._ask_all(message))[0].info
        if message.action == "weight_info":
            info = info | self._rollout.info(self.members)
        return self._obeyed(info)

    async def handles(self, message: HandleCommand) -> list[HandleInfo]:
        """As ``EngineFace``; the search for all handles goes to all replicas."""
        self._check_open()
        if message.name is not None:
            return await self._handles.ask(message, self._ask)
        return [info for reply in await self._ask_all(message) for info in reply.handles]

    async def _roll_out(self, message: Control) -> dict[str, Any]:
        """Update or roll back all replicas; whoever asked may hang up meanwhile."""
        began, members = self._clock(), self.members
        self._rollout.check(message, members)
        rolling = self._spawn(self._rollout.carry_out(message, members))
        try:
            await asyncio.shield(rolling)
        except asyncio.CancelledError:
            rolling.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise
        facts = await self.control(Control(id=message.id, action="weight_info"))
        return facts | {"seconds": self._clock() - began}

    async def _ask_all(self, message: HandleCommand | Control) -> list[HandleReply]:
        named = [
            (one, msgspec.structs.replace(message, id=f"{message.id}-{one.number}"))
            for one in self.members
        ]
        return await asyncio.gather(*(self._ask(*each) for each in named))

    # -- watching

    async def _watch(self) -> None:
        """Look for replicas that are silent or slow. Time in which this process itself did not run counts for
        nobody."""
        while True:
            began = self._clock()
            await asyncio.sleep(LOOKS_S)
            if self._clock() - began > 4 * LOOKS_S:
                for member in self.members:
                    member.heard_at = self._clock()
            self.look()

    def look(self) -> None:
        """Move the work of silent and of slow replicas elsewhere."""
        for member in self.members:
            if not member.silent and member.overdue():
                log.warning("replica %s is silent", member.name)
                self._fleet["silent"] += 1
                self._out(member, silent=True)
        for name in self.suspicion.look(self._clock()):
            log.warning("replica %s is out: it is slow", name)
            self._out(self._members[name], silent=False)
        for member in self.members:
            self._check_weights(member)
            self._weigh(member)
        self._stop_surplus()

    def _stop_surplus(self) -> None:
        """Retire a replica that the load no longer needs; none that has named caches, and none while other weights
        are tried."""
        now, members = self._clock(), self.members
        self._scale_down.observe(now, members)
        if self._rollout.busy or self._rollout.has_canary or len(members) < len(self._members):
            return
        member = self._scale_down.surplus(now, members, self._handles.places)
        if member is not None:
            self._scale_down.retired.add(member.name)
            self._leave(member)
            self._spawn(self._retire(member))

    async def _retire(self, member: Member) -> None:
        await self._scale_down.retire(member)
        self._join_and_leave()  # where it could not be told to end

    def _out(self, member: Member, *, silent: bool) -> None:
        member.silent = member.silent or silent
        self._weigh(member)
        n = None if silent else self._budget.spend(len(member.streams))
        self._move(member, "the replica does not answer", blamed=silent, n=n)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
