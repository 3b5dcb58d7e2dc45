"""The contract with whoever places replicas and keeps them alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from jserve.engine.client import EngineClient

OnChange = Callable[[Iterable[str]], None]
"""Called on the event loop with the names of all replicas that run now; one that is being stopped is left out."""


class ReplicaSource(Protocol):
    """Starts replicas, starts others where they end, and says which there are."""

    @property
    def n(self) -> int:
        """Replicas that are wanted at least."""
        ...

    @property
    def scales(self) -> bool:
        """It starts more where the load needs them; those above ``n`` may be retired."""
        ...

    async def start(self, on_change: OnChange) -> None:
        """Start as many as are wanted and wait until they run.

        Raises:
            ConfigError: an option cannot be honoured.
            EngineDead: they did not start.
        """
        ...

    def client(self, name: str) -> EngineClient:
        """A fresh, unstarted client of the engine of replica ``name``."""
        ...

    async def retire(self, name: str) -> None:
        """Stop replica ``name`` and start none in its place.

        Raises:
            EngineDead: it does not answer.
        """
        ...

    async def close(self) -> None:
        """End what ``start`` started. Idempotent."""
        ...
