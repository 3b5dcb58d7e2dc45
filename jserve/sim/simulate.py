"""Simulates the engine: its real loop, scheduler and page cache on a trace and a simulated device.

Its clients are ``sim.clients``; several engines may serve them (``sim.fleet``).

The clock jumps to the next arrival while the engine is idle; otherwise launches and collects move
it (``sim.device``), and arrivals are read at the start of a step, as they are live::

    heap     (at, arrival | cancel) ...      next turns and retries are pushed as answers come
    loop     due events -> engine inbox -> Engine.step() -> outputs -> records

Static batching, for comparison only: a gate before the same scheduler lets nobody in until all who
run are done, and then as many as may run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import JserveError
from jserve.fleet.shared_pages import HOST_GB
from jserve.ports import Clock, Journal, RunnerLimits
from jserve.sched.scheduler import Scheduler
from jserve.sched.stats import SchedStats
from jserve.sim.clients import Clients
from jserve.sim.costs import MAX_PREFILL_ROWS, Device, ladder
from jserve.sim.device import SimClock, SimRunner
from jserve.sim.faults import Outage, ReplicaFault, check_faults
from jserve.sim.pages import SharedPages
from jserve.sim.records import Done, Record, Records
from jserve.sim.trace import EOS, OVERRUN, VOCAB, TraceItem
from jserve.types import Choice, Output

IDLE_S = 0.01
"""The seconds by which the clock moves when work waits for nothing but time."""
MAX_IDLE = 100_000


class Stuck(JserveError):
    """Work is left and neither time nor traffic moves it: a fault of the scheduler."""

    code = "simulation_stuck"


class Watch(Protocol):
    """Sees what clients see, and may end a simulation whose outcome is certain."""

    @property
    def enough(self) -> bool:
        """True: the simulation ends where it is."""
        ...

    def token(self, record: Record) -> None:
        """Tokens of a request came."""
        ...

    def end(self, done: Done) -> None:
        """A request is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A simulation's settings, besides the traffic."""

    config: EngineConfig
    device: Device
    seed: int = 0
    jitter: float = 0.0
    """Sigma of a log-normal factor on every step's time."""
    load: float = 1.0
    """Arrivals come this many times as fast; think times stay."""
    batching: str = "continuous"
    """Or ``static``."""
    deadlines: bool = True
    """False hides the deadlines from the scheduler; goodput is judged by them all the same."""
    retries: int = 0
    """The number of times that a refused client sends again, after the stated or doubling seconds."""
    sample_s: float = 0.25
    replicas: int = 1
    """Engines of this kind, see ``sim.fleet``."""
    max_replicas: int = 0
    """Most of them, where the load says how many."""
    start_s: float = 60.0
    """Seconds until one that is started is ready."""
    router: str = "seconds"
    """Chooses between them, one of ``fleet.router.POLICIES``."""
    roles: dict[str, int] = field(default_factory=dict)
    """Of ``fleet.roles.parse_roles``."""
    auto_roles: bool = False
    """They follow the load."""
    transfer_gb_s: float = 0.0
    """GB/s at which replicas with roles write pages for others, or read them; 0: as they copy them to host memory."""
    faults: tuple[ReplicaFault, ...] = ()
    """Replicas that are lost."""
    journal: Journal | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        """Gives options that are left to the device a CPU's values.

        Raises:
            ConfigError: ``faults`` that the other fields exclude.
        """
        check_faults(self.faults, max(self.replicas, self.max_replicas), self.batching)
        config = self.config.on("cpu")
        object.__setattr__(self, "config", with_host_memory(config) if self.roles else config)

    @property
    def transfer_s(self) -> float:
        """Seconds to write a page for other replicas, or to read it."""
        if not self.transfer_gb_s:
            return self.device.move_s
        return self.device.page_bytes / (self.transfer_gb_s * 1e9)


