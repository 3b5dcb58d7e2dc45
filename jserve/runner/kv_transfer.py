"""Gives KV pages to other engines over TCP: what ``DiskStore`` has in files, by digest.

It owns both ends of the protocol, version 1. Nothing is unpickled, and whatever does not check closes the connection::

    client -> server   Hello   [ magic, 4 ][ sha256 of the key, 32 ][ identity, 16 ][ bytes of a page, u64 ]
    server -> client   Welcome [ 0: accepted, 1: another version, 2: another key, 3: another model ]
    client -> server   Want    [ digest, 16 ]                                   any number, one at a time
    server -> client   File    [ bytes that follow, u32 ][ a page as ``disk`` writes it ]   0: it is gone

A page that does not come, for whatever reason, is a miss: it is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

from jserve.addresses import own_address
from jserve.errors import ConfigError
from jserve.runner.disk import DiskStore, checked

log = logging.getLogger(__name__)

MAGIC = b"JKD1"
_HELLO = struct.Struct("<4s32s16sQ")
_LENGTH = struct.Struct("<I")
DIGEST = 16
WELCOME = 0
REFUSALS = {1: "speaks another version", 2: "has another key", 3: "has another model"}
MOST_CLIENTS = 64
TIMEOUT_S = 5.0
"""Of every wait for the other end while it owes something."""
IDLE_S = 600.0
"""A client that wants nothing for so long is disconnected."""
RETRY_S = 10.0
"""A server that could not be used is not asked for so long."""


class KVTransferError(Exception):
    """The other end cannot be used; the message says why."""


def parse_address(text: str, field: str) -> tuple[str, int]:
    """(host, port) of ``HOST:PORT``. Raises ConfigError naming ``field``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{field} must be HOST:PORT, not {text[:80]!r}", field=field)
    return host.strip("[]"), int(port)


class KVTransferServer:
    """Serves the files of ``store`` to those who know ``key``, in threads.

    Args:
        address: to listen on; port 0 is any free one.
        store: whose files are given.
        key: that both ends know.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, address: tuple[str, int], store: DiskStore, key: str) -> None:
        self._hello = hello(store, key)
        self._store, self.n_sent = store, 0
        self._clients: set[socket.socket] = set()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._socket = socket.create_server(address, family=family)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_address cannot listen on {address[0]}:{address[1]}: {error.strerror}",
                field="kv_transfer_address",
            ) from None
        host = own_address() if address[0] in ("0.0.0.0", "::") else address[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        """The address at which others reach it."""
        threading.Thread(target=self._accept, name="kv-transfer", daemon=True).start()

    def close(self) -> None:
        """Hang up on everybody. Idempotent."""
        for one in (self._socket, *list(self._clients)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if len(self._clients) >= MOST_CLIENTS:
                client.close()
                continue
            self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.settimeout(TIMEOUT_S)
            verdict = self._judge(_receive(client, _HELLO.size))
            client.sendall(bytes([verdict]))
            while verdict == WELCOME:
                client.settimeout(IDLE_S)
                digest = _receive(client, DIGEST)
                client.settimeout(TIMEOUT_S)
                data = self._store.file(digest) or b""
                client.sendall(_LENGTH.pack(len(data)) + data)
                self.n_sent += bool(data)
        except (OSError, KVTransferError):
            pass  # it hung up, or was too slow
        finally:
            self._clients.discard(client)
            client.close()

    def _judge(self, given: bytes) -> int:
        own, (magic, key, *model) = self._hello, _HELLO.unpack(given)
        expected_magic, expected_key, *expected = _HELLO.unpack(own)
        if magic != expected_magic:
            return 1
        if not hmac.compare_digest(key, expected_key):
            return 2
        return WELCOME if model == expected else 3


class KVTransferClients:
    """Connections to other engines' servers, one each. Used from one thread.

    Args:
        store: of the engine that asks; says which pages it can use.
        key: that both ends know.
        clock: monotonic seconds.
    """

    def __init__(
        self, store: DiskStore, key: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hello, self._page_bytes = hello(store, key), store.page_bytes
        self._open: dict[str, socket.socket] = {}
        self._avoided_until: dict[str, float] = {}
        self._clock = clock

    def get(self, address: str, digest: bytes) -> bytes | None:
        """The page from the server at ``address``; None: it is not there, or the server cannot be used. An open
        connection may have ended unnoticed, so it is tried once more with a new one."""
        if self._clock() < self._avoided_until.get(address, 0.0):
            return None
        why: Exception | None = None
        for _ in range(1 + (address in self._open)):
            try:
                return self._ask(address, digest)
            except (OSError, KVTransferError, ConfigError) as error:
                why = error
                self._drop(address)
        log.warning("KV pages of %s are computed again: %s", address[:80], why)
        self._avoided_until[address] = self._clock() + RETRY_S
        return None

    def close(self) -> None:
        for address in list(self._open):
            self._drop(address)

    def _drop(self, address: str) -> None:
        opened = self._open.pop(address, None)
        if opened is not None:
            opened.close()

    def _ask(self, address: str, digest: bytes) -> bytes | None:
        opened = self._open.get(address) or self._connect(address)
        opened.sendall(digest)
        (n,) = _LENGTH.unpack(_receive(opened, _LENGTH.size))
        if n == 0:
            return None
        if n > self._page_bytes + 64:
            raise KVTransferError(f"a page of {n} bytes was announced")
        page = checked(_receive(opened, n), self._page_bytes)
        if page is None:
            raise KVTransferError("a page came damaged")
        return page

    def _connect(self, address: str) -> socket.socket:
        opened = socket.create_connection(
            parse_address(address, "kv_transfer_address"), timeout=TIMEOUT_S
        )
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            opened.sendall(self._hello)
            (verdict,) = _receive(opened, 1)
        except BaseException:
            opened.close()
            raise
        if verdict != WELCOME:
            opened.close()
            raise KVTransferError(f"the other engine {REFUSALS.get(verdict, 'refuses')}")
        self._open[address] = opened
        return opened


def hello(store: DiskStore, key: str) -> bytes:
    """The first message of a client."""
    hashed = hashlib.sha256(key.encode()).digest()
    return _HELLO.pack(MAGIC, hashed, store.root.name.encode()[:16], store.page_bytes)


def _receive(one: socket.socket, n: int) -> bytes:
    """``n`` bytes. Raises KVTransferError where the other end hangs up before, OSError where it is too slow."""
    data = bytearray(n)
    view = memoryview(data)
    at = 0
    while at < n:
        got = one.recv_into(view[at:])
        if not got:
            raise KVTransferError("the other end hung up")
        at += got
    return bytes(data)
