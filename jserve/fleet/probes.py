"""Tries replicas that were put out as slow with copies of requests.

A copy asks for one token, and nobody reads it: its request is answered elsewhere meanwhile. So no client waits for a
replica that may still be slow, and one comes back whatever the lanes and deadlines of the traffic are.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from jserve.engine.replica import Replica
from jserve.engine.streams import Stream
from jserve.errors import JserveError
from jserve.fleet.member import Member
from jserve.fleet.remote_prefill import prefill_of
from jserve.fleet.sent import Sent, SentRequests
from jserve.fleet.suspicion import Suspicion
from jserve.ports import Clock
from jserve.types import Lane, Output, Request


@dataclass(slots=True, eq=False)
class _Probe:
    stream: Stream
    sent: Sent


class Probes:
    """The probes under way, by id, which no client can have chosen.

    Args:
        sent: where requests are.
        assign: sends a request to a member, whatever that costs.
        suspicion: is told how each probe went.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sent: SentRequests,
        assign: Callable[[Request, Member], Sent],
        suspicion: Suspicion,
        *,
        clock: Clock,
    ) -> None:
        self._sent, self._assign = sent, assign
        self._suspicion, self._clock = suspicion, clock
        self._probes: dict[str, _Probe] = {}

    def begin(self, member: Member, request: Request) -> None:
        """Try ``member`` with a copy of ``request``."""
        copy = probe_of(request, uuid.uuid4().hex)
        probe = _Probe(Stream(copy, clock=self._clock), self._assign(copy, member))
        try:
            member.work_on(probe.stream, copy)
        except JserveError:
            self._sent.settle_copy(probe.sent)
            return
        self._probes[copy.id] = probe
        self._suspicion.probe(member.name, copy.id)

    def took(self, replica: Replica, output: Output) -> bool:
        """True: ``output`` is of a probe, and nobody reads it."""
        probe = self._probes.get(output.request_id)
        if probe is None or probe.sent.member is not replica:
            return False
        if output.token_ids:
            now = self._clock()
            ratio = probe.sent.ratio(now)
            self._suspicion.probed(probe.sent.member.name, output.request_id, ratio, now)
        if output.finish is not None:
            self.lost(probe.stream)
            replica.streams.pop(output.request_id, None)
        return True

    def lost(self, stream: Stream) -> bool:
        """The replica of ``stream`` works on it no more; True: it is a probe, and given up."""
        probe = self._probes.pop(stream.request.id, None)
        if probe is None:
            return False
        self._sent.settle_copy(probe.sent)
        self._suspicion.release(probe.sent.member.name, stream.request.id)
        return True


def probe_of(request: Request, id: str) -> Request:
    """The request that computes the prompt of ``request`` and draws one token, behind all others that wait."""
    return replace(prefill_of(request, id), exports_kv=False, lane=Lane.BULK)
