"""The load generator: one workload against one OpenAI-style server, every chunk timed.

It owns the wire (``POST /v1/completions``, streaming, one connection per request) and the pacing. Never believes a
stream that ended without ``[DONE]``, an error event or a bad status.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.stats import Trace
from bench.workloads import Item, Workload

MAX_LINE = 1 << 20


class StreamError(Exception):
    """The server broke the stream; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that answers. ``url`` without the path, e.g. ``http://127.0.0.1:8000``."""

    url: str
    model: str
    timeout_s: float = 600.0
    """Longest time one request may take."""


def body(item: Item, model: str) -> dict[str, Any]:
    """The request every engine gets: greedy, exactly ``max_tokens`` tokens, usage at the end."""
    return {
        "model": model,
        "prompt": list(item.prompt),
        "max_tokens": item.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def sse_data(content: aiohttp.StreamReader) -> AsyncIterator[tuple[float, str]]:
    """(arrival time, payload) of each server-sent event, until ``[DONE]``; comments are skipped.

    Raises:
        StreamError: the stream ends before ``[DONE]`` or a line is over 1 MiB.
    """
    rest = b""
    async for block in content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > MAX_LINE:
            raise StreamError("a line over 1 MiB")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip().decode()
            if payload == "[DONE]":
                return
            yield now, payload
    raise StreamError("stream ended before [DONE]")


def take(trace: Trace, now: float, payload: str) -> None:
    """Add one event to a trace.

    Raises:
        StreamError: an error event, or JSON that is no completion chunk.
    """
    try:
        event = json.loads(payload)
        error = event.get("error")
        choices = event.get("choices") or []
        usage = event.get("usage") or {}
    except (ValueError, AttributeError) as e:
        raise StreamError(f"not a completion chunk: {payload[:80]!r}") from e
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise StreamError(f"error event: {str(message)[:160]}")
    for choice in choices:
        if choice.get("text"):
            trace.text.append(now)
        trace.finish = choice.get("finish_reason") or trace.finish
    trace.usage = usage.get("completion_tokens", trace.usage)


class Session:
    """Sends the items of one workload and keeps their traces in item order."""

    def __init__(self, http: aiohttp.ClientSession, target: Target, workload: Workload) -> None:
        self.http, self.target, self.workload = http, target, workload
        self.traces = [
            Trace(
                sent=0.0,
                wanted=i.max_tokens,
                prompt_tokens=len(i.prompt),
                late=bool(i.after_tokens),
            )
            for i in workload.items
        ]

    async def run(self) -> list[Trace]:
        items = self.workload.items
        width = self.workload.concurrency or len(items)
        gate = asyncio.Semaphore(width)
        await asyncio.gather(
            *(self._paced(gate, n, time.perf_counter()) for n in range(len(items)))
        )
        return self.traces

    async def _paced(self, gate: asyncio.Semaphore, n: int, begin: float) -> None:
        item = self.workload.items[n]
        async with gate:
            await asyncio.sleep(max(0.0, begin + item.at - time.perf_counter()))
            await self._others_have(item.after_tokens)
            await self._send(item, self.traces[n])

    async def _others_have(self, count: int) -> None:
        """Wait until every request that waits for nobody has ``count`` chunks or is over."""
        pairs = zip(self.workload.items, self.traces, strict=True)
        others = [t for i, t in pairs if not i.after_tokens]
        while count and any(len(t.text) < count and not t.ended for t in others):
            await asyncio.sleep(0.002)

    async def _send(self, item: Item, trace: Trace) -> None:
        payload = json.dumps(body(item, self.target.model)).encode()
        trace.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._stream(payload, trace)
        except TimeoutError:
            trace.error = f"no end within {self.target.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, StreamError, UnicodeDecodeError) as e:
            trace.error = f"{type(e).__name__}: {e}"
        trace.ended = time.perf_counter()

    async def _stream(self, payload: bytes, trace: Trace) -> None:
        url = f"{self.target.url}/v1/completions"
        headers = {"content-type": "application/json"}
        async with self.http.post(url, data=payload, headers=headers) as reply:
            if reply.status != 200:
                raise StreamError(f"status {reply.status}: {(await reply.text())[:160]}")
            async for now, event in sse_data(reply.content):
                take(trace, now, event)


def connections() -> aiohttp.ClientSession:
    """A client with one connection per request: some servers close theirs after each stream."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def drive(target: Target, workload: Workload) -> list[Trace]:
    """Run ``workload`` once; a request that fails is a trace with ``error``, never an exception."""
    async with connections() as http:
        return await Session(http, target, workload).run()
