"""The front of a fleet in simulated time: the live code of ``fleet.face`` on an event loop whose clock jumps, over real
engines on the simulator's device. Nothing of it depends on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from jserve.engine.engine import Engine
from jserve.engine.wire import Gone, Message, Outputs, Ready
from jserve.fleet.describe import describe
from jserve.fleet.face import LOOKS_S, FleetEngine
from jserve.fleet.sent import Sent
from jserve.ports import RunnerLimits
from jserve.sched.scheduler import Scheduler
from jserve.sim.device import SimClock, SimRunner
from jserve.sim.faults import DEATH, Outage
from jserve.sim.fleet import FleetSimulation
from jserve.sim.pages import SharedPages
from jserve.sim.simulate import Setup, limits_of
from jserve.sim.trace import EOS, OVERRUN, Streams, TraceItem, request_of
from jserve.types import Choice, Request

MOVES_NOTHING_S = 0.01
Choices = dict[str, tuple[int | None, int]]
"""By request id: the replica that computes its prompt for another one, if any does, and the one that answers; of one
that was moved the last one."""


class _Jump(selectors.SelectSelector):
    """Time passes where the loop would wait for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0.05 if timeout is None else 0.0)
        if not found and timeout:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock begins at 0 and moves from one timer to the next."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def in_virtual_time(main: Callable[[VirtualLoop], Awaitable[Any]]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.close()


class VirtualClient:
    """One engine on a simulated device, which says and hears the same at the same times as one of a process of its own
    (``engine.process.serve``): an ``EngineClient``."""

    def __init__(
        self,
        setup: Setup,
        limits: RunnerLimits,
        answer: Callable[[Choice], list[int]],
        shared: SharedPages | None,
    ) -> None:
        self.clock = SimClock()
        device = setup.device
        runner = SimRunner(
            limits,
            device.costs,
            self.clock,
            answer,
            host_s=device.host_s,
            move_s=device.move_s,
            shared=shared,
        )
        scheduler = Scheduler(limits, setup.config)
        overlap = setup.config.scheduler.overlap
        self.engine = Engine(scheduler, runner, overlap=overlap, clock=self.clock, weights="w")
        describe(self.engine)
        self.info: dict[str, Any] = {}
        self._page_size = limits.page_size
        self._inbox: list[Request] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._task is not None

    def start(self, on_message: Callable[[Message], None]) -> None:
        names = {"page_size": self._page_size, "short_context": 0, "kv_features": []}
        self.info = {"weights": "w", **names}
        on_message(Ready(info=self.info))
        on_message(self.engine.stats())
        self._on_message = on_message
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        engine, loop, told_at = self.engine, asyncio.get_running_loop(), -math.inf
        while True:
            if not engine.busy and not self._inbox:
                self._wake.clear()
                await self._wake.wait()
            self.clock.now = max(self.clock.now, loop.time())
            inbox, self._inbox = self._inbox, []
            for request in inbox:
                engine.submit(request)
            before = engine.n_steps, engine.n_in_flight
            outputs = engine.step()
            moved = outputs or before != (engine.n_steps, engine.n_in_flight)
            wait_s = 0.0 if moved else min(MOVES_NOTHING_S, engine.blocked_wait_s)
            await asyncio.sleep(max(wait_s, self.clock.now - loop.time()))
            if outputs:
                self._on_message(Outputs(step=engine.n_steps, outputs=outputs))
            if not engine.busy or loop.time() - told_at > engine.stats_every_s:
                self._on_message(engine.stats())
                told_at = loop.time()

    def submit(self, request: Request) -> None:
        self._inbox.append(request)
        self._wake.set()

    def create(self, request: Request, ttl_s: float) -> None:
        raise NotImplementedError

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.engine.cancel(request_id, index)

    def ask(self, message: Any) -> None:
        raise NotImplementedError

    def hang(self) -> None:
        """It makes no more steps, and says nothing."""
        assert self._task is not None
        self._task.cancel()

    def end(self) -> None:
        """Its connection ends."""
        self._on_message(Gone(exit_code=-9))

    def kill(self) -> None:
        self.close()

    def close(self, timeout_s: float = 5.0) -> None:
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
            self._on_message(Gone(exit_code=0))


