"""Stops replicas that a load no longer needs, one at a time, beginning with that whose end costs least.

What it works on goes on elsewhere behind what was told, so nobody waits for its end. Who starts replicas is the
``ReplicaSource``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence as Seq

from jserve.engine.streams import Stream
from jserve.errors import JserveError
from jserve.fleet.autoscale import Autoscaler, load_of
from jserve.fleet.member import Member
from jserve.fleet.source import ReplicaSource
from jserve.fleet.suspicion import Suspicion

log = logging.getLogger(__name__)


class ScaleDown:
    """Chooses who is stopped.

    Args:
        source: of replicas.
        suspicion: how far each replica is trusted.
        autoscaler: of their load.

    Attributes:
        retired: names of replicas that are told to end and still run.
    """

    def __init__(self, source: ReplicaSource, suspicion: Suspicion, autoscaler: Autoscaler) -> None:
        self.autoscaler = autoscaler
        self.retired: set[str] = set()
        self._source, self._suspicion = source, suspicion

    def listed(self, names: set[str]) -> None:
        """The source has these replicas now."""
        for name in self.autoscaler.saved_s.keys() - names:
            self.autoscaler.forget(name)
        self.retired &= names

    def observe(self, now: float, members: Seq[Member]) -> None:
        """See what ``members`` have to do."""
        loads = {one.name: load_of(one.stats.values) for one in members}
        self.autoscaler.observe(now, loads, start_s=0.0)

    def values(self) -> dict[str, float]:
        """For /metrics."""
        scaler = self.autoscaler
        return {"fleet_load": scaler.load, "replicas_needed": float(scaler.needed)}

    def surplus(self, now: float, members: Seq[Member], kept: Iterable[Member]) -> Member | None:
        """The replica that is to end now, if there are more than enough; none of those ``kept``."""
        if not self._source.scales or self.retired:
            return None
        enough = self.autoscaler.enough(now)
        if enough is None or len(members) <= max(enough, self._source.n):
            return None
        keeps = set(kept)
        may_end = [one for one in members if one.may_get and one not in keeps]
        return min(may_end, key=self._cost, default=None)

    async def retire(self, member: Member) -> None:
        """Have ``member``, which works on nothing any more, end."""
        log.warning("replica %s is stopped: the load needs %d", member.name, self.autoscaler.needed)
        try:
            await self._source.retire(member.name)
        except JserveError as error:
            log.warning("replica %s is not stopped: %s", member.name, error.message)
            self.retired.discard(member.name)

    def _cost(self, member: Member) -> tuple[bool, float]:
        """Seconds of prefill that its end costs the others: what its cache saved of late, and what it works on. One
        that is out because it is slow ends first."""
        record = self._suspicion.records[member.name]
        n_tokens = sum([_n_tokens(stream) for stream in member.streams.values() if stream.open])
        saved_s = self.autoscaler.saved_s.get(member.name, 0.0)
        return not record.out, saved_s + n_tokens * member.view.prefill_token_s


def _n_tokens(stream: Stream) -> int:
    return len(stream.request.prompt_ids) + sum(map(len, stream.said))
