"""Holds requests whose grammar is being compiled, before they enter the scheduler's queue.

What reaches the scheduler can be planned at once, so its decisions stay a function of its inputs.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from concurrent.futures import Future

from jserve.errors import JserveError, RequestFailed
from jserve.ports import Guides
from jserve.types import Finish, Output, Request

LIMIT_S = 60.0
"""A grammar that takes longer to compile ends its request. The front has seen it compile in seconds."""

Opened = tuple[Request, JserveError | None]


class PendingCompile:
    """Requests waiting for grammar compilation: ``put`` adds one, ``take`` yields those that are ready."""

    def __init__(self, guides: Guides | None) -> None:
        self._guides = guides
        self._waiting: dict[str, tuple[Request, Future[None], float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: Request, now: float) -> Opened | None:
        """``request`` if it may go on at once, perhaps to be refused; None when it waits here, from ``now``.

        A second request with the id of one that waits goes on; the scheduler refuses one of them.
        """
        if self._guides is None or not request.params.guided or request.id in self._waiting:
            return request, None
        try:
            future = self._guides.compile(request)
        except Exception as error:  # whatever it is, it is this request's
            return request, _told(error)
        if future is None:
            return request, None
        self._waiting[request.id] = (request, future, now)
        return None

    def take(self, wait_s: float, now: float) -> Iterator[Opened]:
        """Those whose grammar is there, was refused or does not come, waiting ``wait_s`` for a first one."""
        if not self._waiting:
            return
        futures = [future for _, future, _ in self._waiting.values()]
        concurrent.futures.wait(futures, wait_s, return_when=concurrent.futures.FIRST_COMPLETED)
        for key, (request, future, since) in list(self._waiting.items()):
            if future.done():
                del self._waiting[key]
                yield request, _fault(future)
            elif now - since >= LIMIT_S:
                del self._waiting[key]
                future.cancel()
                yield request, RequestFailed(f"its grammar was not compiled within {LIMIT_S:.0f} s")

    def cancel(self, request_id: str, index: int | None) -> list[Output]:
        """Terminal outputs of a request that waits here. One choice alone cannot leave."""
        if index is not None or request_id not in self._waiting:
            return []
        request, future, _ = self._waiting.pop(request_id)
        future.cancel()
        return [
            Output(request_id=request_id, index=i, finish=Finish.ABORT, attempt=request.attempt)
            for i in request.open_choices
        ]


def _fault(future: Future[None]) -> JserveError | None:
    error = future.exception()
    return None if error is None else _told(error)


def _told(error: BaseException) -> JserveError:
    if isinstance(error, JserveError):
        return error
    return RequestFailed(f"the grammar's compilation failed with {type(error).__name__}")
