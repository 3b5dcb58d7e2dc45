"""Writes server-sent events: framing, headers, keep-alive comments, errors.

A stream that goes wrong ends with an error event and without the closing mark, so that no client takes it for a
whole answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from aiohttp import web

from jserve.faults import point

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"


class EventStream:
    """An open event stream. Use ``async with await EventStream.open(...)``.

    Args:
        request: the request to answer.
        keep_alive_s: a comment is sent after so many idle seconds; 0 is off.
        named: events get names, their ``type``.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        keep_alive_s: float,
        named: bool = False,
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._frame = _named if named else _plain
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        self._written_at = self._loop.time()
        self._pinger: asyncio.Task[None] | None = None
        self._remarked = False

    async def open(self, headers: Mapping[str, str]) -> EventStream:
        """Sends status 200 and the headers."""
        self.response.headers.update(headers)
        await self.response.prepare(self._request)
        if self._keep_alive_s > 0:
            self._pinger = asyncio.create_task(self._ping())
        return self

    async def send(self, events: Iterable[Any]) -> None:
        """Writes JSON events in one go.

        Raises:
            ConnectionError: the client is gone, or was hung up on.
        """
        data = self._framed(events)
        if data:
            await self._write(data)

    async def remark_once(self, names: Mapping[str, str]) -> None:
        """Writes what would have been headers, had it been known, as comments; the first call alone.

        Raises:
            ConnectionError: the client is gone, or was hung up on.
        """
        if not self._remarked:
            self._remarked = True
            lines = [f": {name}: {value}\n" for name, value in names.items()]
            await self._write("".join([*lines, "\n"]).encode())

    async def finish(self, events: Iterable[Any], done: str | None) -> web.StreamResponse:
        """The end of a good stream: the last ``events`` and the mark ``done``, if the dialect has one.

        They leave together with the end of the body: clients close the connection when they see the mark, and
        a stream that was delivered whole must not count as one whose client left.
        """
        mark = b"" if done is None else b"data: " + done.encode() + b"\n\n"
        await self._write_last(self._framed(events) + mark)
        return self.response

    async def fail(self, events: Iterable[Any]) -> web.StreamResponse:
        """The end of a broken stream: the events that say so, and no closing mark.

        The connection stays open: to close one whose headers promised otherwise would make the
        client's next request on it fail.
        """
        with contextlib.suppress(ConnectionError):
            await self.send(events)
            await self.response.write_eof()
        return self.response

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pinger is not None:
            self._pinger.cancel()

    def _framed(self, events: Iterable[Any]) -> bytes:
        return b"".join(self._frame(event) for event in events)

    @point("sse.write", ConnectionResetError)
    async def _write(self, data: bytes) -> None:
        self._written_at = self._loop.time()
        await self.response.write(data)

    @point("sse.end", ConnectionResetError)
    async def _write_last(self, data: bytes) -> None:
        await self.response.write_eof(data)

    async def _ping(self) -> None:
        while True:
            due = self._written_at + self._keep_alive_s
            now = self._loop.time()
            if now < due:
                await asyncio.sleep(due - now)
                continue
            if self._request.protocol.writing_paused:  # the reader has enough to read
                self._written_at = now
                continue
            try:
                await self._write(KEEP_ALIVE)
            except ConnectionError:
                return


def _plain(event: Any) -> bytes:
    return b"data: " + orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


def _named(event: Any) -> bytes:
    return b"event: " + event["type"].encode() + b"\n" + _plain(event)
