"""Replicas with a fake device: the engine that they build, and a source that keeps them in threads of this process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jserve.config import EngineConfig
from jserve.engine.client import OnMessage
from jserve.engine.engine import Engine
from jserve.errors import WeightsError
from jserve.fleet.host import EngineHost
from jserve.fleet.link import FrontClient
from jserve.ports import InFlight, RunnerLimits
from jserve.runner.disk import DiskStore
from jserve.runner.kv_transfer import KVTransferClients, KVTransferServer
from jserve.runner.spill import Spill
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner, HostCopy
from jserve.types import PageFetch, StepResult
from tests.engine.test_operate import WeighedRunner
from tests.grammar import kit

LIMITS = kit.limits(
    n_slots=16,
    max_rows=16,
    max_decode_rows=16,
    max_prefill_tokens=64,
    page_size=16,
    max_model_len=512,
    features={"echo": lambda asked: None},
)
OPTIONS = {"max_num_seqs": 16, "max_num_batched_tokens": 80}
STEP_S = 0.004


class SlowRunner(FakeRunner):
    """A step takes ``STEP_S``, and as many times that as ``slow`` says: a number, or a file that holds
    one. What it took is what the device is said to have taken."""

    slow: float | Path = 1.0

    def collect(self, flight: InFlight) -> StepResult:
        slow = self.slow
        if isinstance(slow, Path):
            slow = float(slow.read_text() or 1) if slow.exists() else 1.0
        time.sleep(STEP_S * slow)
        result = super().collect(flight)
        return dataclasses.replace(result, device_us=STEP_S * slow * 1e6)


class SharedPagesRunner(SlowRunner):
    """Hands pages over to others as a runner with a disk tier does: through files, or with ``key``, whose owners have
    directories of their own, over TCP."""

    made: ClassVar[list[SharedPagesRunner]] = []
    """Those of this process, youngest last."""
    reached_at: ClassVar[Callable[[str], str]] = staticmethod(lambda address: address)
    """The address at which others reach that of a server."""

    def __init__(self, limits: RunnerLimits, directory: Path, key: str = "") -> None:
        super().__init__(limits)
        directory = directory / uuid.uuid4().hex if key else directory
        Z = limits.page_size
        self._kinds = [(np.int64, Z), (np.uint64, Z), (np.bool_, Z), (np.bool_, Z)]
        n = sum(np.dtype(kind).itemsize * n for kind, n in self._kinds)
        store = DiskStore(directory, "fake", page_bytes=n, max_bytes=1 << 20)
        server = KVTransferServer(("127.0.0.1", 0), store, key) if key else None
        self.spill = Spill(store, server, KVTransferClients(store, key) if key else None)
        self.kv_transfer_address = self.reached_at(server.address) if server is not None else None
        self.made.append(self)

    def stored(self) -> list[bytes]:
        return self.spill.store.digests()

    def fetch(self, asked: list[PageFetch]) -> None:
        for fetch in asked:
            self.spill.read(fetch)

    def take_fetched(self) -> list[tuple[int, bool]]:
        answers = []
        for fetch, data in self.spill.answers():
            if data is not None:
                self.host[fetch.host] = self._arrays(data)
            answers.append((fetch.ticket, data is not None))
        return answers

    def _arrays(self, data: bytes) -> HostCopy:
        found, at = [], 0
        for kind, n in self._kinds:
            found.append(np.frombuffer(data, kind, n, at).copy())
            at += found[-1].nbytes
        return tuple(found)

    def export(self, pages: list[tuple[int, bytes]]) -> int:
        arrays = (self.token_PZ, self.ctx_PZ, self.poison_PZ, self.shown_PZ)
        copies = [(digest, b"".join(a[page].tobytes() for a in arrays)) for page, digest in pages]
        return self.spill.export(lambda: copies)

    def exported(self) -> int:
        return self.spill.n_exported

    def page_s(self) -> float:
        return self.spill.page_s

    def flush(self, pages: list[tuple[int, bytes]]) -> None:
        self.spill.close()


def build(config: EngineConfig, progress: Any) -> tuple[Engine, dict[str, Any]]:
    """The engine of the drills. ``config.model.model`` is a directory of orders: the file ``slow.PID`` holds how
    many times slower the steps of process PID are. With ``disk_dir`` it hands pages over, with ``kv_transfer_key`` over
    TCP."""
    limits, pages, facts = LIMITS, config.cache.disk_dir, {}
    runner = SlowRunner(limits)
    if pages:
        limits = dataclasses.replace(LIMITS, n_host_pages=64, page_move_s=1e-5)
        runner = SharedPagesRunner(limits, Path(pages), config.cache.kv_transfer_key)
        facts = {"kv_transfer_address": runner.kv_transfer_address}
    orders = config.model.model
    if orders:
        runner.slow = Path(orders) / f"slow.{os.getpid()}"
    engine = Engine(Scheduler(limits, config, guides=kit.guides()), runner, weights="w1")
    return engine, facts | {
        "weights": engine.weights,
        "max_model_len": 512,
        "vocab_size": kit.VOCAB,
        "max_num_seqs": 16,
    }


class DirectoryRunner(WeighedRunner):
    """Its weights are the number in the file ``weights`` of a directory; one without is refused, in time that
    depends on the directory's file ``seconds``. Those with a file ``slow`` take so many times as long for a step, those
    with ``broken`` cannot be computed with. Where the file ``faulty`` is there it
    computes with others than it says."""

    slow = 1.0
    faulty: Path | None = None

    made: ClassVar[list[DirectoryRunner]] = []
    """Those of ``weighed``, youngest last."""

    def collect(self, flight: InFlight) -> StepResult:
        time.sleep(STEP_S * self.slow)
        if self.faulty is not None and self.faulty.exists():
            self.weights = 99
        return super().collect(flight)

    def update_weights(
        self, source: str, *, partial: bool, donate: bool, alias: bool, beside: bool = False
    ) -> str:
        wait = Path(source) / "seconds"
        time.sleep(float(wait.read_text()) if wait.exists() else 0.0)
        if not (Path(source) / "weights").exists():
            raise WeightsError(f"{source}: no weights", field=source)
        super().update_weights(stated(source), partial=partial, donate=donate, alias=alias)
        slow = Path(source) / "slow"
        self.slow = float(slow.read_text()) if slow.exists() else 1.0
        self.gone = "its file is damaged" if (Path(source) / "broken").exists() else ""
        return f"w{self.weights}"


def stated(directory: str | Path) -> int:
    return int((Path(directory) / "weights").read_text())


def weighed(config: EngineConfig, progress: Any) -> tuple[Engine, dict[str, Any]]:
    """An engine whose draws are a function of its weights, which are those of ``config.model.model``. The file
    ``faulty.PID`` there has process PID compute with others."""
    runner = DirectoryRunner(LIMITS)
    runner.weights = stated(config.model.model)
    runner.faulty = Path(config.model.model) / f"faulty.{os.getpid()}"
    DirectoryRunner.made.append(runner)
    scheduler = Scheduler(LIMITS, config, guides=kit.guides())
    engine = Engine(scheduler, runner, weights=f"w{runner.weights}")
    facts = {"max_model_len": 512, "vocab_size": kit.VOCAB, "max_num_seqs": 16}
    return engine, {"weights": engine.weights, **facts}


class HostClient(FrontClient):
    """A client of a host in this process. While its source holds it, both wait for what the other one says."""

    def __init__(self, source: ThreadSource, name: str) -> None:
        super().__init__(partial(source.hosts[name].endpoint, name))
        self.name, self.held = name, name in source.held
        self._unsent: list[bytes] = []
        self._unheard: list[tuple[bytes, OnMessage]] = []

    def cut(self) -> None:
        """The connection breaks; the engine lives."""
        assert self._task is not None
        self._task.cancel()

    def go_on(self) -> None:
        """What waited comes now."""
        self.held = False
        for frame in self._unsent:
            self._post(frame)
        for payload, on_message in self._unheard:
            self._take(payload, on_message)
        self._unsent, self._unheard = [], []

    def _post(self, frame: bytes) -> None:
        if self.held:
            self._unsent.append(frame)
        else:
            super()._post(frame)

    def _take(self, payload: bytes, on_message: OnMessage) -> None:
        if self.held:
            self._unheard.append((payload, on_message))
        else:
            super()._take(payload, on_message)


class ThreadSource:
    """A ``ReplicaSource`` of ``n`` hosts in this process."""

    def __init__(self, n: int, build: str = "tests.fleet.fakes:build", **options: Any) -> None:
        self.n, self._build = n, build
        self._config = EngineConfig.of(**OPTIONS | options).flat()
        self.hosts: dict[str, EngineHost] = {}
        self._all: list[EngineHost] = []
        self.clients: dict[str, HostClient] = {}
        self.held: set[str] = set()
        self.scales = False
        self.retired: list[str] = []

    async def start(self, on_change: Any) -> None:
        self._on_change = on_change
        for _ in range(self.n):
            await self.add()

    async def add(self) -> str:
        """One more replica; its name."""
        name = f"r{len(self._all)}"
        self.hosts[name] = await asyncio.to_thread(
            EngineHost, self._config, self._build, end=lambda code: None
        )
        self._all.append(self.hosts[name])
        self._on_change(self.hosts)
        return name

    async def retire(self, name: str) -> None:
        self.retired.append(name)
        await self.remove(name)

    async def remove(self, name: str) -> None:
        """``name`` is stopped, as by a scale-down."""
        host = self.hosts.pop(name)
        self._on_change(self.hosts)
        await asyncio.to_thread(host._client.close)

    def kill(self, name: str) -> None:
        """``name`` ends without a word; another takes its place when ``add`` is called."""
        host = self.hosts.pop(name)
        host._client.kill()
        self.clients[name].cut()

    def hold(self, name: str, stopped: bool) -> None:
        """``name`` is stopped, or goes on."""
        (self.held.add if stopped else self.held.discard)(name)
        if stopped:
            self.clients[name].held = True
        else:
            self.clients[name].go_on()

    def client(self, name: str) -> HostClient:
        made = self.clients[name] = HostClient(self, name)
        return made

    async def close(self) -> None:
        for host in self._all:
            await asyncio.to_thread(host._client.close)
