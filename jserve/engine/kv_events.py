"""Publishes which KV pages can be found, in the format of vLLM's KV events, so that routers which read those
(llm-d, Dynamo, AIBrix) route by what is cached.

ZeroMQ messages of three frames, published in order, and sent again to who asks::

    topic | sequence number, 8 bytes big-endian | msgpack [time, [event ...], data_parallel_rank]
    event {"type": "BlockStored", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", ...}
          {"type": "BlockRemoved", "block_hashes", "medium"} | {"type": "AllBlocksCleared"}

Events are maps, as of vLLM 0.26. A block is a page; its hash is 8 bytes of the digest of tenant, salt, adapter and all
tokens up to its end, as an unsigned integer. Events hold the tokens of prompts and answers: whoever subscribes reads
them.

Each of several replicas has a rank and publishes by itself, as vLLM's data-parallel ranks do: its ports are those of
the options plus its rank, which is in its batches. The rank is the lowest whose ports are free on its machine, so a
replica that takes another's place there takes its ports too.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from jserve.addresses import own_address
from jserve.config import CacheOptions
from jserve.errors import ConfigError
from jserve.kv.radix import Node
from jserve.kv.tiers import digest_of

log = logging.getLogger(__name__)

MEDIUM = "GPU"
"""vLLM's word for the memory of the device."""
KEPT = 10_000
"""Batches that are sent again to who asks."""
MOST_QUEUED = 100_000
"""Messages that a slow subscriber may be behind before it misses some."""
GATHER_S, POLL_S = 0.01, 0.1
MOST_RANKS = 256
"""Ranks that a replica tries: as many replicas as there may be."""
ANY_HOST = ("*", "0.0.0.0", "[::]")
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number behind the last message that is sent again."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Pages of one prefix, in order; ``token_ids`` are those of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each page, what else its hash is made of; of a prefix that has its own, on the first page."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Pages that can no longer be found."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No page can be found: the engine has just started."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events since the last batch; ``ts`` in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class KvEvents:
    """A ``kv.cache.PageListener`` that publishes.

    Args:
        endpoint: ZeroMQ address. One with ``*`` or ``::`` and ``ipc://`` are bound, any other is connected to.
        replay: address that is bound for those who missed something; empty: nobody can ask.
        topic: first frame of each message.
        page_size: tokens of a page.
        ranked: this is one of several replicas. Both addresses are ``tcp://`` with a port, and are bound, at the
            first rank whose ports are free.

    Attributes:
        rank: 0 where there is one engine.
        address: where it publishes, as other machines find it.

    Raises:
        ConfigError: pyzmq is not installed, or an address cannot be used.
    """

    def __init__(
        self, endpoint: str, replay: str, topic: str, page_size: int, *, ranked: bool = False
    ) -> None:
        self._topic, self._page_size = topic.encode(), page_size
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self._n = 0
        opened = _first_free(endpoint, replay) if ranked else (0, *_sockets(endpoint, replay))
        self.rank, self._pub, self._replay = opened
        self.address = _found_at(with_rank(endpoint, self.rank)) if ranked else endpoint
        self._events.put(AllBlocksCleared())
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv events")
        self._thread.start()

    def added(self, node: Node) -> None:
        """``node`` can be found from now on."""
        parent = node.parent
        assert parent is not None
        first = parent.parent is None
        root = _root(node).key
        own = tuple(str(part) for part in root if part)
        self._events.put(
            BlockStored(
                block_hashes=[_hash(node)],
                parent_block_hash=None if first else _hash(parent),
                token_ids=list(node.key),
                block_size=self._page_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=root[2],
                extra_keys=[own if first else None] if own else None,
            )
        )

    def removed(self, node: Node) -> None:
        """``node`` can no longer be found."""
        self._events.put(BlockRemoved(block_hashes=[_hash(node)], medium=MEDIUM))

    def close(self) -> None:
        """Publish what is left, and end. Idempotent."""
        self._events.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        try:
            while self._publish():
                while self._replay is not None and self._replay.poll(0):
                    self._send_again(self._replay.recv_multipart())
        except Exception as error:
            log.error("KV events end: %s", error)
        finally:
            for socket in (self._pub, self._replay):
                if socket is not None:
                    socket.close(linger=200)

    def _publish(self) -> bool:
        """Send what there is, as one batch; False: no more will come."""
        try:
            found = [self._events.get(timeout=POLL_S)]
        except queue.Empty:
            return True
        time.sleep(GATHER_S)
        while not self._events.empty():
            found.append(self._events.get())
        events = [event for event in found if event is not None]
        if events:
            batch = EventBatch(ts=time.time(), events=merged(events), data_parallel_rank=self.rank)
            number, payload = self._n.to_bytes(8, "big"), msgspec.msgpack.encode(batch)
            self._n += 1
            self._pub.send_multipart((self._topic, number, payload))
            self._kept.append((number, payload))
        return len(events) == len(found)

    def _send_again(self, frames: list[bytes]) -> None:
        """All that is kept from the number on that ``frames`` ask for: [who, b"", number]."""
        if len(frames) != 3:
            return
        who, _, start = frames
        for number, payload in self._kept:
            if number >= start:  # of equal length, so bytes compare as numbers
                self._replay.send_multipart((who, b"", number, payload))
        self._replay.send_multipart((who, b"", END, b""))


