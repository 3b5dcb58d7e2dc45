"""The connection of a front and a replica: every frame once and in order, and only for those who know the key."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from jserve.engine.wire import Fault, Gone, Message, Outputs, Ready, framed, pack, take_frames
from jserve.fleet import link as link_module
from jserve.fleet.link import HELLO_BYTES, MAGIC, Endpoint, FrameLink, FrontClient, FrontServer
from tests.fleet.test_face import requests, until


class Replica:
    """A replica's end: who was let in, what each said, who is gone."""

    def __init__(self) -> None:
        self.links: list[FrameLink] = []
        self.said: list[bytes] = []
        self.gone: list[FrameLink] = []
        self.server = FrontServer("127.0.0.1", self._joined, self._took, self.gone.append)

    def _joined(self, link: FrameLink) -> None:
        self.links.append(link)
        link.send(pack(Ready(info={"pid": 7})))

    def _took(self, link: FrameLink, payload: bytes) -> None:
        self.said.append(payload)

    @contextlib.asynccontextmanager
    async def front(
        self, endpoint: Endpoint | None = None
    ) -> AsyncIterator[tuple[FrontClient, list]]:
        """A front, let in or not, and what it was told."""
        told: list[Message] = []
        client = FrontClient(self.server.endpoint if endpoint is None else lambda: _made(endpoint))
        client.start(told.append)
        try:
            yield client, told
        finally:
            await asyncio.to_thread(client.close)
            assert not client.alive
            assert [type(one) for one in told[-2:]] == [Fault, Gone]


async def _made(endpoint: Endpoint) -> Endpoint:
    return endpoint


