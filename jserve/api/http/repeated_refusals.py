"""Repeats a recent refusal for a moment, so that a flood is refused before its bodies are parsed.

A queue without room has none a moment later either, and to ask it again costs the tokens of a prompt, a message to
the engine and one back: most of what a refused request costs. A refusal of the whole server stands for its lane,
one of a tenant's share for that tenant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jserve.errors import JserveError, Overloaded, RateLimited
from jserve.ports import Clock
from jserve.types import Lane

HOLD_S = 0.05
"""Short beside the seconds of work that wait in a full queue, so the engine never runs dry of it; long
beside the time between two requests of a flood."""


class Refusals:
    """The refusals by the engine in the last ``hold_s`` seconds of ``clock``.

    ``on_repeat`` is called for each request that is refused here.
    """

    def __init__(
        self,
        on_repeat: Callable[[], None] = lambda: None,
        *,
        hold_s: float = HOLD_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._on_repeat = on_repeat
        self._hold_s = hold_s
        self._clock = clock
        self._standing: dict[tuple[str, str], tuple[float, JserveError]] = {}

    def check(self, lane: Any, tenant: str) -> None:
        """``lane`` as a body has it: unchecked, None where it names none.

        Raises:
            Overloaded, RateLimited: the engine's recent refusal of this lane or tenant.
        """
        name = Lane.STANDARD if lane is None else lane if isinstance(lane, str) else ""
        for who in (("lane", name), ("tenant", tenant)):
            until, error = self._standing.get(who, (0.0, None))
            if error is None:
                continue
            if self._clock() < until:
                self._on_repeat()
                raise type(error)(error.message, code=error.code, retry_after=error.retry_after)
            self._standing.pop(who, None)  # a thread that reads a large body may have been quicker

    @contextmanager
    def noted(self, lane: str, tenant: str) -> Iterator[None]:
        """A refusal that leaves this block, in which the engine is asked, is recorded."""
        try:
            yield
        except Overloaded as error:
            self._stands("lane", lane, error)
            raise
        except RateLimited as error:
            if tenant:
                self._stands("tenant", tenant, error)
            raise

    def _stands(self, kind: str, name: str, error: JserveError) -> None:
        self._standing[kind, name] = (self._clock() + self._hold_s, error)