def with_host_memory(config: EngineConfig) -> EngineConfig:
    """``config`` with the host memory that pages of replicas with roles travel through."""
    if config.cache.host_memory_gb:
        return config
    return dataclasses.replace(
        config, cache=dataclasses.replace(config.cache, host_memory_gb=HOST_GB)
    )


@dataclass(slots=True, kw_only=True)
class Run:
    """The results of a simulation."""

    records: Records
    stats: SchedStats
    n_evicted: int
    n_steps: int
    n_tokens: int
    """Tokens computed, over-run and recomputed ones included."""
    busy_s: float
    began: float
    ended: float
    counters: dict[str, float] = field(default_factory=dict)
    """``Scheduler.counters`` at the end."""
    moved_s: float = 0.0
    """Of ``busy_s``, what pages took between device and host memory."""
    samples: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    """(time, waiting, running, pages free, pages cached and unused)."""
    by_replica: list[int] = field(default_factory=list)
    """Tokens computed by each engine, where there are several."""
    replica_s: float = 0.0
    """Seconds for which they ran, all together."""
    n_remote: int | None = None
    """Prompts that a prefill replica computed for others; None: there are no roles."""
    role_changes: list[tuple[float, int, str]] | None = None
    """(time, replica, its role from then on); None: roles are fixed."""
    outages: list[Outage] = field(default_factory=list)
    """Replicas that were lost."""
    n_remote_failed: int = 0
    """Prompts whose prefill replica was lost before it had handed them over."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def limits_of(setup: Setup) -> RunnerLimits:
    """The limits that ``jserve.runner`` would have on this device with this config."""
    options, device = setup.config.scheduler, setup.device
    n, budget = options.max_num_seqs, options.max_num_batched_tokens
    length = setup.config.model.max_model_len or device.max_model_len
    return RunnerLimits(
        n_slots=n,
        max_rows=n,
        max_decode_rows=n,
        max_prefill_tokens=budget,
        max_prefill_rows=max(1, min(MAX_PREFILL_ROWS, n, budget)),
        max_drafts=0,
        n_pages=device.n_pages,
        page_size=setup.config.cache.page_size,
        max_model_len=length,
        vocab_size=VOCAB,
        window=device.window,
        reaches=device.reaches,
        sinks=setup.config.device.attention_sinks if device.window else 0,
        n_vocab_rows=options.n_vocab_rows(penalises=False),
        n_host_pages=device.n_host_pages(setup.config.cache.host_memory_gb),
        page_move_s=device.move_s,
        step_times=ladder(device.costs, rows=n, tokens=budget, context=length),
    )


def simulate(trace: Seq[TraceItem], setup: Setup, limits: RunnerLimits | None = None) -> Run:
    """Serve ``trace`` to its end.

    Raises:
        ConfigError: the device has no price for a step.
        Stuck: the scheduler leaves work behind.
    """
    simulation = Simulation(
        setup, limits or limits_of(setup), Clients(trace, setup), clock=SimClock()
    )
    with no_gc():
        return simulation.run()


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Nothing here is cyclic, and looking through millions of tokens for cycles takes half the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Simulation:
    """One engine, and the clients of a trace.

    Args:
        clients: who sends, perhaps to other engines too.
        clock: simulated time; moved by the runner and, between steps, by this loop.
        readings: what the scheduler gets instead, if not ``clock``.
        claims: step times that results claim instead of the device's; see ``SimRunner``.
        shared: pages that other engines read and write too.
    """

    def __init__(
        self,
        setup: Setup,
        limits: RunnerLimits,
        clients: Clients,
        *,
        clock: SimClock,
        readings: Clock | None = None,
        claims: Mapping[int, float] | None = None,
        shared: SharedPages | None = None,
    ) -> None:
        self.setup, self.clock, self.clients = setup, clock, clients
        self.runner = SimRunner(
            limits,
            setup.device.costs,
            clock,
            self._answer,
            host_s=setup.device.host_s,
            move_s=setup.device.move_s,
            jitter=setup.jitter,
            seed=setup.seed,
            claims=claims,
            shared=shared,
        )
        self.scheduler = Scheduler(limits, setup.config, journal=setup.journal)
        overlap = setup.config.scheduler.overlap
        self.engine = Engine(self.scheduler, self.runner, overlap=overlap, clock=readings or clock)
        self.samples: list[tuple[float, int, int, int, int]] = []
        self._next_sample, self._idle = 0.0, 0
        self._gate: deque[TraceItem] = deque()
        self.began = clients.next_at or 0.0
        clock.now = self.began

    def run(self) -> Run:
        """Until all is served, or who watches has seen enough."""
        while True:
            if self.clients.enough:
                return self.result()
            self.deliver(self.clock.now)
            next_at = self.clients.next_at
            if self.engine.busy:
                self.advance()
            elif next_at is not None:
                self.clock.now = max(self.clock.now, next_at)
            elif not self._gate:
                return self.result()

    def advance(self) -> None:
        """One step of the engine, whose clients get what it told."""
        self.clients.receive(self.step(), self.clock.now)

    def step(self) -> list[Output]:
        """One step of the engine: what it told, which no client has yet; time passes where nothing moves."""
        engine = self.engine
        before = (engine.n_steps, engine.n_in_flight)
        outputs = engine.step()
        moved = outputs or before != (engine.n_steps, engine.n_in_flight)
        self._idle = 0 if moved else self._wait()
        return outputs

    def result(self) -> Run:
        return Run(
            records=self.clients.records,
            stats=self.scheduler.stats(),
            n_evicted=self.scheduler.n_evicted,
            n_steps=self.engine.n_steps,
            n_tokens=self.runner.n_tokens,
            busy_s=self.runner.busy_s,
            counters=self.scheduler.counters(),
            moved_s=self.runner.n_moves * self.runner.move_s,
            began=self.began,
            ended=self.clock.now,
            samples=self.samples,
        )

    def deliver(self, now: float) -> None:
        """Hand in what is due by ``now``; look around at times."""
        for at, item, index, hangs_up in self.clients.due(now):
            if hangs_up:
                self.engine.cancel(item.id, index)
            elif self.setup.batching == "static":
                self._gate.append(item)
                self.clients.records.sent(item, at)
            else:
                self.send(item, at)
        if self._gate and not self.engine.busy:
            for _ in range(min(len(self._gate), self.setup.config.scheduler.max_num_seqs)):
                item = self._gate.popleft()
                self.send(item, self.clients.records.open[item.id].at)
        if now >= self._next_sample:
            self.samples.append((now, *self.seen()))
            self._next_sample = now + self.setup.sample_s

    def send(self, item: TraceItem, at: float) -> None:
        """Hand one request to the engine; ``at`` is when its client sent it."""
        self.engine.submit(self.clients.sent(item, at))

    def seen(self) -> tuple[int, int, int, int]:
        """(waiting, running, pages free, pages cached and unused)."""
        stats = self.scheduler.stats()
        waiting = stats.waiting + stats.preempted + len(self._gate)
        return waiting, stats.running, stats.pages_free, stats.pages_cached

    def _answer(self, choice: Choice) -> list[int]:
        if choice.request.exports_kv:  # what a prefill draws is thrown away
            return [EOS] * (1 + OVERRUN)
        record = self.clients.records.open[choice.request.id]
        group = self.scheduler.groups[choice.request.id]
        record.seq = next(seq for seq in group if seq.index == choice.index)
        return self.clients.streams.answer(record.item, choice.index)

    def _wait(self) -> int:
        if self._idle > MAX_IDLE:
            raise Stuck(f"work is left at {self.clock.now:.3f} s and nothing moves it")
        wait_s = min(IDLE_S, self.engine.blocked_wait_s)
        soon, next_at = self.clock.now + wait_s, self.clients.next_at
        self.clock.now = soon if next_at is None else min(soon, max(next_at, self.clock.now))
        return self._idle + 1
