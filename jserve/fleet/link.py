"""The connection of a front and a replica: frames of ``engine.wire`` over TCP, and nobody between the two.

It owns both ends, protocol version 1. A replica listens at an address of its own and makes up a key; a front learns
both through Serve, so whoever may call replicas there may connect, and nobody else. The key is not sent, but frames
are not encrypted::

    replica -> front   [ magic, 4 ][ nonce, 16 ]                 as a frame
    front -> replica   [ HMAC-SHA256 of that under the key ]     as a frame
    both               frames; the front sends an empty one every HEARTBEAT_S
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

from jserve.engine.client import OnMessage, pack_request
from jserve.engine.process import EXIT_CRASH
from jserve.engine.wire import (
    Cancel,
    Control,
    Create,
    Fault,
    FromEngine,
    Gone,
    HandleCommand,
    LinkClosed,
    Ready,
    Submit,
    decoder,
    framed,
    pack,
    take_frames,
)
from jserve.ports import Clock
from jserve.types import Request

log = logging.getLogger(__name__)

MAGIC = b"JFL1"
HELLO_BYTES = len(MAGIC) + 16
MAX_HELLO_BYTES = 256
"""Whoever has not shown that it knows the key may send no more."""
HELLO_S = 10.0
"""Until then it must have; a front waits so long for a connection."""
HEARTBEAT_S = 3.0
SILENT_S = 15.0
"""A front that sends nothing for so long, not even an empty frame, is gone."""


class Endpoint(NamedTuple):
    """The address at which a replica listens, and the key that it lets in."""

    host: str
    port: int
    key: bytes


class FrameLink(asyncio.Protocol):
    """One end of a connection.

    What an engine's thread sends leaves at once: the event loop would get to it only when that thread waits, a step's
    planning later.

    Args:
        on_payload: gets each frame's payload, on the event loop; what it raises ends the connection.
        on_closed: is told once, with the reason, when the connection is over.

    Attributes:
        heard_at: when something last came, of ``time.monotonic``.
    """

    def __init__(
        self, on_payload: Callable[[bytes], None], on_closed: Callable[[str], None]
    ) -> None:
        self.on_payload, self._on_closed = on_payload, on_closed
        self.heard_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received, self._most = bytearray(), MAX_HELLO_BYTES
        self._why = "the other end hung up"
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        """Frames leave through it; ``_transport`` only receives. Guarded by the lock, as is all below."""
        self._unsent = bytearray()
        self._full = self._closing = self._over = False
        """The kernel takes no more now; hang up once all is sent; nothing is sent any more."""

    def authenticated(self) -> None:
        """The other end is who it should be, and may send frames of any length."""
        self._most = 0

    def send(self, frames: bytes) -> None:
        """From any thread, without waiting. To one that is closed: dropped."""
        with self._lock:
            if self._over:
                return
            self._unsent += frames
            if self._socket is not None and not self._full:
                self._send(self._socket)

    def close(self) -> None:
        """From any thread: send what is left, then hang up."""
        self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        with self._lock:
            self._closing = True
            full = self._full
        if self._transport is not None and not full:
            self._transport.close()

    def abort(self, why: str) -> None:
        """On the loop: hang up, whatever is left."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    def _send(self, to: socket.socket) -> None:
        """With the lock: what the kernel takes now. The loop sends the rest."""
        try:
            del self._unsent[: to.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it is over, as the loop will hear
            self._unsent.clear()
        if self._unsent and not self._full:
            self._full = True
            self._loop.call_soon_threadsafe(self._wait)

    def _wait(self) -> None:
        """On the loop: send the rest when the kernel takes more."""
        if self._socket is not None:
            self._loop.add_writer(self._socket, self._send_rest)

    def _send_rest(self) -> None:
        """On the loop: the kernel takes more."""
        with self._lock:
            if self._socket is None:
                return
            self._send(self._socket)
            self._full = bool(self._unsent)
            if self._full:
                return
            self._loop.remove_writer(self._socket)
        if self._closing:
            self._close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        number = os.dup(transport.get_extra_info("socket").fileno())
        with self._lock:
            self._socket = socket.socket(fileno=number)
            self._socket.setblocking(False)
            if self._unsent:
                self._send(self._socket)
        if self._closing:
            self._close()

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        self._received += data
        if self._most and len(self._received) > self._most:
            self.abort("the other end talks before it says hello")
            return
        try:
            for payload in take_frames(self._received):
                if payload:
                    self.on_payload(payload)
        except LinkClosed as error:
            self.abort(str(error))
        except Exception as error:  # of an engine of another version, or of nobody of ours
            log.warning("a connection is closed: %s: %s", type(error).__name__, str(error)[:200])
            self.abort(f"it said what cannot be read: {type(error).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        with self._lock:
            sending, self._socket, self._over = self._socket, None, True
            self._unsent.clear()
        if sending is not None:
            self._loop.remove_writer(sending)
            sending.close()
        self._on_closed(self._why if exc is None else f"{type(exc).__name__}: {exc}")


class FrontServer:
    """The replica's end: lets in fronts that know the key.

    Args:
        address: of this machine, as fronts reach it; a free port of it is listened on.
        joined: is told of a front that was let in, with its end.
        took: gets each payload of a front.
        left: is told of a front that is gone.
    """

    def __init__(
        self,
        address: str,
        joined: Callable[[FrameLink], None],
        took: Callable[[FrameLink, bytes], None],
        left: Callable[[FrameLink], None],
    ) -> None:
        self._address, self._key = address, secrets.token_bytes(32)
        self._joined, self._took, self._left = joined, took, left
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def endpoint(self) -> Endpoint:
        """The address at which it listens from now on, and its key. On one event loop.

        Raises:
            OSError: it cannot listen there.
        """
        async with self._starting:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(self._link, self._address, 0)
        return Endpoint(self._address, self._server.sockets[0].getsockname()[1], self._key)

    def _link(self) -> FrameLink:
        """The end for one who connected, who has to show the key first."""
        nonce = MAGIC + secrets.token_bytes(HELLO_BYTES - len(MAGIC))
        known = False

        def first(payload: bytes) -> None:
            nonlocal known
            if not hmac.compare_digest(payload, _proof(self._key, nonce)):
                raise LinkClosed("it has another key")
            link.authenticated()
            link.on_payload = lambda payload: self._took(link, payload)
            self._joined(link)
            known = True

        def closed(why: str) -> None:
            watching.cancel()
            if known:
                self._left(link)

        def look() -> None:
            nonlocal watching
            limit_s = SILENT_S if known else HELLO_S
            left_s = limit_s - (time.monotonic() - link.heard_at)
            if left_s <= 0:
                link.abort("it says nothing")
            watching = loop.call_later(max(left_s, 0.1), look)

        loop = asyncio.get_running_loop()
        link = FrameLink(first, closed)
        watching = loop.call_later(HELLO_S, look)
        link.send(framed(nonce))
        return link


class FrontClient:
    """The engine of one replica: an ``engine.client.EngineClient``.

    All but ``close`` is called on the event loop of ``start``.

    Args:
        endpoint: asks the replica where it listens.
        clock: monotonic seconds, of which ``Request.arrival`` is.
    """

    def __init__(
        self, endpoint: Callable[[], Awaitable[Endpoint]], *, clock: Clock = time.monotonic
    ) -> None:
        self.info: dict[str, Any] = {}
        self._endpoint, self._clock = endpoint, clock
        self._link: FrameLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = threading.Event()
        self._decoder = decoder(FromEngine)

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._over.is_set()

    def start(self, on_message: OnMessage) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(on_message))

    def submit(self, request: Request) -> None:
        self._post(pack_request(Submit(request=request, age_s=self._age_s(request))))

    def create(self, request: Request, ttl_s: float) -> None:
        age_s = self._age_s(request)
        self._post(pack_request(Create(request=request, ttl_s=ttl_s, age_s=age_s)))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._post(pack(Cancel(request_id=request_id, index=index)))

    def ask(self, message: HandleCommand | Control) -> None:
        self._post(pack(message))

    def kill(self) -> None:
        """Hang up. The replica is somebody else's."""
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self, timeout_s: float = 5.0) -> None:
        if self._task is not None:
            self.kill()
            self._over.wait(timeout_s)

    def _age_s(self, request: Request) -> float | None:
        """Clocks of two machines have nothing in common, so what travels is how long ago it arrived."""
        return max(0.0, self._clock() - request.arrival) if request.arrival else None

    def _post(self, frame: bytes) -> None:
        if self._link is not None:
            self._link.send(frame)

    async def _run(self, on_message: OnMessage) -> None:
        """All that the replica says, until one of both ends it."""
        why = "the connection was given up"
        try:
            why = await self._converse(on_message)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # of Serve, of the network
            why = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            if self._link is not None:
                self._link.close()
            self._over.set()
            on_message(Fault(message=why, fatal=True))
            on_message(Gone(exit_code=EXIT_CRASH))

    async def _converse(self, on_message: OnMessage) -> str:
        """The conversation; the reason of its end."""
        host, port, key = await self._endpoint()
        over: asyncio.Future[str] = self._loop.create_future()

        def first(payload: bytes) -> None:
            if len(payload) != HELLO_BYTES or not payload.startswith(MAGIC):
                raise LinkClosed("the replica is of another version")
            link.authenticated()
            link.on_payload = lambda payload: self._take(payload, on_message)
            link.send(framed(_proof(key, payload)))

        def closed(why: str) -> None:
            if not over.done():
                over.set_result(why)

        async with asyncio.timeout(HELLO_S):
            link = FrameLink(first, closed)
            await self._loop.create_connection(lambda: link, host, port)
        self._link = link
        while True:
            done, _ = await asyncio.wait([over], timeout=HEARTBEAT_S)
            if done:
                return over.result()
            link.send(framed(b""))

    def _take(self, payload: bytes, on_message: OnMessage) -> None:
        message = self._decoder.decode(payload)
        if isinstance(message, Ready):
            self.info = message.info
        on_message(message)


def _proof(key: bytes, hello: bytes) -> bytes:
    return hmac.digest(key, hello, "sha256")