class VirtualSource:
    """A ``ReplicaSource`` of ``setup.replicas`` of these."""

    scales = False

    def __init__(self, setup: Setup, answer: Callable[[Choice], list[int]]) -> None:
        self.n, self._setup, self._answer = setup.replicas, setup, answer
        self.names: list[str] = []
        self._shared = SharedPages(setup.transfer_s) if setup.roles else None

    async def start(self, on_change: Callable[[Iterable[str]], None]) -> None:
        self._on_change = on_change
        for n in range(self.n):  # one after the other, so that numbers are those of the simulator
            self.add(f"r{n}")

    def add(self, name: str) -> None:
        self.names.append(name)
        self._on_change(self.names)

    def remove(self, name: str) -> None:
        self.names.remove(name)
        self._on_change(self.names)

    def client(self, name: str) -> VirtualClient:
        return VirtualClient(self._setup, limits_of(self._setup), self._answer, self._shared)

    async def retire(self, name: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def live_choices(trace: list[TraceItem], setup: Setup, outages: Iterable[Outage] = ()) -> Choices:
    """Those of a live front; the trace begins once all replicas are ready. It loses replicas when ``outages`` were, and
    others are ready when theirs were."""
    return in_virtual_time(lambda loop: _Front(trace, setup, loop, outages).choices())


class _Front:
    def __init__(
        self,
        trace: list[TraceItem],
        setup: Setup,
        loop: VirtualLoop,
        outages: Iterable[Outage],
    ) -> None:
        self._trace, self._setup, self._loop = trace, setup, loop
        self._outages = outages
        self._streams = Streams()
        self._items = {item.id: item for item in trace}
        self._prompts: dict[str, int] = {}
        self._found: dict[str, int] = {}

    async def choices(self) -> Choices:
        source, time = VirtualSource(self._setup, self._answer), self._loop.time
        fleet = FleetEngine(source, policy=self._setup.router, roles=self._setup.roles, clock=time)
        await fleet.start()
        sent, waiting = fleet._placement.sent, fleet._placement.prefills._waiting
        add = sent.add

        def noted(request_id: str, one: Sent) -> None:
            if request_id in waiting:
                self._prompts[waiting[request_id].request.id] = one.member.number
            else:
                self._found[request_id] = one.member.number
            add(request_id, one)

        sent.add = noted  # type: ignore[method-assign]
        began = time()
        firsts = [item for item in self._trace if not item.after]
        losses = [
            asyncio.create_task(self._lose(fleet, source, one, began)) for one in self._outages
        ]
        await asyncio.gather(*(self._client(fleet, item, began + item.at) for item in firsts))
        for each in losses:
            each.cancel()
        await asyncio.gather(*losses, return_exceptions=True)
        await fleet.close()
        return {id: (self._prompts.get(id), number) for id, number in self._found.items()}

    async def _lose(
        self, fleet: FleetEngine, source: VirtualSource, outage: Outage, began: float
    ) -> None:
        """The replica with the most open requests is lost, and another one is ready later."""
        await self._until(began + outage.fault.at)
        member = min(fleet.members, key=lambda one: (-one.n_open, one.number))
        assert member.number == outage.replica, "that is another one"
        assert isinstance(member.client, VirtualClient)
        member.client.hang()
        await self._until(began + outage.noticed_at)
        if outage.fault.kind == DEATH:
            member.client.end()
        await self._until(began + outage.noticed_at + 2 * LOOKS_S)
        assert member.silent or member not in fleet.members, "that was not noticed"
        source.remove(member.name)
        await self._until(began + outage.ready_at)
        source.add(f"{member.name} again")

    async def _until(self, at: float) -> None:
        await asyncio.sleep(at - self._loop.time())

    async def _client(self, fleet: FleetEngine, item: TraceItem, at: float) -> None:
        """Send ``item`` at ``at``, and what follows it."""
        await self._until(at)
        request = request_of(item, self._streams, self._loop.time())
        async for _ in fleet.generate(request):
            pass
        followers = [each for each in self._trace if each.after == item.id]
        now = self._loop.time()
        await asyncio.gather(*(self._client(fleet, each, now + each.at) for each in followers))

    def _answer(self, choice: Choice) -> list[int]:
        if choice.request.exports_kv:
            return [EOS] * (1 + OVERRUN)
        return self._streams.answer(self._items[choice.request.id], choice.index)


class RecordedSimulation(FleetSimulation):
    """Keeps the simulator's choices."""

    def __init__(self, trace: list[TraceItem], setup: Setup) -> None:
        self._prompts: dict[str, int] = {}
        self._answers: dict[str, int] = {}
        super().__init__(trace, setup, limits_of(setup))

    def _submit(self, sent: Any, request: Request, now: float) -> None:
        super()._submit(sent, request, now)
        (self._prompts if sent.is_prefill else self._answers)[sent.item.id] = sent.to.number

    @property
    def choices(self) -> Choices:
        return {id: (self._prompts.get(id), number) for id, number in self._answers.items()}


def simulated_choices(trace: list[TraceItem], setup: Setup) -> Choices:
    """Those of ``jserve simulate --replicas N``."""
    made = RecordedSimulation(trace, setup)
    made.run()
    return made.choices
