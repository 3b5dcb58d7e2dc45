"""The operations that an operator or a trainer may do to an engine from Python, the same for ``LLM`` and ``AsyncLLM``.

It owns ``Operations`` and the facts they answer with. With ``AsyncLLM`` each of them is awaited.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jserve.engine.wire import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine's state after an operation."""

    version: str
    """Of the weights in use; "0": those that it started with."""
    paused: bool
    asleep: tuple[str, ...]
    """Of "kv" and "weights", what is on no device."""
    held: int
    """Requests that wait because of either."""
    ending: int = 0
    """Sequences that end under the weights of before (``running="beside"``)."""
    seconds: float = 0.0
    """The time that new weights took, once all that was in flight had landed."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> EngineState:
        known: dict[str, Any] = {f.name: info[f.name] for f in fields(cls) if f.name in info}
        known["asleep"] = tuple(info["asleep"])
        return cls(**known)


def control_of(command: Mapping[str, Any]) -> Control:
    """The message of a command."""
    return Control(id=uuid.uuid4().hex, **command)


class Operations(ABC):
    """Pause, sleep, other weights."""

    @abstractmethod
    def _operate(self, **command: Any) -> Any:
        """Carry out a ``Control`` of these fields: the ``EngineState`` after it, or an awaitable of it."""

    def update_weights(
        self,
        source: Any,
        *,
        version: str = "",
        running: str = "recompute",
        partial: bool = False,
        donate: bool = False,
        alias: bool = False,
        canary: float = 0.0,
        analysis: Mapping[str, float] | None = None,
    ) -> Any:
        """Copy other weights over those in use, between two steps: all of them or, if it raises, none. Nothing
        compiles.

        The arrays are only read: but for ``alias``, a trainer may donate or delete them as soon as this returns.

        Args:
            source: the tree that ``params=`` takes, of numpy or jax arrays in any floating dtype and on any devices;
                or a mapping or an iterable of (checkpoint name, array), read as it comes; or a directory of
                safetensors or Orbax; or an ``AdapterDelta``, which is added to the weights in use. Leaves of the
                engine's own shape and sharding, in its dtype or float32, are copied on the device; others go through
                host memory.
            version: their name in outputs (``CompletionOutput.weight_versions``); by default the number of the update.
            running: what becomes of running requests: "recompute" (their KV anew), "mix" (they go on with the KV of
                the old weights), "finish" (they end first, under the old ones), "beside" (they end under the old
                ones, which stay in memory so long, while new ones run under the new ones, step by step in turns),
                "abort".
            partial: parameters that ``source`` lacks keep their values.
            donate: delete the jax arrays of a tree afterwards.
            alias: use the jax arrays of a tree themselves, which must have the engine's dtype and shardings: no copy is
                made, and no second one kept. Where their owner deletes or donates one of them, requests end with
                ``weights_error`` until there are other weights.
            canary: with replicas, the share of new requests that are answered by a few replicas with the new
                weights until the same update comes without it, or ``rollback_weights``. Replicas take ``source`` one
                after the other; what is no directory is written to one first, below ``TMPDIR``, which all of them
                have to see, and stays there while it may be needed.
            analysis: bounds by which a canary is promoted or rolled back without being asked, by what is measured
                (``fleet.canary.Analysis``; ``{}`` has its defaults).

        Raises:
            WeightsError: a leaf is missing, unknown, deleted or of another shape or kind; ``field`` is
                ``params.<path>``. With "beside", a drafter or moving experts, or no room for a second copy: ``field``
                is ``running``. The old weights stay, and requests go on.
            BadRequest: ``running`` is none of these; the weights are asleep; requests still end under the weights
                of before.
        """
        return self._operate(
            action="update_weights",
            source=source,
            version=version,
            running=running,
            partial=partial,
            donate=donate,
            alias=alias,
            canary=canary,
            analysis=None if analysis is None else dict(analysis),
        )

    def rollback_weights(self) -> Any:
        """With replicas: give those of a canary, or else all, the weights of before the last update. Raises BadRequest
        where there are none."""
        return self._operate(action="rollback_weights")

    def pause(self, running: str = "abort") -> Any:
        """Take no new request until ``resume``; those that come wait.

        Args:
            running: what becomes of running requests: "abort" (they end with what they drew), "finish" (this waits
                until they have ended), "keep" (they stand still).
        """
        return self._operate(action="pause", running=running)

    def resume(self) -> Any:
        """End ``pause``. Raises BadRequest while something is asleep."""
        return self._operate(action="resume")

    def sleep(self, parts: Sequence[str] = ("kv", "weights"), running: str = "keep") -> Any:
        """Give device memory back until ``wake``: KV is dropped, weights go to host memory. New requests wait.

        Args:
            running: what becomes of running requests: "keep" (they are computed anew after ``wake``), "abort" (they end
                with what they drew), "finish" (this waits until they have ended).
        """
        return self._operate(action="sleep", parts=list(parts), running=running)

    def wake(self, parts: Sequence[str] = ("kv", "weights")) -> Any:
        """Take the memory of ``parts`` again."""
        return self._operate(action="wake", parts=list(parts))

    def state(self) -> Any:
        """The ``EngineState`` now."""
        return self._operate(action="weight_info")
