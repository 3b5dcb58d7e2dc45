"""KV events of several replicas: each has a port and a rank, who takes its place gets both, subscribers can tell."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from typing import Any

import msgspec
import pytest

from jserve.config import EngineConfig
from jserve.engine.kv_events import KvEvents
from jserve.errors import ConfigError, EngineDead
from jserve.fleet.host import EngineHost
from jserve.fleet.start import check
from jserve.sampling import SamplingParams
from jserve.types import Request
from tests.fleet.fakes import OPTIONS
from tests.fleet.test_face import World, until

zmq = pytest.importorskip("zmq")
N_PORTS = 6


def free_ports() -> tuple[str, str]:
    """Two addresses from which on some ports are free."""
    for base in range(20000, 32000, 2 * N_PORTS):
        try:
            for port in range(base, base + 2 * N_PORTS):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + N_PORTS}"
    raise AssertionError("no ports are free")


def at(endpoint: str, rank: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


class Listener:
    """Subscribes to the first ranks from ``endpoint`` on; batches of each as (number, events, rank)."""

    def __init__(self, endpoint: str, n: int) -> None:
        self.context = zmq.Context()
        self.sockets = []
        for rank in range(n):
            one = self.context.socket(zmq.SUB)
            one.setsockopt_string(zmq.SUBSCRIBE, "kv@m")
            one.connect(at(endpoint, rank))
            self.sockets.append(one)
        self.found: list[list[tuple[int, list[dict[str, Any]], int]]] = [[] for _ in range(n)]

    async def take(self, settled_s: float = 0.6) -> None:
        await asyncio.sleep(settled_s)
        for found, one in zip(self.found, self.sockets, strict=True):
            while one.poll(0):
                _, number, payload = one.recv_multipart()
                _, events, rank = msgspec.msgpack.decode(payload)
                found.append((int.from_bytes(number, "big"), events, rank))

    def tokens(self, rank: int) -> list[int]:
        events = [event for _, batch, _ in self.found[rank] for event in batch]
        return [t for event in events if event["type"] == "BlockStored" for t in event["token_ids"]]

    def close(self) -> None:
        self.context.destroy(linger=0)


def replayed(endpoint: str) -> list[tuple[int, list[str], int]]:
    """All batches of one replica: (number, kinds of events, rank)."""
    context = zmq.Context()
    asks = context.socket(zmq.DEALER)
    asks.connect(endpoint)
    asks.send_multipart([b"", (0).to_bytes(8, "big")])
    found = []
    while asks.poll(3000):
        _, number, payload = asks.recv_multipart()
        if number == (-1).to_bytes(8, "big", signed=True):
            break
        _, events, rank = msgspec.msgpack.decode(payload)
        found.append((int.from_bytes(number, "big"), [event["type"] for event in events], rank))
    context.destroy(linger=0)
    return found


def asked(i: int) -> Request:
    return Request(
        id=uuid.uuid4().hex,
        prompt_ids=tuple((7 * i + j) % 250 for j in range(40)),
        params=SamplingParams(max_tokens=4, temperature=0.0),
    )


async def answered(world: World, request: Request) -> None:
    async for _ in world.fleet.generate(request):
        pass


async def test_each_replica_publishes_its_own_pages_at_its_own_port():
    endpoint, replay = free_ports()
    listener = Listener(endpoint, 3)
    options = {"kv_events": endpoint, "kv_events_replay": replay, "kv_events_topic": "kv@m"}
    try:
        async with World(3, **options) as world:
            ranks = {one.name: rank for rank, one in enumerate(world.fleet.members)}
            addresses = {one.name: one.kv_events for one in world.fleet.replicas()}
            assert addresses == {name: at(endpoint, rank) for name, rank in ranks.items()}
            await listener.take()
            requests = [asked(i) for i in range(9)]
            places: dict[str, str] = {}
            for one in requests:
                before = {m.name: m.n_requests for m in world.fleet.members}
                await answered(world, one)
                [places[one.id]] = [
                    m.name for m in world.fleet.members if m.n_requests > before[m.name]
                ]
            await listener.take()
            assert len(set(places.values())) > 1
            for one in requests:
                first = list(one.prompt_ids[:16])
                for name, rank in ranks.items():
                    told = listener.tokens(rank)
                    pages = [told[i : i + 16] for i in range(0, len(told), 16)]
                    assert (first in pages) == (name == places[one.id])
            for rank, found in enumerate(listener.found):
                assert {one[2] for one in found} <= {rank}
            for rank in range(3):
                numbers, kinds, said = zip(*replayed(at(replay, rank)), strict=True)
                assert list(numbers) == list(range(len(numbers)))
                assert kinds[0][0] == "AllBlocksCleared"
                assert set(said) == {rank}
    finally:
        listener.close()


async def test_who_takes_a_place_has_its_address():
    endpoint, replay = free_ports()
    async with World(3, kv_events=endpoint, kv_events_replay=replay) as world:
        await answered(world, asked(1))
        world.source.kill("r1")
        await until(lambda: len(world.fleet.members) == 2)
        # its thread goes on until its engine is closed, as a process would not
        world.source._all[1]._client.close()
        name = await world.source.add()
        await until(lambda: len(world.fleet.members) == 3)
        addresses = {one.name: one.kv_events for one in world.fleet.replicas()}
        assert addresses == {
            "r0": endpoint,
            "r2": at(endpoint, 2),
            name: at(endpoint, 1),
        }
        assert replayed(at(replay, 1)) == [(0, ["AllBlocksCleared"], 1)]
        # and one that the load asks for gets the next one
        more = await world.source.add()
        await until(lambda: len(world.fleet.members) == 4)
        addresses = {one.name: one.kv_events for one in world.fleet.replicas()}
        assert addresses[more] == at(endpoint, 3)


def until_free(address: str) -> None:
    """Wait until nobody listens at ``address``; ten seconds at most."""
    port, end = int(address.rpartition(":")[2]), time.monotonic() + 10.0
    while True:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < end, "it is never given back"
            time.sleep(0.01)
        else:
            return


def test_a_port_that_somebody_has_is_left_out():
    """Of the address where batches are asked for, too: both go the same number further."""
    endpoint, replay = free_ports()
    taken = int(replay.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", taken)):
        events = KvEvents(endpoint, replay, "", 16, ranked=True)
    until_free(endpoint)  # what was opened in vain is given back, by a thread of zmq's
    other = KvEvents(endpoint, replay, "", 16, ranked=True)
    try:
        assert (events.rank, events.address) == (1, at(endpoint, 1))
        assert (other.rank, other.address) == (0, endpoint)
    finally:
        events.close()
        other.close()


def test_any_address_is_told_as_others_find_it(monkeypatch):
    monkeypatch.setattr("jserve.engine.kv_events.own_address", lambda: "10.1.2.3")
    endpoint, _ = free_ports()
    port = endpoint.rpartition(":")[2]
    seen = []

    def sockets(address: str, replay: str, **_: Any) -> tuple[Any, None]:
        seen.append(address)
        return zmq.Context.instance().socket(zmq.PUB), None

    monkeypatch.setattr("jserve.engine.kv_events._sockets", sockets)
    events = KvEvents(f"tcp://*:{port}", "", "", 16, ranked=True)
    events.close()
    assert events.address == f"tcp://10.1.2.3:{port}"
    assert seen == [f"tcp://*:{port}"]


def test_a_replica_that_cannot_bind_says_so():
    config = EngineConfig.of(**OPTIONS, kv_events="tcp://192.0.2.7:5557").flat()
    with pytest.raises(EngineDead, match=r"kv_events: tcp://192\.0\.2\.7:5557"):
        EngineHost(config, "tests.fleet.fakes:build", end=lambda code: None)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_events": "ipc:///tmp/events"}, "kv_events"),
        ({"kv_events": "inproc://events"}, "kv_events"),
        ({"kv_events": "tcp://*"}, "kv_events"),
        ({"kv_events": "tcp://*:*"}, "kv_events"),
        ({"kv_events": "tcp://*:0"}, "kv_events"),
        ({"kv_events": "tcp://*:65534"}, "kv_events"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "ipc:///tmp/x"}, "kv_events_replay"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5559"}, "kv_events_replay"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5555"}, "kv_events_replay"),
        (
            {"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5560", "max_replicas": 8},
            "kv_events_replay",
        ),
        ({"kv_events_replay": "tcp://*:5557"}, "kv_events_replay"),
        ({"kv_events_topic": "t"}, "kv_events_topic"),
    ],
)
def test_what_replicas_cannot_have_is_refused_by_name(options: dict[str, Any], field: str):
    with pytest.raises(ConfigError, match=field) as caught:
        check(EngineConfig.of(replicas=3, **options))
    assert caught.value.field == field


def test_ports_that_are_far_enough_apart_are_taken():
    check(EngineConfig.of(replicas=3, kv_events="tcp://*:5557", kv_events_replay="tcp://*:5560"))
    check(EngineConfig.of(replicas=3, kv_events="tcp://127.0.0.1:65533"))
    check(EngineConfig.of(replicas=1, kv_events="tcp://[::]:5557"))
