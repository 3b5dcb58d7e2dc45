"""Requests of simulated replicas that are lost: they wait, go on elsewhere behind what their clients have, or end.

The twin of ``engine.resume`` and of its half in ``fleet.placement``: the same choice, patience and order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from jserve.errors import EngineDead, NotReady
from jserve.fleet.asking import Asking
from jserve.fleet.face import PATIENCE
from jserve.fleet.route import Asked
from jserve.fleet.router import ReplicaRouter
from jserve.sim.clients import Clients
from jserve.sim.records import Record
from jserve.sim.trace import TraceItem
from jserve.types import Finish, Output, Request


class LostRequests:
    """Requests of ``clients`` that no replica has, oldest first.

    Args:
        clients: who sent them.
        asking: names their pages.
        page_size: tokens of a KV page.
    """

    def __init__(self, clients: Clients, asking: Asking, page_size: int) -> None:
        self._clients, self._asking, self._page_size = clients, asking, page_size
        self._waiting: dict[str, TraceItem] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id: str) -> bool:
        return id in self._waiting

    def park(self, items: Iterable[TraceItem], now: float) -> None:
        """Keep those that may go on; one that lost too many replicas and was told nothing between ends in error."""
        for item in items:
            if self._record(item).n_idle <= PATIENCE:
                self._waiting[item.id] = item
            else:
                self.end(item, range(len(item.outputs)), now, Finish.ERROR, EngineDead.code)

    def forget(self, id: str) -> None:
        """Nobody waits for the request ``id`` any more."""
        self._waiting.pop(id, None)

    def resumed(self, router: ReplicaRouter) -> Iterator[tuple[TraceItem, Asked, int, Request]]:
        """Those for which ``router`` finds a replica, which wait no more: each with what it asks for now, the number of
        the replica, and the request that goes on."""
        for item in list(self._waiting.values()):
            record, said = self._record(item), self._said(item)
            request = self._clients.again(item)
            asked = self._asking.of(request, self._page_size, said)
            try:
                choice = router.choose(asked)
            except NotReady:
                continue
            del self._waiting[item.id]
            record.attempt, record.n_idle = record.attempt + 1, record.n_idle + 1
            record.n_resumed += 1
            left = tuple([tuple(ids) if i in record.open else None for i, ids in enumerate(said)])
            attempt = dataclasses.replace(request, attempt=record.attempt, said=left)
            yield item, asked, choice.replica, attempt

    def end(
        self,
        item: TraceItem,
        choices: Collection[int],
        now: float,
        finish: Finish = Finish.ABORT,
        code: str | None = None,
    ) -> list[tuple[str, int]]:
        """End those of ``choices`` of ``item`` that are open, though no engine says so. The request with its tokens
        drawn, if it is over now."""
        record = self._record(item)
        ends = [
            Output(
                request_id=item.id, index=i, finish=finish, error_code=code, attempt=record.attempt
            )
            for i in sorted(record.open.intersection(choices))
        ]
        self._clients.receive(ends, now)
        return self._clients.take_ended()

    def _record(self, item: TraceItem) -> Record:
        return self._clients.records.open[item.id]

    def _said(self, item: TraceItem) -> list[list[int]]:
        """The tokens that the client of ``item`` has, for each choice."""
        answer, times = self._clients.streams.answer, self._record(item).times
        return [answer(item, i)[: len(told)] for i, told in enumerate(times)]