def merged(events: Iterable[Event]) -> list[Event]:
    """``events`` in order, where pages that follow one another in a prefix, or are removed together, are one event."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case BlockStored(), BlockStored() if last.block_hashes[-1] == event.parent_block_hash:
                last.block_hashes += event.block_hashes
                last.token_ids += event.token_ids
                if last.extra_keys is not None:
                    last.extra_keys += event.extra_keys or [None]
            case BlockRemoved(), BlockRemoved():
                last.block_hashes += event.block_hashes
            case _:
                found.append(event)
    return found


def _hash(node: Node) -> int:
    return int.from_bytes(digest_of(node)[:8], "big")


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def check_named(options: CacheOptions) -> None:
    """Raises ConfigError where options of KV events are given without an address to publish at."""
    for field in ("kv_events_replay", "kv_events_topic"):
        if getattr(options, field) and not options.kv_events:
            raise ConfigError(f"{field} needs kv_events", field=field)


def port_of(endpoint: str, field: str) -> int:
    """The port of rank 0. Raises ConfigError where replicas cannot have one each; ``field`` is the option."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdecimal() or not int(port):
        why = f"each replica has a port of its own: tcp://ADDRESS:PORT is needed, not {endpoint}"
        raise ConfigError(f"{field}: {why}", field=field)
    return int(port)


def check_replicas(endpoint: str, replay: str, n: int) -> None:
    """Raises ConfigError where ``n`` replicas cannot publish at ``endpoint`` and have ``replay``, which may be empty,
    each at a port of its own."""
    ports = {"kv_events": port_of(endpoint, "kv_events")}
    if replay:
        ports["kv_events_replay"] = port_of(replay, "kv_events_replay")
    for field, port in ports.items():
        if port + n - 1 > 65535:
            raise ConfigError(f"{field}: {n} replicas need ports up to {port + n - 1}", field=field)
    if replay and abs(ports["kv_events_replay"] - ports["kv_events"]) < n:
        why = f"{n} replicas publish at {n} ports, and need as many others: {n} apart at least"
        raise ConfigError(f"kv_events_replay: {why}", field="kv_events_replay")


def with_rank(endpoint: str, rank: int) -> str:
    """``endpoint`` of the replica of this ``rank``: ports are counted on. Empty stays so."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if endpoint else ""


def _found_at(endpoint: str) -> str:
    """``endpoint``, with the address of this machine where it is any of its own."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{own_address()}:{port}" if host in ANY_HOST else endpoint


def _first_free(endpoint: str, replay: str) -> tuple[int, Any, Any]:
    """(rank, PUB, ROUTER or None) of the lowest rank whose ports are free."""
    highest = max(port_of(address, field) for address, field in _named(endpoint, replay) if address)
    for rank in range(min(MOST_RANKS, 65536 - highest)):
        opened = _bound(with_rank(endpoint, rank), with_rank(replay, rank))
        if opened is not None:
            return rank, *opened
    why = f"no port is free from {endpoint} on"
    raise ConfigError(f"kv_events: {why}", field="kv_events")


def _bound(endpoint: str, replay: str) -> tuple[Any, Any] | None:
    """(PUB, ROUTER or None), or None where a port is taken."""
    try:
        return _sockets(endpoint, replay, binds=True)
    except ConfigError as error:
        if getattr(error.__cause__, "errno", None) == errno.EADDRINUSE:
            return None
        raise


def _named(endpoint: str, replay: str) -> list[tuple[str, str]]:
    return [(endpoint, "kv_events"), (replay, "kv_events_replay")]


def _sockets(endpoint: str, replay: str, *, binds: bool | None = None) -> tuple[Any, Any]:
    """(PUB, ROUTER or None). ``binds``: the first is bound; None: as its address says."""
    try:
        import zmq
    except ImportError:
        why = "KV events need pyzmq: pip install 'jserve[kv-events]'"
        raise ConfigError(why, field="kv_events") from None
    if binds is None:
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    sockets: list[Any] = []
    for (address, field), kind in zip(_named(endpoint, replay), (zmq.PUB, zmq.ROUTER), strict=True):
        if not address:
            return sockets[0], None
        socket = zmq.Context.instance().socket(kind)
        sockets.append(socket)
        try:
            if kind == zmq.PUB:
                socket.set_hwm(MOST_QUEUED)
            (socket.bind if binds or kind == zmq.ROUTER else socket.connect)(address)
        except zmq.ZMQError as error:
            for each in sockets:
                each.close(linger=0)
            raise ConfigError(f"{field}: {address}: {error}", field=field) from error
    return sockets[0], sockets[1]
