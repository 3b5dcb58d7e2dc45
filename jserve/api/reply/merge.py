"""Merges several async streams into one, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
BUFFER = 64

_END: Any = object()


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources in order of arrival; the first error ends it."""
    queue: asyncio.Queue[Any] = asyncio.Queue(BUFFER)

    async def pump(source: AsyncGenerator[T, None]) -> None:
        last: Any = _END
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put(item)
        except Exception as e:
            last = e
        await queue.put(last)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is _END:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
