"""A stream that was delivered whole is a 200, whatever its client does with the connection afterwards."""

from __future__ import annotations

import asyncio
import logging
import re

import orjson
import pytest
from aiohttp import web

from tests.api.fake import FakeEngine, chat_body, live, until

N = 10
COMP = "/v1/completions"
STREAMS = {
    "chat": ("/v1/chat/completions", chat_body(), b"data: [DONE]\n\n"),
    "completions": (COMP, {"prompt": "x"}, b"data: [DONE]\n\n"),
    "prompts": (COMP, {"prompt": ["a", "b", "c"], "n": 2}, b"data: [DONE]\n\n"),
    "responses": ("/v1/responses", {"input": "x"}, b'"type":"response.completed"'),
    "messages": (
        "/v1/messages",
        {"max_tokens": 32, "messages": chat_body()["messages"]},
        b"event: message_stop\n",
    ),
}


def counted(metrics: str) -> dict[str, int]:
    """Answers by status."""
    found: dict[str, int] = {}
    for status, n in re.findall(r'http_requests_total\{[^}]*status="(\d+)"[^}]*\} (\d+)', metrics):
        found[status] = found.get(status, 0) + int(n)
    return found


async def raw_stream(url: str, path: str, body: dict) -> bytes:
    """Everything that comes on a connection of its own until it is closed."""
    raw = orjson.dumps(body | {"stream": True})
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    got = await asyncio.wait_for(reader.read(), 10.0)
    writer.close()
    return got


@pytest.fixture
def quick_client(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The connection is closed by its client as soon as bytes in this list, or the end of the body, are
    sent: before the server's loop runs on. A real client on another core can be that quick."""
    marks: list[bytes] = []
    write, write_eof = web.StreamResponse.write, web.StreamResponse.write_eof

    async def then_closed(self: web.StreamResponse, data: bytes) -> None:
        transport = self._req.transport  # type: ignore[union-attr]
        await write(self, data)
        if any(mark in data for mark in marks):
            transport.abort()  # type: ignore[union-attr]

    async def end_then_closed(self: web.StreamResponse, data: bytes = b"") -> None:
        transport = self._req.transport if self._req is not None else None
        await write_eof(self, data)
        if transport is not None:
            transport.abort()

    monkeypatch.setattr(web.StreamResponse, "write", then_closed)
    monkeypatch.setattr(web.StreamResponse, "write_eof", end_then_closed)
    return marks


@pytest.mark.parametrize("early", [True, False], ids=["at the last event", "at the end"])
@pytest.mark.parametrize("name", STREAMS)
async def test_a_client_that_closes_after_the_end_has_not_left(name, early, quick_client, caplog):
    caplog.set_level(logging.INFO, "jserve.api")
    path, body, last = STREAMS[name]
    quick_client.extend([last] if early else [])
    async with live(FakeEngine(("Hello",))) as srv:
        for _ in range(N):
            assert last in await raw_stream(srv.url, path, body)
        await until(lambda: sum(counted(srv.app_metrics()).values()) == N)
        assert counted(srv.app_metrics()) == {"200": N}
    assert " 499 " not in caplog.text


async def test_a_client_that_closes_before_the_end_has_left(quick_client):
    """The counterpart: the same closing one event earlier is a 499."""
    quick_client.append(b'"finish_reason":"stop"')
    async with live(FakeEngine(("Hello",))) as srv:
        await raw_stream(srv.url, *STREAMS["chat"][:2])
        await until(lambda: sum(counted(srv.app_metrics()).values()) == 1)
        assert counted(srv.app_metrics()) == {"499": 1}
