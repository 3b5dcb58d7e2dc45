"""Several engines of one process, each on devices of its own, with the face of one ``engine.Engine``.

It owns which engine has which request and which named cache, and turns of the one thread that drives them. No engine
waits for another: a step is collected once it is done. ::

    submit --route--> engine 0   scheduler, page pool, runner on devices 0 1
                      engine 1   scheduler, page pool, runner on devices 2 3
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jserve.engine.engine import STATS_EVERY_S, Engine, failed_reply
from jserve.engine.wire import Control, HandleCommand, HandleReply, Stats
from jserve.errors import BadRequest, EngineDead
from jserve.fleet.asking import Asking
from jserve.fleet.describe import view_of
from jserve.fleet.page_log import PageLog
from jserve.fleet.route import Asked
from jserve.fleet.router import ReplicaRouter
from jserve.fleet.totals import totals
from jserve.types import Output, Request

POLL_S = 0.0002
"""Between two looks at devices that are all busy."""
ONE_IS_ENOUGH = ("start_profile", "stop_profile")
"""Commands that are of the process, whichever engine carries them out."""


@dataclass(slots=True)
class _Placed:
    """A request that an engine has."""

    asked: Asked
    at: int
    n_open: int
    """Choices without an end."""
    n_said: int = 0


@dataclass(slots=True)
class _Awaited:
    """A command that several engines have."""

    n: int
    replies: list[HandleReply] = field(default_factory=list)


class DataParallelEngine:
    """Requests go where they cost least (``fleet.route``); commands go to all. One thread calls ``step``.

    Args:
        engines: not stepped by anybody else; each with a ``PolledRunner``.
    """

    def __init__(self, engines: Seq[Engine]) -> None:
        self.engines = tuple(engines)
        self._router, self._asking = ReplicaRouter(len(engines)), Asking()
        self._logs = [PageLog() for _ in engines]
        for engine, log in zip(engines, self._logs, strict=True):
            engine.scheduler.resources.cache.listener = log
        self._page_size = engines[0].scheduler.resources.cache.page_size
        self._placed: dict[str, _Placed] = {}
        self._caches: dict[tuple[str, str], int] = {}
        """Tenant and name of a cache -> its engine; those that expired are among them."""
        self._awaited: dict[str, _Awaited] = {}
        self._answers: list[HandleReply] = []
        self.describer: Callable[[Stats], Stats] | None = None
        self.stats_every_s = STATS_EVERY_S

    # -- the face of ``Engine``

    def submit(self, request: Request) -> None:
        """As ``Engine.submit``, to the engine where it costs least, or the one that has its named cache."""
        asked = self._asked(request)
        bound = self._caches.get((request.tenant, request.cache)) if request.cache else None
        self._place(request, asked, bound)
        self.engines[self._placed[request.id].at].submit(request)

    def create(self, request: Request, ttl_s: float) -> None:
        """As ``Engine.create``; the cache is of one engine."""
        key = request.tenant, request.cache or ""
        self._place(request, self._asked(request), self._caches.get(key))
        self._caches[key] = self._placed[request.id].at
        self.engines[self._caches[key]].create(request, ttl_s)

    def check(self, request: Request) -> None:
        self.engines[0].check(request)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        placed = self._placed.get(request_id)
        if placed is not None:
            self.engines[placed.at].cancel(request_id, index)

    def ask(self, message: HandleCommand | Control) -> None:
        """As ``Engine.ask``: a named cache is its engine's business, all else that of all."""
        if isinstance(message, HandleCommand) and message.name is not None:
            key = message.tenant, message.name
            at = self._caches.pop(key, 0) if message.action == "drop" else self._caches.get(key, 0)
            asked = self.engines[at : at + 1]
        else:
            asked = self._who_carry_out(message)
            if isinstance(message, Control) and (refused := _refused(message)) is not None:
                self._answers.append(failed_reply(message.id, refused))
                return
        self._awaited[message.id] = _Awaited(len(asked))
        for engine in asked:
            engine.ask(message)

    def carry_out(self, command: Control) -> dict[str, Any] | None:
        """As ``Engine.carry_out``, of every engine.

        Raises:
            EngineDead: the first one did, another did not.
        """
        engines, infos = self._who_carry_out(command), list[dict[str, Any] | None]()
        if (refused := _refused(command)) is not None:
            raise refused
        for engine in engines:
            try:
                infos.append(engine.carry_out(command))
            except Exception as error:
                if not infos:
                    raise
                raise EngineDead(f"{command.action}: only some engines did it: {error}") from error
        waits = infos.count(None)
        if waits:
            done = [HandleReply(id=command.id, info=info) for info in infos if info is not None]
            self._awaited[command.id] = _Awaited(len(engines), done)
            return None
        return infos[0]

    def give_up_pending(self) -> None:
        self._awaited.clear()
        for engine in self.engines:
            engine.give_up_pending()

    def take_answers(self) -> list[HandleReply]:
        """The answers to what was asked, each given once, when all engines that were asked have answered.

        Raises:
            EngineDead: one engine carried out what another could not: they would differ from now on.
        """
        for engine in self.engines:
            for reply in engine.take_answers():
                awaited = self._awaited.get(reply.id)
                if awaited is not None:
                    awaited.replies.append(reply)
                    if len(awaited.replies) == awaited.n:
                        del self._awaited[reply.id]
                        self._answers.append(_merged(awaited.replies))
        answers, self._answers = self._answers, []
        return answers

    @property
    def busy(self) -> bool:
        return bool(self._answers) or any(engine.busy for engine in self.engines)

    @property
    def closed(self) -> bool:
        return any(engine.closed for engine in self.engines)

    @property
    def n_steps(self) -> int:
        return sum(engine.n_steps for engine in self.engines)

    @property
    def blocked_wait_s(self) -> float:
        return min(engine.blocked_wait_s for engine in self.engines)

    @property
    def n_waiting(self) -> int:
        return sum(engine.n_waiting for engine in self.engines)

    @property
    def max_waiting(self) -> int:
        return sum(engine.max_waiting for engine in self.engines)

    @property
    def n_in_flight(self) -> int:
        return sum(engine.n_in_flight for engine in self.engines)

    def step(self) -> list[Output]:
        """One turn of every engine that has something to do, and what is done of their steps; where nothing moves, the
        devices get a moment.

        Raises:
            EngineDead: as ``Engine.step``; the others end with it.
        """
        outputs: list[Output] = []
        moved = False
        for engine in self.engines:
            if engine.busy:
                before = engine.n_steps, engine.n_in_flight
                outputs += engine.step(wait=False)
                moved |= before != (engine.n_steps, engine.n_in_flight)
        for out in outputs:
            self._note(out)
        if not moved and not outputs and self.n_in_flight:
            time.sleep(POLL_S)
        return outputs

    def drain(self) -> list[Output]:
        outputs: list[Output] = []
        while self.busy:
            outputs += self.step()
        return outputs

    def stats(self) -> Stats:
        """Sums over the engines, and the steps of all."""
        every = [engine.stats() for engine in self.engines]
        steps = sorted((step for stats in every for step in stats.steps), key=lambda s: s.at)
        return msgspec.structs.replace(totals(every), steps=steps)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    # -- places

    def _asked(self, request: Request) -> Asked:
        scheduler = self.engines[0].scheduler
        weights, named = scheduler.resources.cache.weights, scheduler.with_kv_name(request)
        return self._asking.of(named, self._page_size, weights=weights)

    def _place(self, request: Request, asked: Asked, bound: int | None) -> None:
        for i, (engine, log) in enumerate(zip(self.engines, self._logs, strict=True)):
            self._router.update(i, view_of(engine.scheduler, engine.n_read), log.take())
        if bound is None:
            bound = self._router.choose(asked).replica
        else:
            self._router.assign(asked, bound)
        self._placed[request.id] = _Placed(asked, bound, len(request.open_choices))

    def _note(self, out: Output) -> None:
        placed = self._placed.get(out.request_id)
        if placed is None:
            return
        placed.n_said += len(out.token_ids)
        placed.n_open -= out.finish is not None
        if not placed.n_open:
            del self._placed[out.request_id]
            self._asking.learn(placed.n_said)
            self._router.over(placed.asked, placed.at)

    def _who_carry_out(self, message: HandleCommand | Control) -> tuple[Engine, ...]:
        one = isinstance(message, Control) and message.action in ONE_IS_ENOUGH
        return self.engines[:1] if one else self.engines


def _refused(command: Control) -> BadRequest | None:
    """The refusal of what only one engine can do; None: all can do it."""
    for name in ("donate", "alias"):
        if getattr(command, name):
            return BadRequest(f"{name}: several engines (dp) copy the weights", field=name)
    if command.running == "beside":
        return BadRequest("running: beside is of one engine, and here are several", field="running")
    return None


def _merged(replies: Seq[HandleReply]) -> HandleReply:
    """One answer for all. Raises EngineDead where they disagree."""
    failed = [reply for reply in replies if reply.error is not None]
    if failed and len(failed) < len(replies):
        raise EngineDead(f"a command was carried out by some engines only: {failed[0].error}")
    handles = [info for reply in replies for info in reply.handles]
    return failed[0] if failed else msgspec.structs.replace(replies[0], handles=handles)
