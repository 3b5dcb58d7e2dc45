"""KV events as a subscriber of vLLM's reads them: what can be found, in order, and again for who missed some."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest

from jserve.engine.kv_events import BlockRemoved, BlockStored, KvEvents, merged
from jserve.errors import ConfigError
from jserve.fleet.pages import digests_of
from jserve.sched.cache.retention import root_of
from tests.sched.sched_drive import Drive, limits, request

zmq = pytest.importorskip("zmq")
TOPIC = "kv@pod-1@tiny"


class Subscriber:
    """Keeps what it is told; knows the format by names only."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.socket.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.numbers: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.stored: dict[int, dict[str, Any]] = {}

    def take(self, n: int | None = None) -> None:
        """All messages, until none came for a while; ``n``: until so many have come in all."""
        while self.socket.poll(3000 if n is not None and len(self.numbers) < n else 200):
            topic, number, payload = self.socket.recv_multipart()
            assert topic.decode() == TOPIC
            self.numbers.append(int.from_bytes(number, "big"))
            ts, events, rank = msgspec.msgpack.decode(payload)
            assert abs(ts - time.time()) < 60
            assert rank == 0
            for event in events:
                self.heard(event)

    def heard(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "AllBlocksCleared":
            self.stored.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del self.stored[name]
        else:
            Z, parent = event["block_size"], event["parent_block_hash"]
            assert len(event["token_ids"]) == Z * len(event["block_hashes"])
            for i, name in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][i * Z : (i + 1) * Z]
                self.stored[name] = {"parent": parent, "tokens": tokens}
                parent = name

    def prefix(self, name: int) -> list[int]:
        """All tokens up to the end of a block."""
        block = self.stored[name]
        before = [] if block["parent"] is None else self.prefix(block["parent"])
        return before + block["tokens"]

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def subscriber(monkeypatch):
    """One that is connected before the first message: what comes before that is lost, as ZeroMQ has it."""
    monkeypatch.setattr("jserve.engine.kv_events.GATHER_S", 0.3)
    made = Subscriber()
    yield made
    made.close()


def test_a_subscriber_knows_what_can_be_found(subscriber):
    rng = random.Random(0)
    drive = Drive(limits(n_pages=20))
    cache = drive.scheduler.resources.cache
    events = KvEvents(subscriber.endpoint, "", TOPIC, cache.page_size)
    subscriber.take(1)
    assert subscriber.events == [{"type": "AllBlocksCleared"}]
    cache.listener = events
    asked = []
    for i in range(30):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        asked.append(request(f"r{i}", prompt, salt=rng.choice(["", "s"]), max_tokens=6))
        drive.add(asked[-1])
        drive.run()
        if i == 20:
            cache.clear()
    events.close()
    subscriber.take()
    assert subscriber.numbers == list(range(len(subscriber.numbers)))
    assert cache.tree.n_evicted > 0
    assert len(subscriber.stored) == cache.tree.n_nodes
    for one in asked:
        names = digests_of(root_of(one), (*one.prompt_ids, 0), cache.page_size)
        known = cache.n_known(root_of(one), (*one.prompt_ids, 0))
        for i, name in enumerate(names):
            number = int.from_bytes(name, "big")
            assert (number in subscriber.stored) == (i < known)
            if i < known:
                n = (i + 1) * cache.page_size
                assert subscriber.prefix(number) == list(one.prompt_ids[:n])
    kinds = {event["type"] for event in subscriber.events}
    assert kinds == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
    stored = [event for event in subscriber.events if event["type"] == "BlockStored"]
    firsts = [event for event in stored if event["parent_block_hash"] is None]
    assert {str(event.get("extra_keys")) for event in firsts if "extra_keys" in event} >= {
        "[['s']]"
    }
    assert all(event["medium"] == "GPU" and event["lora_name"] is None for event in stored)


def test_who_missed_some_gets_them_again(subscriber, tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    drive = Drive(limits(n_pages=33))
    cache = drive.scheduler.resources.cache
    cache.listener = events = KvEvents(subscriber.endpoint, replay, TOPIC, cache.page_size)
    subscriber.take(1)
    for i in range(4):
        drive.add(request(f"r{i}", [i] * 20, max_tokens=2))
        drive.run()
        subscriber.take(i + 2)
    live = list(subscriber.numbers)
    assert live[0] == 0
    asks = subscriber.context.socket(zmq.DEALER)  # a REQ socket takes one answer only
    asks.connect(replay)
    asks.send_multipart([b"", (2).to_bytes(8, "big")])
    found = []
    while True:
        assert asks.poll(3000)
        _, number, payload = asks.recv_multipart()
        if number == (-1).to_bytes(8, "big", signed=True):
            break
        found.append(int.from_bytes(number, "big"))
        assert msgspec.msgpack.decode(payload)[1]
    assert found == live[2:]
    asks.send(b"nonsense")
    drive.add(request("r9", [9] * 20, max_tokens=2))
    drive.run()
    subscriber.take(len(live) + 1)
    assert len(subscriber.numbers) == len(live) + 1
    events.close()
    events.close()
    assert not events._thread.is_alive()


def stored(name: int, parent: int | None, extra: list | None = None) -> BlockStored:
    return BlockStored([name], parent, [name] * 4, 4, None, "GPU", None, extra)


def test_pages_that_follow_one_another_are_one_event():
    found = merged(
        [
            stored(1, None, [("s",)]),
            stored(2, 1, [None]),
            stored(5, 1),
            BlockRemoved([7], "GPU"),
            BlockRemoved([8], "GPU"),
            stored(9, None),
        ]
    )
    assert found == [
        BlockStored([1, 2], None, [1] * 4 + [2] * 4, 4, None, "GPU", None, [("s",), None]),
        stored(5, 1),
        BlockRemoved([7, 8], "GPU"),
        stored(9, None),
    ]


@pytest.mark.parametrize(
    ("endpoint", "replay", "field"),
    [("nowhere", "", "kv_events"), ("ipc://x", "tcp://*:none", "kv_events_replay")],
)
def test_an_address_that_is_none_is_refused_by_name(endpoint, replay, field, tmp_path):
    with pytest.raises(ConfigError) as caught:
        KvEvents(endpoint.replace("x", f"{tmp_path}/x"), replay, "", 4)
    assert caught.value.field == field


def test_without_pyzmq_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match="kv-events") as caught:
        KvEvents("tcp://*:1", "", "", 4)
    assert caught.value.field == "kv_events"
