"""A client that leaves is noticed within a second, at every stage; a slow one is cut off."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import aiohttp
import pytest

from jserve.api.http.front import Limits
from jserve.api.reply.generate import Generation
from jserve.sampling import SamplingParams
from jserve.types import Request
from tests.api.fake import FakeEngine, byte_tokenizer, chat_body, live, until

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


async def leave(srv, path: str, body: dict, ready) -> float:
    """Sends a request, waits for ``ready()``, drops the connection; the time it was dropped."""

    async def ask():
        async with aiohttp.ClientSession() as http, http.post(srv.url + path, json=body) as r:
            await r.read()

    task = asyncio.create_task(ask())
    await until(ready)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return time.monotonic()


def all_cancelled(engine: FakeEngine):
    assert engine.records, "nobody had asked"
    return all(r.cancelled_at is not None for r in engine.records)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize("stage", ["queued", "streaming", "stalled"])
async def test_leaving_cancels_within_a_second(stream, path, stage):
    engine = FakeEngine(("x" * 400,))
    if stage == "queued":
        engine.first_delay = 30.0
    engine.delay = 0.01
    if stage == "stalled":
        engine.stall_after = 3
    body = chat_body() if path == CHAT else {"prompt": "x"}
    n_sent = {"queued": 0, "streaming": 5, "stalled": 3}[stage]
    async with live(engine) as srv:
        left_at = await leave(
            srv,
            path,
            body | {"stream": stream, "max_tokens": 400},
            lambda: engine.records and engine.records[0].n_sent >= n_sent,
        )
        await until(lambda: all_cancelled(engine))
        assert engine.records[0].cancelled_at - left_at < 1.0
        assert not engine.records[0].finished
        assert engine.records[0].aborted
        await until(lambda: 'status="499"' in srv.app_metrics())


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_a_batch_cancels_every_prompt(stream):
    engine = FakeEngine(("x" * 400,))
    engine.delay = 0.01
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 400, "stream": stream}
    async with live(engine) as srv:
        await leave(
            srv, COMP, body, lambda: len(engine.records) == 3 and engine.records[2].n_sent > 2
        )
        await until(lambda: all_cancelled(engine), 1.0)


async def test_leaving_after_the_status_but_before_a_token():
    """Keep-alive comments run, no token yet."""
    engine = FakeEngine()
    engine.first_delay = 30.0
    async with live(engine, keep_alive_s=0.05) as srv:
        async with aiohttp.ClientSession() as http:
            r = await http.post(srv.url + CHAT, json=chat_body(stream=True))
            assert r.status == 200
            assert (await r.content.readline()) == b": keep-alive\n"
            left_at = time.monotonic()
            r.close()
        await until(lambda: all_cancelled(engine), 1.0)
        assert engine.records[0].cancelled_at - left_at < 1.0


async def test_leaving_while_the_prompt_is_rendered():
    """The thread cannot be stopped, but nothing reaches the engine; meanwhile others are served."""
    engine = FakeEngine()
    async with live(engine) as srv:
        prepare = srv.server.front.prepare
        begun = threading.Event()

        def slow(chat):
            begun.set()
            time.sleep(0.5)
            return [("x", True)]

        prepare.chat.render = slow
        left_at = await leave(srv, CHAT, chat_body(), begun.is_set)
        assert (await srv.get("/health"))[0] == 200
        assert (await srv.post(COMP, {"prompt": "x"}))[0] == 200
        assert time.monotonic() - left_at < 0.4, "rendering must not hold up the loop"
        await asyncio.sleep(0.6)
        assert len(engine.records) == 1
        assert 'status="499"' in srv.app_metrics()


async def test_leaving_while_the_body_arrives():
    engine = FakeEngine()
    async with live(engine) as srv:
        port = int(srv.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 50\r\n\r\n{"prompt"'
        )
        await until(lambda: 'http_requests_in_flight{model_name="tiny"} 1.0' in srv.app_metrics())
        writer.close()
        await until(lambda: 'http_requests_in_flight{model_name="tiny"} 0.0' in srv.app_metrics())
        assert engine.records == []


async def test_half_close_cancels_too():
    engine = FakeEngine()
    engine.first_delay = 30.0
    async with live(engine) as srv:
        port = int(srv.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt":"x"}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await until(lambda: len(engine.records) == 1)
        writer.write_eof()
        await until(lambda: all_cancelled(engine), 1.0)
        writer.close()


async def test_a_reader_that_stops_reading_is_cut_off():
    """With comments too: meant to find dead readers, they must not look as if one had read."""
    for keep_alive_s in (15.0, 0.05):
        await _stop_reading(keep_alive_s)


async def _stop_reading(keep_alive_s: float) -> None:
    engine = FakeEngine(("x" * 200,))
    engine.chunk = 1
    limits = Limits(write_timeout_s=0.3, send_buffer=4096)
    async with live(engine, limits=limits, keep_alive_s=keep_alive_s) as srv:
        engine.script = lambda request, index: _endless(request)  # type: ignore[method-assign]
        port = int(srv.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        body = b'{"prompt":"x","stream":true,"max_tokens":400,"return_token_ids":true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        writer.transport.pause_reading()
        await until(lambda: engine.records and all_cancelled(engine), 10.0)
        assert not engine.records[0].finished
        writer.transport.abort()
        assert (await srv.get("/health"))[0] == 200


def _ask(srv, path: str, body: bytes) -> socket.socket:
    """A socket that has asked, and takes only little into its buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", int(srv.url.rsplit(":", 1)[1])))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    sock.setblocking(False)
    return sock


