"""Publishes which KV pages can be found, in the format of vLLM's KV events, so that routers which read those
(llm-d, Dynamo, AIBrix) route by what is cached.

ZeroMQ messages of three frames, published in order, and sent again to who asks::

    topic | sequence number, 8 bytes big-endian | msgpack [time, [event ...], data_parallel_rank]
    event {"type": "BlockStored", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", ...}
          {"type": "BlockRemoved", "block_hashes", "medium"} | {"type": "AllBlocksCleared"}

Events are maps, as of vLLM 0.26. A block is a page; its hash is 8 bytes of the digest of tenant, salt, adapter and all
tokens up to its end, as an unsigned integer. Events hold the tokens of prompts and answers: whoever subscribes reads
them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

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

    Raises:
        ConfigError: pyzmq is not installed, or an address cannot be used.
    """

    def __init__(self, endpoint: str, replay: str, topic: str, page_size: int) -> None:
        self._topic, self._page_size = topic.encode(), page_size
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self._n = 0
        self._pub, self._replay = _sockets(endpoint, replay)
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
            batch = EventBatch(ts=time.time(), events=merged(events), data_parallel_rank=0)
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


def _sockets(endpoint: str, replay: str) -> tuple[Any, Any]:
    """(PUB, ROUTER or None)."""
    try:
        import zmq
    except ImportError:
        why = "KV events need pyzmq: pip install 'jserve[kv-events]'"
        raise ConfigError(why, field="kv_events") from None
    context = zmq.Context.instance()
    pub = context.socket(zmq.PUB)
    pub.set_hwm(MOST_QUEUED)
    binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    field = "kv_events"
    try:
        (pub.bind if binds else pub.connect)(endpoint)
        if not replay:
            return pub, None
        field = "kv_events_replay"
        router = context.socket(zmq.ROUTER)
        router.bind(replay)
    except zmq.ZMQError as error:
        raise ConfigError(f"{field}: {error}", field=field) from None
    return pub, router