async def stranger(replica: Replica) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Somebody who has connected and read the hello."""
    host, port, _ = await replica.server.endpoint()
    reader, writer = await asyncio.open_connection(host, port)
    hello = await reader.readexactly(4 + HELLO_BYTES)
    assert hello[4:8] == MAGIC
    return reader, writer


async def test_both_say_what_they_have_to_say():
    replica = Replica()
    async with replica.front() as (client, told):
        await until(lambda: bool(told))
        assert told == [Ready(info={"pid": 7})]
        assert client.info == {"pid": 7}
        client.submit(requests(1)[0])
        client.cancel("a", 1)
        await until(lambda: len(replica.said) == 2)
        replica.links[0].send(pack(Outputs(step=3, outputs=[])))
        await until(lambda: len(told) == 2)
    await until(lambda: replica.gone == replica.links)
    assert [type(one) for one in told] == [Ready, Outputs, Fault, Gone]


async def test_frames_of_another_thread_come_once_and_in_order():
    """The threads are switched as often as Python can, so that one is caught between any two steps."""
    replica, n = Replica(), 4000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        async with replica.front() as (_, told):
            await until(lambda: bool(told))
            (end,) = replica.links
            writer = threading.Thread(
                target=lambda: [end.send(pack(Fault(message=str(i)))) for i in range(n)]
            )
            writer.start()
            await until(lambda: len(told) == n + 1)
            writer.join()
            assert [one.message for one in told[1:]] == [str(i) for i in range(n)]
    finally:
        sys.setswitchinterval(interval)


async def let_in(replica: Replica) -> socket.socket:
    """A front without an event loop, which was let in and has read nothing since."""
    host, port, key = await replica.server.endpoint()
    front = socket.create_connection((host, port))
    front.settimeout(5.0)
    hello = (await asyncio.to_thread(front.recv, 4 + HELLO_BYTES, socket.MSG_WAITALL))[4:]
    front.sendall(framed(hmac.digest(key, hello, "sha256")))
    await until(lambda: bool(replica.links))
    return front


async def test_a_frame_leaves_while_the_event_loop_is_busy():
    replica = Replica()
    with await let_in(replica) as front:
        sent = pack(Ready(info={"pid": 7})) + pack(Fault(message="now"))
        replica.links[0].send(pack(Fault(message="now")))
        assert b"".join(front.recv(1) for _ in sent) == sent
    await until(lambda: replica.gone == replica.links)
    replica.links[0].send(b"x" * 100)
    assert not replica.links[0]._unsent, "nobody will read it"


async def test_more_than_the_kernel_takes_arrives_whole_before_the_end():
    replica, n, size = Replica(), 64, 1 << 18
    with await let_in(replica) as front:
        link = replica.links[0]
        frames = [i.to_bytes() * size for i in range(n)]
        writer = threading.Thread(target=lambda: [link.send(frame) for frame in frames])
        writer.start()
        writer.join()
        assert link._unsent, "the kernel takes less"
        link.close()
        hello = len(pack(Ready(info={"pid": 7})))
        read = await asyncio.to_thread(lambda: b"".join(iter(lambda: front.recv(1 << 16), b"")))
    assert read[hello:] == b"".join(frames)
    await until(lambda: replica.gone == [link])


async def test_last_words_arrive():
    replica = Replica()
    async with replica.front() as (_, told):
        await until(lambda: bool(told))
        replica.links[0].send(pack(Fault(message="last words")))
        replica.links[0].close()
        await until(lambda: isinstance(told[-1], Gone))
    assert next(one.message for one in told if isinstance(one, Fault)) == "last words"
    assert told[-2].message == "the other end hung up"


async def test_another_key_is_not_let_in():
    replica = Replica()
    host, port, _ = await replica.server.endpoint()
    async with replica.front(Endpoint(host, port, b"x" * 32)) as (_, told):
        await until(lambda: bool(told))
        assert isinstance(told[0], Fault)
    assert not replica.links


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"x" * 32),
        b"\xff" * 300,
        b"\0" * 300,
        (1 << 20).to_bytes(4, "little") + b"\0" * 300,
    ],
)
async def test_a_stranger_is_not_let_in(words):
    """At once, however much it announces."""
    replica = Replica()
    reader, writer = await stranger(replica)
    writer.write(words)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5.0) == b""
    writer.close()
    async with replica.front() as (_, told):  # who knows the key still is
        await until(lambda: bool(told))
        assert isinstance(told[0], Ready)
    assert (len(replica.links), replica.said) == (1, [])


@pytest.mark.parametrize("words", [b"", framed(b"")])
async def test_whoever_connects_and_says_nothing_is_let_go(words, monkeypatch):
    monkeypatch.setattr(link_module, "HELLO_S", 0.2)
    reader, writer = await stranger(Replica())
    writer.write(words)
    assert await asyncio.wait_for(reader.read(), 5.0) == b""
    writer.close()


async def test_a_front_that_has_nothing_to_say_stays_and_one_that_is_silent_is_gone(monkeypatch):
    monkeypatch.setattr(link_module, "SILENT_S", 0.6)
    monkeypatch.setattr(link_module, "HELLO_S", 0.3)
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.1)
    replica = Replica()
    async with replica.front() as (_, told):
        await until(lambda: bool(told))
        await asyncio.sleep(1.5)
        assert not replica.gone
        monkeypatch.setattr(link_module, "HEARTBEAT_S", 60.0)
        await until(lambda: replica.gone == replica.links)
        await until(lambda: isinstance(told[-1], Gone))
    assert replica.said == [], "an empty frame says nothing"


async def test_a_front_that_reads_nothing_is_let_go_too(monkeypatch):
    """What it was told lies in the way of the end of its connection."""
    monkeypatch.setattr(link_module, "SILENT_S", 0.5)
    monkeypatch.setattr(link_module, "HELLO_S", 0.3)
    replica = Replica()
    async with replica.front() as (client, told):
        await until(lambda: bool(told))
        client._link._transport.pause_reading()
        replica.links[0].send(pack(Fault(message="x" * (32 << 20))))
        await until(lambda: replica.gone == replica.links)


async def test_a_replica_of_another_version_is_named():
    async def old(reader, writer):
        writer.write(framed(b"JFL0" + bytes(16)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(old, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Replica().front(Endpoint("127.0.0.1", port, b"k")) as (_, told):
        await until(lambda: len(told) == 2)
        assert "another version" in told[0].message


async def test_what_cannot_be_read_ends_the_connection_and_nothing_else():
    replica = Replica()
    async with replica.front() as (_, told):
        await until(lambda: bool(told))
        replica.links[0].send(framed(b"\xc1"))
        await until(lambda: isinstance(told[-1], Gone))
    async with replica.front() as (_, told):
        await until(lambda: bool(told))
        replica.links[1].send(b"\xff\xff\xff\xff")
        await until(lambda: isinstance(told[-1], Gone))
        assert "above the limit" in told[-2].message


async def test_frames_may_come_in_any_pieces():
    """Bytes that the network cuts where it likes."""
    got: list[bytes] = []
    end = FrameLink(got.append, lambda why: None)
    end.authenticated()
    whole = b"".join(framed(bytes([i]) * i) for i in range(1, 40))
    for at in range(0, len(whole), 7):
        end.data_received(whole[at : at + 7])
    assert got == take_frames(bytearray(whole))


async def test_a_replica_that_cannot_be_reached_is_gone():
    with contextlib.closing(
        await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    ) as server:
        port = server.sockets[0].getsockname()[1]
    await server.wait_closed()
    async with Replica().front(Endpoint("127.0.0.1", port, b"k")) as (_, told):
        await until(lambda: len(told) == 2)
        assert "ConnectionRefusedError" in told[0].message
