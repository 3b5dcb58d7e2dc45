"""One connection, its bytes handed in at chosen turns of the loop: what its timers may cut off."""

from __future__ import annotations

import asyncio

import pytest

from jserve.api.http.front import Limits
from tests.api.fake import live, until

BODY = b'{"prompt":"x","max_tokens":1}'
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
NEXT = b"GET /health HTTP/1.1\r\nHost: x\r\n"
LIMITS = Limits(header_timeout_s=0.1)


class Wire(asyncio.Transport):
    """The client's end: what it was sent, and whether it was hung up on."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = b"", False

    def write(self, data) -> None:
        self.sent += bytes(data)

    def writelines(self, parts) -> None:
        self.sent += b"".join(bytes(part) for part in parts)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


def connect(srv):
    connection, wire = srv.server._connect(), Wire()
    connection.connection_made(wire)
    return connection, wire


async def turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.mark.parametrize("n", range(5))
async def test_a_body_at_any_turn_behind_its_head_is_no_next_head(n):
    """One turn behind it, the head is parsed and has no handler yet: the body once started the timer
    for the head of a next request, which then cut this one off in the middle of its answer."""
    async with live(limits=LIMITS) as srv:
        srv.engine.first_delay = 0.3
        connection, wire = connect(srv)
        await asyncio.sleep(0.01)
        connection.data_received(HEAD)
        await turns(n)
        for at in range(0, len(BODY), 10):
            connection.data_received(BODY[at : at + 10])
        await until(lambda: wire.sent or wire.closed)
        assert wire.sent.startswith(b"HTTP/1.1 200")
        assert not wire.closed


@pytest.mark.parametrize("n", [0, 1, 2, 20])
async def test_half_a_next_head_never_cuts_an_answer(n):
    """It is cut off itself, once the answer is out."""
    async with live(limits=LIMITS) as srv:
        srv.engine.first_delay = 0.3
        connection, wire = connect(srv)
        await asyncio.sleep(0.01)
        connection.data_received(HEAD + BODY)
        await turns(n)
        connection.data_received(NEXT)
        await until(lambda: wire.sent or wire.closed)
        assert wire.sent.startswith(b"HTTP/1.1 200")
        await until(lambda: wire.closed)
        assert wire.sent.count(b"HTTP/1.1") == 1


async def test_a_kept_connection_may_wait_between_requests():
    async with live(limits=LIMITS) as srv:
        connection, wire = connect(srv)
        for i in range(3):
            connection.data_received(HEAD)
            await asyncio.sleep(0.02)
            connection.data_received(BODY)
            await until(lambda i=i: wire.sent.count(b"HTTP/1.1 200") == i + 1)
            await asyncio.sleep(0.2)
        assert not wire.closed


async def test_half_a_head_behind_an_answer_is_cut_off():
    async with live(limits=LIMITS) as srv:
        connection, wire = connect(srv)
        connection.data_received(NEXT + b"\r\n")
        await until(lambda: b'"status":"ok"' in wire.sent)
        connection.data_received(NEXT)
        await until(lambda: wire.closed)
        assert wire.sent.count(b"HTTP/1.1") == 1


CHUNKED = HEAD.replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked")
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD, BODY + NEXT),
        (HEAD + BODY + NEXT,),
        (HEAD + BODY[:-3], BODY[-3:] + NEXT[:1]),
        (NEXT + b"\r\n" + NEXT,),
        (CHUNKED, CHUNKS + NEXT),
    ],
)
async def test_half_a_head_that_comes_with_the_end_of_a_request_is_cut_off(parts):
    """As fast as one that comes alone."""
    async with live(limits=LIMITS) as srv:
        connection, wire = connect(srv)
        for part in parts:
            connection.data_received(part)
            await asyncio.sleep(0.01)
        await until(lambda: wire.closed)
        assert wire.sent.count(b"HTTP/1.1") == wire.sent.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("whole", [HEAD + BODY, NEXT + b"\r\n", CHUNKED + CHUNKS])
async def test_a_request_that_comes_in_one_piece_begins_no_other(whole):
    async with live(limits=LIMITS) as srv:
        connection, wire = connect(srv)
        for i in range(2):
            connection.data_received(whole * 2)
            await until(lambda i=i: wire.sent.count(b"HTTP/1.1 200") == 2 * i + 2)
            await asyncio.sleep(0.2)
        assert not wire.closed


async def test_what_the_parser_refuses_is_answered_once():
    async with live(limits=LIMITS) as srv:
        connection, wire = connect(srv)
        connection.data_received(
            b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\nmore and more\r\n\r\n"
        )
        await until(lambda: wire.closed)
        assert wire.sent.count(b"HTTP/1.") == wire.sent.count(b" 400 Bad Request") == 1
