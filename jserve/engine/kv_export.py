"""Has KV pages written that other engines are to read, and keeps back the end of a request until its pages are there.

::

    commit k    full pages that it published, of requests that export --> the disk tier writes them, beside step k + 1
    an end      waits for the writes that were begun before it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jserve.ports import DiskTier
from jserve.types import Output, Request


class KVExports:
    """The requests of one engine whose prompts are computed for others."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._requests: set[str] = set()
        self._asked = 0
        self._ends: deque[tuple[int, Output]] = deque()
        """The call of ``DiskTier.export`` that each waits for, and the end."""

    def __len__(self) -> int:
        """The ends that are kept back."""
        return len(self._ends)

    def add(self, request: Request) -> None:
        self._requests.add(request.id)

    def committed(self, pages: list[tuple[int, bytes]], outputs: list[Output]) -> list[Output]:
        """``outputs`` of a step without the ends that wait for ``pages``, which it published, or for others."""
        if pages:
            self._asked = self._disk.export(pages)
        if not self._requests:
            return outputs
        told: list[Output] = []
        for out in outputs:
            if out.finish is not None and out.request_id in self._requests:
                self._ends.append((self._asked, out))
            else:
                told.append(out)
        return told

    def written(self) -> list[Output]:
        """The ends whose pages are there."""
        n, ended = self._disk.exported() if self._ends else 0, []
        while self._ends and self._ends[0][0] <= n:
            ended.append(self._ends.popleft()[1])
        self.over(out.request_id for out in ended)
        return ended

    def over(self, ids: Iterable[str]) -> None:
        """Nobody waits for the pages of these requests."""
        self._requests.difference_update(ids)
