"""Replicas as plain processes, which a test may kill by their number: no Ray, the shipped engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from jserve.config import EngineConfig
from jserve.engine.client import ProcClient

ENGINE = """
import sys
from jserve.engine.process import main
from jserve.fleet.host import described
sys.exit(main(int(sys.argv[1]), described("jserve.build:engine")))
"""


class ProcessSource:
    """A ``ReplicaSource`` of ``n`` engines in processes of their own. One that ends is started again by whoever asks
    for its client, as one of Serve's is by Serve."""

    scales = False

    def __init__(self, n: int, config: EngineConfig) -> None:
        self.n, self._config = n, config

    async def start(self, on_change: Callable[[Iterable[str]], None]) -> None:
        on_change([f"r{i}" for i in range(self.n)])

    def client(self, name: str) -> ProcClient:
        return ProcClient(self._config, command=lambda fd: [sys.executable, "-c", ENGINE, str(fd)])

    async def retire(self, name: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Clients are closed by the fleet."""


def pid_of(member: Any) -> int:
    return member.info["pid"]
