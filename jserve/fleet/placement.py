"""Decides where requests go, hands them over, and moves them elsewhere.

It owns which request is at which replica, whose prompt is computed by another one, and what becomes of requests whose
replica is lost, silent, slow or stopped: they go on elsewhere behind what was told (``engine.resume``). Who is a
member is ``fleet.face``'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import msgspec

from jserve.engine.replica import Replica
from jserve.engine.resume import Resumption
from jserve.engine.streams import Stream
from jserve.errors import DeadlineUnreachable, EngineDead, JserveError, NotReady, Overloaded
from jserve.fleet.asking import front_kv_name
from jserve.fleet.audit import Audits
from jserve.fleet.commands import HandlePlaces
from jserve.fleet.hedging import Hedging
from jserve.fleet.member import Member
from jserve.fleet.probes import Probes
from jserve.fleet.rebalance import goes_elsewhere, longest_waits, waits_of
from jserve.fleet.remote_prefill import (
    RemotePrefills,
    after_prefill,
    is_done,
    may_be_remote,
    ready_behind,
)
from jserve.fleet.rollout import Rollout
from jserve.fleet.route import Asked, ReplicaChoice
from jserve.fleet.router import ReplicaRouter
from jserve.fleet.sent import Sent, SentRequests
from jserve.fleet.suspicion import RetryBudget, Suspicion
from jserve.ports import Clock
from jserve.sched.admission import check as admission
from jserve.types import Finish, Output, Request

REFUSALS = (Overloaded.code, DeadlineUnreachable.code)
"""Codes of what one replica has no room for now, and another one may have."""


class RequestPlacement:
    """Requests of ``members``, which are kept by name.

    Args:
        router: chooses by price.
        handles: where named caches are.
        rollout: which weights a request needs.
        suspicion: how far each replica is trusted.
        resumption: keeps requests that lost their replica.
        roles: some replicas compute prompts for others.
        hedge_share, audit_share: of ``Hedging`` and ``Audits``.
        clock: monotonic seconds.

    Attributes:
        page_size: tokens of a KV page; 0 before the first replica is ready.
        short_context: as of ``RunnerLimits``.
        kv_features: step features that change KV.
        closed: nothing is handed over any more.
        n_moved: requests that went on elsewhere though their replica lives.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        router: ReplicaRouter,
        handles: HandlePlaces,
        rollout: Rollout,
        suspicion: Suspicion,
        resumption: Resumption,
        *,
        roles: bool,
        hedge_share: float = 0.0,
        audit_share: float = 0.0,
        clock: Clock,
    ) -> None:
        self._members, self.router, self._handles = members, router, handles
        self._suspicion, self._resumption = suspicion, resumption
        self._rollout, self._roles, self._clock = rollout, roles, clock
        self.sent = SentRequests(router, rollout)
        self.prefills = RemotePrefills(clock)
        self._budget, self._rebalances = RetryBudget(), RetryBudget()
        self.hedging = Hedging(
            self.sent, self._choose_other, suspicion, share=hedge_share, clock=clock
        )
        self.audits = Audits(
            self.sent, self._choose_other, lambda: rollout.busy, share=audit_share, clock=clock
        )
        self.probes = Probes(self.sent, self._assign, suspicion, clock=clock)
        self.page_size, self.short_context, self.closed, self.n_moved = 0, 0, False, 0
        self.kv_features: Collection[str] = ()
        self._refusals: dict[str, Output] = {}
        """Of requests that were refused and asked another replica, the refusal with the least wait."""

    @property
    def _ready(self) -> list[Member]:
        return [one for one in self._members.values() if one.ready]

    def place(self, stream: Stream, ttl_s: float | None) -> None:
        """As ``EngineFace._place``."""
        self.audits.drop(stream.request.id)
        is_long, router = admission.is_long(stream.request, self.short_context), self.router
        # Its deadlines count from here, whichever replicas it meets.
        arrival = stream.request.arrival or self._clock()
        kv_name = front_kv_name(stream.request, self.kv_features)
        stream.request = request = replace(
            stream.request, is_long=is_long, kv_name=kv_name, arrival=arrival
        )
        self.hedging.placed(request)
        self._probe(request)
        asked = self.asked_of(request)
        bound = self._bound_to(request, ttl_s)
        if bound is None and self._roles and may_be_remote(request):
            prefill = router.choose_prefill(asked)
            if prefill is not None:
                self._send_prefill(self.prefills.begin(stream), asked, prefill)
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
        self.sent.add(request.id, Sent(asked, member, choice, self._clock()))
        try:
            member.work_on(stream, request, ttl_s)
        except JserveError:
            self.over(stream)
            raise

    def _send_prefill(self, prefill: Stream, asked: Asked, choice: ReplicaChoice) -> None:
        try:
            self._send(prefill, prefill.request, asked, choice)
        except JserveError:
            self.prefills.lost(prefill)
            raise

    def _answer(self, stream: Stream, source: str, *, ready: bool) -> None:
        """Answer ``stream``, whose prefill is over, where that costs least. ``ready``: all its full pages are at
        ``source``; otherwise some may be."""
        if not stream.open or self.closed:
            return
        asked = ready_behind(self.asked_of(stream.request), ready=ready)
        try:
            choice = self.router.choose(asked)
            after = after_prefill(stream.request, stream.open, source)
            self._send(stream, after, asked, choice)
        except NotReady:
            self.park([stream], "no replica")
        except JserveError as error:
            stream.end(Finish.ERROR, error.message, error.code)

    def on_prefill(self, replica: Replica, output: Output) -> None:
        """``output`` of a request that only computes a prompt."""
        sent = self.sent.get(output.request_id)
        if sent is None or sent.member is not replica:
            return
        stream = self.prefills.ended(output)
        if stream is not None:
            self.sent.settle(output.request_id)
            replica.streams.pop(output.request_id, None)
            source = replica.info.get("kv_transfer_address") or ""
            self._answer(stream, source, ready=is_done(output))

    def asked_of(self, request: Request, resumed: Stream | None = None) -> Asked:
        return self.sent.asked(request, self._ready, self.page_size, resumed)

    def _bound_to(self, request: Request, ttl_s: float | None) -> Member | None:
        """The replica that has to take ``request`` at any price: that of its cache."""
        if request.cache is None:
            return None
        if ttl_s is None:
            return self._handles.find(request.tenant, request.cache)
        return self._handles.make(request.tenant, request.cache, self._ready)

    def _probe(self, request: Request) -> None:
        """Try those that have rested with copies of ``request``, if its prompt can be computed apart from it."""
        names = self._suspicion.due(self._clock())
        if not names or not may_be_remote(request):
            return
        for member in [self._members[name] for name in names]:
            if member.may_get and member.ready:
                self.probes.begin(member, request)

    def _assign(self, request: Request, member: Member) -> Sent:
        asked = self.asked_of(request)
        return Sent(asked, member, self.router.assign(asked, member.number), self._clock())

    def _numbered(self, number: int) -> Member:
        return next(one for one in self._members.values() if one.number == number)

    def told(self, replica: Replica, output: Output) -> None:
        """``output`` of ``replica`` came: what it says of how far the replica can be trusted."""
        sent = self.sent.get(output.request_id)
        if sent is not None and sent.member is replica:
            self._rollout.told(sent.member, output, sent, sent.at)
        if sent is not None and sent.member is replica and sent.first and output.token_ids:
            sent.first = False
            self._suspicion.observe(sent.member.name, sent.ratio(self._clock()))
        if output.finish in (Finish.STOP, Finish.LENGTH):
            self._budget.earned()
            self._rebalances.earned()

    def refused(self, stream: Stream, replica: Replica, refusal: Output) -> Output | None:
        """A refused request goes to another replica, if one is left that may have room: views are never new
        enough to know. Otherwise what its client is told: of all that refused it, the one that asks it to wait least.
        """
        least = self._refusals.get(refusal.request_id, refusal)
        if _wait_s(refusal) < _wait_s(least):
            least = refusal
        if self._asks_another(stream, replica, refusal):
            self._refusals[refusal.request_id] = least
            return None
        return msgspec.structs.replace(least, index=refusal.index, attempt=refusal.attempt)

    def _asks_another(self, stream: Stream, replica: Replica, refusal: Output) -> bool:
        sent = self.sent.get(refusal.request_id)
        if sent is None or sent.member is not replica:
            return False
        left = len(self._ready) - 1 - stream.attempt
        late = refusal.attempt != stream.attempt
        if late or any(stream.said) or left <= 0 or not self._budget.spend(1):
            return False
        replica.streams.pop(refusal.request_id)
        self._send_elsewhere(stream, sent, refusal.error or "refused")
        return True

    def rebalance(self) -> None:
        """Requests that wait go where they cost less than the wait that is left (``fleet.rebalance``), as far as a
        budget of moves allows."""
        router = self.router
        if not router.by_price:
            return
        waiting = waits_of(self.sent.waiting(), router.candidates)
        for one in longest_waits([one for one in waiting if self._may_wait_elsewhere(one.id)]):
            if goes_elsewhere(one, router.candidates, router.pages):
                if not self._rebalances.spend(1):
                    return
                sent = self.sent.get(one.id)
                assert sent is not None
                stream = sent.member.streams.pop(one.id)
                sent.member.cancel(one.id)
                self._send_elsewhere(stream, sent, "another replica has less to do")

    def _may_wait_elsewhere(self, request_id: str) -> bool:
        sent = self.sent.get(request_id)
        stream = None if sent is None else sent.member.streams.get(request_id)
        if sent is None or stream is None or not stream.open or any(stream.said):
            return False
        if stream.attempt:
            return False  # once is enough: views are never new enough to know
        apart = self.prefills.has(request_id) or sent.asked.n_ready > 0
        return not apart and not self.hedging.has(request_id) and stream.request.cache is None

    def _send_elsewhere(self, stream: Stream, sent: Sent, why: str) -> None:
        """``stream``, which its replica has no more, goes on at the cheapest other one."""
        stream.replica = None
        stream.excuse()
        self.n_moved += 1
        self.park([stream], why)
        self.go_on(leave_out=(sent.member.number,))

    def over(self, stream: Stream) -> None:
        """Nobody waits for ``stream`` any more."""
        prefill = self.prefills.forget(stream.request.id)
        if prefill is not None:
            sent = self.sent.settle(prefill)
            if sent is not None and sent.member.streams.pop(prefill, None) is not None:
                sent.member.cancel(prefill)
        self._refusals.pop(stream.request.id, None)
        self.hedging.over(stream.request.id)
        self._rollout.over(stream.request.id, stream.request.params.n)
        sent = self.sent.settle(stream.request.id)
        if sent is not None:
            self.sent.learn(stream)
            self.audits.over(stream, sent)

    def park(self, streams: list[Stream], why: str, code: str | None = EngineDead.code) -> None:
        """Their replica works on them no more; they wait to go on elsewhere (``go_on``)."""
        waiting = []
        for stream in streams:
            if any(copies.lost(stream) for copies in (self.hedging, self.audits, self.probes)):
                continue
            self.sent.settle(stream.request.id)
            if self.prefills.has(stream.request.id):
                waits = self.prefills.lost(stream)
                if waits is not None:
                    self._answer(waits, "", ready=False)
            elif not self.hedging.take_place(stream):
                waiting.append(stream)
        self._resumption.park(waiting, why, code)

    def may_move(self, n: int) -> int:
        """Of ``n`` requests, as many as the budget lets go elsewhere."""
        return self._budget.spend(n)

    def move(self, member: Member, why: str, *, blamed: bool, n: int | None = None) -> None:
        """All that it works on, or the ``n`` oldest, go on elsewhere. ``blamed``: they may be why it hangs."""
        streams = member.give_up(n)
        for stream in () if blamed else streams:
            stream.excuse()
        self.n_moved += len(streams)
        self.park(streams, why)
        self.go_on()

    def _choose_other(self, stream: Stream, names: Collection[str]) -> Sent | None:
        """The cheapest replica for the request of ``stream`` but those of ``names``, with the weights that ``stream``
        comes from; it is taken to be sent there."""
        others = {one.number: one for one in self._ready if one.name not in names}
        asked = msgspec.structs.replace(self.asked_of(stream.request), weights=stream.weights)
        leave_out = [i for i in range(len(self.router.candidates)) if i not in others]
        try:
            choice = self.router.choose(asked, leave_out)
        except NotReady:
            return None
        return Sent(asked, others[choice.replica], choice, self._clock())

    def go_on(self, leave_out: Collection[int] = ()) -> None:
        """Resume all that wait, each at the replica that is cheapest for it, and none at those numbered ``leave_out``;
        those for whom there is none now wait on."""
        for stream in self._resumption.take():
            target = self._target(stream, leave_out)
            if target is None:
                self._resumption.park([stream], "no replica", EngineDead.code)
            else:
                self.sent.add(stream.request.id, target)
                self._resumption.go_on(stream, target.member)

    def _target(self, stream: Stream, leave_out: Collection[int]) -> Sent | None:
        """The replica that goes on with ``stream``, if there is one now: with the same weights, where something was
        told."""
        if self.closed or not self.page_size:
            return None
        asked = self.asked_of(stream.request, stream)
        try:
            choice = self.router.choose(asked, leave_out)
        except NotReady:
            able = [one for one in self._ready if one.may_get and one.view.ready]
            if not able or any(one.weights == stream.weights for one in self._members.values()):
                return None
            choice = self.router.assign(asked, able[0].number)  # which ends it: other weights
        return Sent(asked, self._numbered(choice.replica), choice, self._clock())


def _wait_s(refusal: Output) -> float:
    return math.inf if refusal.retry_after is None else refusal.retry_after