async def test_a_long_answer_that_is_not_read_is_given_up():
    """Not a stream: nobody writes a second time, and nobody would notice."""
    body = b'{"tokens": [' + b"120," * 300_000 + b"120]}"
    limits = Limits(write_timeout_s=0.2, send_buffer=4096)
    async with live(limits=limits) as srv:
        sock = await asyncio.to_thread(_ask, srv, "/detokenize", body)
        server = srv.server._runner.server
        await until(lambda: len(server.connections) == 1)
        await until(lambda: not server.connections, 3.0)
        await until(lambda: 'http_requests_in_flight{model_name="tiny"} 0.0' in srv.app_metrics())
        sock.close()


async def test_a_long_answer_that_is_read_slowly_is_read_to_its_end():
    body = b'{"tokens": [' + b"120," * 300_000 + b"120]}"
    limits = Limits(write_timeout_s=0.2, send_buffer=4096)
    async with live(limits=limits) as srv:
        sock = await asyncio.to_thread(_ask, srv, "/detokenize", body)
        loop, part, began = asyncio.get_running_loop(), b"", time.monotonic()
        while not part.endswith(b'"}'):
            part = await asyncio.wait_for(loop.sock_recv(sock, 16384), 3.0)
            assert part, "it was hung up on although it reads"
            await asyncio.sleep(0.02)
        assert time.monotonic() - began > 0.3, "slower than the limit"
        await asyncio.sleep(0.7)
        await loop.sock_sendall(sock, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(loop.sock_recv(sock, 16384), 3.0)
        assert b"200 OK" in answer, "nobody waits for a reader who has read it all"
        sock.close()


def _endless(request):
    from jserve.types import Output

    return [
        Output(request_id=request.id, index=0, token_ids=tuple([120] * 4000)) for _ in range(2000)
    ]


async def test_finished_requests_are_not_counted_as_left(srv):
    await srv.post(COMP, {"prompt": "x"})
    await srv.events(COMP, {"prompt": "x"})
    assert 'status="499"' not in srv.app_metrics()
    assert 'status="200"' in srv.app_metrics()


@pytest.mark.parametrize("n_prompts", [1, 2])
async def test_closing_the_pieces_closes_the_engines_streams_before_it_returns(n_prompts):
    """Without help of the garbage collector, which would close them some time later."""
    engine = FakeEngine()
    engine.delay = 0.01
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    requests = [Request(id=f"r{i}", prompt_ids=(1, 2), params=params) for i in range(n_prompts)]
    pieces = Generation(engine, byte_tokenizer(), requests).pieces()
    await anext(pieces)
    assert not all_cancelled(engine)
    await pieces.aclose()
    assert len(engine.records) == n_prompts
    assert all_cancelled(engine)
