"""The asyncio interface over several engines, of which requests choose by price and outlive any.

It owns who is a member, and watches them; where requests go is ``fleet.placement``'s. Who places replicas and starts
others is the ``ReplicaSource``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from jserve.engine.face import EngineFace, ReplicaState
from jserve.engine.health import HealthLimits
from jserve.engine.process import OnProgress
from jserve.engine.replica import Replica
from jserve.engine.resume import Resumption
from jserve.engine.streams import Stream
from jserve.engine.wire import Control, HandleCommand, HandleReply, Message, Outputs, Stats
from jserve.errors import EngineDead, JserveError, NotReady, RequestFailed
from jserve.fleet.autoscale import Autoscaler
from jserve.fleet.candidates import PREFILL
from jserve.fleet.commands import HandlePlaces, check_for_all
from jserve.fleet.exits import hang_up_on_ending, machine_id
from jserve.fleet.guarded import GuardedCalls
from jserve.fleet.member import Member, all_unfit, state_of
from jserve.fleet.placement import REFUSALS, RequestPlacement
from jserve.fleet.role_control import RoleControl
from jserve.fleet.roles import DECODE, exchanged, lacking
from jserve.fleet.rollout import ACTIONS, Rollout, Write
from jserve.fleet.router import ReplicaRouter
from jserve.fleet.scale_down import ScaleDown
from jserve.fleet.source import ReplicaSource
from jserve.fleet.suspicion import Suspicion
from jserve.fleet.totals import totals
from jserve.ports import Clock
from jserve.types import HandleInfo, Output

log = logging.getLogger(__name__)

STARTING, LOOKS_S, EXIT_LOOKS_S = "start replicas", 0.05, 0.02
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
        role_control: says which replica takes the other role, where roles follow the load.
        hedge_share: of requests of lane interactive, those that may be sent twice when their first token is late.
        audit_share: of requests, those whose answers are computed once more and compared.
        model: the weights that replicas start with, as ``update_weights`` takes them.
        write: as ``fleet.rollout.Write``.
        autoscaler: says which replicas are no longer needed, where ``source`` starts more by the load.
        health: limits of ``degraded_reasons`` of each replica.
        clock: monotonic seconds.
        rest: as ``EngineFace``.

    Attributes:
        counters: engine_deaths (replicas lost without being stopped), resumed, silent and ejected (times that a
            replica was found so), moved (requests that went on elsewhere though their replica lives), remote_prefills
            and remote_prefills_failed (prompts that a prefill replica computed, and did not), hedged and hedges_won,
            audited and audit_mismatches, aborted ...
    """

    def __init__(
        self,
        source: ReplicaSource,
        *,
        policy: str = "seconds",
        roles: dict[str, int] | None = None,
        role_control: RoleControl | None = None,
        hedge_share: float = 0.0,
        audit_share: float = 0.0,
        model: str = "",
        write: Write | None = None,
        autoscaler: Autoscaler | None = None,
        health: HealthLimits | None = None,
        clock: Clock = time.monotonic,
        **rest: Any,
    ) -> None:
        super().__init__(clock=clock, **rest)
        self._source, self._health = source, health
        self._resumption = Resumption(PATIENCE)
        self._router = ReplicaRouter(policy=policy)
        self.suspicion = Suspicion()
        self._scale_down = ScaleDown(source, self.suspicion, autoscaler or Autoscaler())
        self._roles, self._role_control = roles or {}, role_control
        self._rollout = Rollout(model, self._ask, self._weigh, clock, write)
        self._members: dict[str, Member] = {}
        self._listed: set[str] = set()
        self._handles = HandlePlaces()
        self._placement = RequestPlacement(
            self._members,
            self._router,
            self._handles,
            self._rollout,
            self.suspicion,
            self._resumption,
            roles=bool(self._roles),
            hedge_share=hedge_share,
            audit_share=audit_share,
            clock=clock,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._guarded = GuardedCalls()
        self._info: dict[str, Any] = {}
        self._closing = False
        self._gave_up = asyncio.Event()
        self._fleet = dict.fromkeys(["engine_deaths", "silent"], 0)

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
        placement = self._placement
        told["moved"] = placement.n_moved
        done, failed = placement.prefills.n_done, placement.prefills.n_failed
        remote = {"remote_prefills": done, "remote_prefills_failed": failed}
        hedging, audits = placement.hedging, placement.audits.counts
        twice = {"hedged": hedging.n_sent, "hedges_won": hedging.n_won}
        twice |= {"audited": audits.compared, "audit_mismatches": audits.odd.total()}
        degraded = sum(one.health.n_degraded for one in self.members)
        return {**told, **remote, **twice, **self._fleet, "degraded": degraded, **self._counts}

    async def start(self, on_progress: OnProgress | None = None) -> dict[str, Any]:
        told, n = on_progress or (lambda *_: None), self._source.n
        told(STARTING, 0, n)
        await self._source.start(self._on_change)
        while len(self.members) < n:
            await asyncio.sleep(LOOKS_S)
        told(STARTING, n, n)
        self._info = dict(self.members[0].info)
        self._placement.page_size = self._info["page_size"]
        self._placement.short_context = self._info["short_context"]
        self._placement.kv_features = self._info["kv_features"]
        self._spawn(self._watch())
        self._spawn(self._watch_exits())
        return self._info

    async def close(self) -> None:
        self._closing = self._placement.closed = True
        self._fail_all("the engine was closed", EngineDead.code, cancel=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.supervisor.close() for one in self._members.values()))
        await self._source.close()
        self._rollout.close()

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
        odd, records = self._placement.audits.counts.odd, self.suspicion.records
        return [state_of(one, records[one.name], odd[one.name]) for one in self.members]

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
        self._placement.move(member, "the replica was stopped", blamed=False)
        self._spawn(member.supervisor.close())

    def lost(self, replica: Replica, streams: list[Stream], why: str) -> None:
        """Its requests go on elsewhere, or waits for the next replica."""
        assert isinstance(replica, Member)
        if self._members.get(replica.name) is not replica:
            return
        if replica.info and not self._closing:
            self._rollout.fault(replica, f"it is lost: {why}")
        self._forget(replica)
        if replica.info and not self._closing:  # else it could not be connected to again
            self._fleet["engine_deaths"] += 1
            log.warning("replica %s is lost: %s", replica.name, why)
        self._placement.park(streams, f"the engine died: {why}")
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
            case Outputs():
                ended = [output for output in message.outputs if output.finish is not None]
                self._router.ended(replica.number, len(ended))
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
        unfit = bool(member.unfit) and any(not one.unfit for one in self.members)
        self._router.candidates.change(
            member.number,
            suspicion=record.factor,
            out=record.out or member.silent or member.updating or unfit,
            role=member.role,
        )

    # -- requests

    def _check_open(self) -> None:
        self._check_draining()
        if self._closing:
            raise NotReady("the server is shutting down", code="draining", retry_after=5.0)
        if not self.ready:
            raise EngineDead("no replica is ready", retry_after=5.0)

    def _place(self, stream: Stream, ttl_s: float | None) -> None:
        self._placement.place(stream, ttl_s)

    def _deliver(self, replica: Replica, output: Output) -> None:
        placement = self._placement
        if placement.prefills.has(output.request_id):
            placement.on_prefill(replica, output)
            return
        stream = self._streams.get(output.request_id)
        if placement.audits.took(replica, output) or placement.probes.took(replica, output):
            return
        if placement.hedging.took(stream, replica, output):
            return
        placement.told(replica, output)
        if stream is not None and output.error_code in REFUSALS:
            told = placement.refused(stream, replica, output)
            if told is None:
                return
            output = told
        super()._deliver(replica, output)

    def _over(self, stream: Stream) -> None:
        self._placement.over(stream)

    def _give_up(self, replica: Replica, why: str) -> None:
        self._placement.park(replica.give_up(), why, RequestFailed.code)

    def _go_on(self) -> None:
        self._placement.go_on()

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

    async def _watch_exits(self) -> None:
        machine = machine_id()
        while True:
            await asyncio.sleep(EXIT_LOOKS_S)
            self._guarded.run([lambda: hang_up_on_ending(self.members, machine)])

    def look(self) -> None:
        """Move the work of silent and of slow replicas elsewhere, and that of those who wait for too long; see what
        becomes of weights, roles and the number of replicas. An error in one of these ends none of the others."""
        placement = self._placement
        self._guarded.run(
            [
                self._look_for_silent,
                self._look_for_slow,
                self._look_at_health,
                self._look_at_weights,
                lambda: placement.hedging.look(self._streams.values()),
                placement.rebalance,
                self._follow_load,
                self._stop_surplus,
            ]
        )

    def _look_for_silent(self) -> None:
        for member in self.members:
            if not member.silent and member.overdue():
                log.warning("replica %s is silent", member.name)
                self._fleet["silent"] += 1
                self._out(member, silent=True)

    def _look_for_slow(self) -> None:
        for name in self.suspicion.look(self._clock()):
            log.warning("replica %s is out: it is slow", name)
            self._out(self._members[name], silent=False)

    def _look_at_weights(self) -> None:
        for member in self.members:
            self._check_weights(member)
            self._weigh(member)
        found = self._rollout.judge()
        if found is not None:
            self._spawn(self._rollout.carry_out_verdict(found, self.members))

    def _look_at_health(self) -> None:
        """A replica whose steps or logits fail is slow at nothing, so that only its own statistics show it."""
        for member in self.members:
            unfit = member.degraded_reasons()
            if unfit and not member.unfit:
                log.warning("replica %s is unfit: %s", member.name, "; ".join(unfit))
                self._rollout.fault(member, unfit[0])
            member.unfit = unfit

    def _follow_load(self) -> None:
        """Give a replica the other role where the load asks for it. Not while weights change: who loads them is
        back soon."""
        control, router = self._role_control, self._router
        if control is None or self._rollout.busy:
            return
        number = control.look(self._clock(), router.prefill_s, router.decode_s, router.candidates)
        if number is None:
            return
        member = next(one for one in self._members.values() if one.number == number)
        member.role = DECODE if member.role == PREFILL else PREFILL
        self._roles = exchanged(self._roles, member.role)
        self._weigh(member)
        seconds = f"prompts {control.prefill:.2f}, answers {control.decode:.2f} seconds a second"
        log.info("replica %s has role %s from now on: %s", member.name, member.role, seconds)

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
        self._rollout.fault(member, "it says nothing" if silent else "it is slow")
        member.silent = member.silent or silent
        self._weigh(member)
        n = None if silent else self._placement.may_move(len(member.streams))
        self._placement.move(member, "the replica does not answer", blamed=silent, n=n)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
