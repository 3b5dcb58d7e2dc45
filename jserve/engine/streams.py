"""Outputs on their way from the engine to one consumer: one ``Stream`` per running request.

Owns the rule that every choice of a request gets exactly one terminal output, and the account of
how far a consumer lags behind. Must not know who fills a stream. Used on one event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque

from jserve.ports import Clock
from jserve.types import Finish, Output, Request


class Stream:
    """The outputs of ``request`` that its consumer has not taken yet.

    Args:
        max_buffered: tokens the consumer may lag behind before ``lag_s`` starts to count.

    Attributes:
        open: choices without a terminal output.
        n_buffered: tokens put and not yet taken.
    """

    def __init__(self, request: Request, *, max_buffered: int, clock: Clock) -> None:
        self.request = request
        self.open = set(range(request.params.n))
        self.n_buffered = 0
        self._max_buffered = max_buffered
        self._clock = clock
        self._outputs: deque[Output] = deque()
        self._over_since: float | None = None
        self._arrived = asyncio.Event()

    @property
    def lag_s(self) -> float:
        """Seconds for which more than ``max_buffered`` tokens have been waiting."""
        return 0.0 if self._over_since is None else self._clock() - self._over_since

    def put(self, output: Output) -> bool:
        """Queue an output. False, and nothing done, when its choice has ended or never was."""
        if output.index not in self.open:
            return False
        if output.finish is not None:
            self.open.discard(output.index)
        self._outputs.append(output)
        self.n_buffered += len(output.token_ids)
        if self.n_buffered > self._max_buffered and self._over_since is None:
            self._over_since = self._clock()
        self._arrived.set()
        return True

    async def get(self) -> Output | None:
        """The next output, waiting for it; None when all choices have ended and all was taken."""
        while not self._outputs:
            if not self.open:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        self.n_buffered -= len(output.token_ids)
        if self.n_buffered <= self._max_buffered:
            self._over_since = None
        return output

    def end(
        self,
        finish: Finish,
        message: str | None = None,
        code: str | None = None,
        *,
        index: int | None = None,
    ) -> bool:
        """Put the terminal output of all open choices, or of choice ``index``; False if none was
        open."""
        ended = sorted(self.open if index is None else self.open & {index})
        for i in ended:
            self.put(
                Output(
                    request_id=self.request.id,
                    index=i,
                    finish=finish,
                    error=message,
                    error_code=code,
                )
            )
        return bool(ended)
