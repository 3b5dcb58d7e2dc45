"""Prompts computed by one engine for another: pages travel, and nothing lost or broken changes a token."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jserve.engine.engine import Engine
from jserve.engine.wire import Control, Stats
from jserve.errors import ConfigError
from jserve.model.view import Bucket
from jserve.runner import kv_transfer, moves
from jserve.runner.disk import DiskStore
from jserve.runner.kv_transfer import KVTransferClients, KVTransferServer
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.types import Finish, Output, Request
from tests.kv.test_real_reuse import N_HOST, PAGE_BYTES, Z
from tests.runner.harness import OPTIONS, EngineConfig, make_runner

BUCKETS = (Bucket(D=6, P=48, F=6),)
PROMPT = tuple((5 * i + 3) % 60 for i in range(9 * Z + 3))


class World:
    """An engine that computes prompts and one that goes on, with a directory of their own or a shared one."""

    def __init__(self, ours: Path, theirs: Path, *, with_server: bool = False) -> None:
        keys = {"kv_transfer_key": "k"} if with_server else {}
        self.first = self.engine(
            ours, **keys, **({"kv_transfer_address": "127.0.0.1:0"} if with_server else {})
        )
        self.second = self.engine(theirs, **keys)

    @staticmethod
    def engine(directory: Path, **options) -> Engine:
        gib = (N_HOST + 0.5) * PAGE_BYTES / 2**30
        options |= {"disk_dir": str(directory), "host_memory_gb": gib, "disk_gb": 0.1}
        runner = make_runner(BUCKETS, strict=True, **options)
        return Engine(Scheduler(runner.limits, EngineConfig.of(**OPTIONS | options)), runner)

    def export(self, prompt=PROMPT, **fields) -> list[Output]:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self.first.submit(
            Request(id="p", prompt_ids=prompt, params=params, exports_kv=True, **fields)
        )
        return run(self.first)

    def go_on(self, source: str | None, prompt=PROMPT, **fields) -> tuple[list[int], int]:
        """(what the second engine says, tokens of the prompt that it did not compute)."""
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
        request = Request(id="d", prompt_ids=prompt, params=params, kv_source=source, **fields)
        self.second.submit(request)
        outputs = run(self.second)
        assert outputs[-1].finish == Finish.LENGTH
        return [t for out in outputs for t in out.token_ids], outputs[-1].n_cached

    def files(self) -> list[Path]:
        store = self.first.runner._spill.store  # type: ignore[attr-defined]
        return sorted(store.root.rglob("*.kv"))


def run(engine: Engine) -> list[Output]:
    outputs = []
    while engine.busy:
        outputs += engine.step()
        time.sleep(0.0005)
    return outputs


@lru_cache(maxsize=1)
def alone() -> list[int]:
    """What one engine says that computes all of it."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    runner = make_runner(BUCKETS, strict=True)
    engine = Engine(Scheduler(runner.limits, EngineConfig.of(**OPTIONS)), runner)
    engine.submit(Request(id="d", prompt_ids=PROMPT, params=params))
    return [t for out in engine.drain() for t in out.token_ids]


@pytest.mark.slow
def test_another_engine_reads_the_pages_of_a_shared_directory(tmp_path):
    world = World(tmp_path, tmp_path)
    outputs = world.export()
    assert [out.finish for out in outputs][-1] == Finish.LENGTH
    assert len(world.files()) == 9, "the end was told before its pages were there"
    assert world.go_on("") == (alone(), 9 * Z)


@pytest.mark.slow
def test_who_is_not_told_looks_for_nothing(tmp_path):
    world = World(tmp_path, tmp_path)
    world.export()
    assert world.go_on(None) == (alone(), 0)


@pytest.mark.slow
def test_a_prefix_that_was_cached_is_exported_too(tmp_path):
    world = World(tmp_path, tmp_path)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    world.first.submit(Request(id="before", prompt_ids=PROMPT, params=params))
    run(world.first)
    assert not world.files()
    world.export()
    assert world.go_on("") == (alone(), 9 * Z)


@pytest.mark.slow
def test_pages_are_found_under_their_own_weights_and_after_an_update_back(tmp_path):
    """Named weights, not replaced ones: what is computed is the same, and only the names keep pages apart."""

    def named(engine: Engine, name: str) -> Engine:
        engine.scheduler.reweigh("any", engine.clock(), name=name)
        return engine

    world = World(tmp_path, tmp_path)
    world.export()
    named(world.first, "b")
    world.export()
    assert len(world.files()) == 2 * 9
    for name, n_found in (("c", 0), ("b", 9 * Z), ("", 9 * Z)):
        world.second = named(World.engine(tmp_path), name)
        assert world.go_on("") == (alone(), n_found), name
    named(named(world.second, "d"), "")
    assert world.go_on("") == (alone(), 9 * Z)


@pytest.mark.slow
def test_an_update_back_to_a_tree_finds_no_pages_of_before(tmp_path):
    """A trainer may have changed it meanwhile: each update of arrays has a name of its own, on every engine."""

    def updated(engine: Engine, tree: Any) -> Engine:
        command = Control(id=uuid.uuid4().hex, action="update_weights", source=tree)
        engine.ask(command)
        engine.step()
        (answer,) = engine.take_answers()
        assert answer.error is None
        return engine

    world = World(tmp_path, tmp_path)
    first = jax.tree.map(np.array, world.first.runner.params)  # type: ignore[attr-defined]
    other = jax.tree.map(lambda x: x * np.float32(1.5), first)
    world.export()
    for i, tree in enumerate((other, first, other, first)):
        updated(world.first, tree)
        world.export()
        assert len(world.files()) == (i + 2) * 9, "an earlier update's pages were taken for its own"
    for trees in ((other, first), (first,), (first, first)):
        world.second = World.engine(tmp_path)
        for tree in trees:
            updated(world.second, tree)
        assert world.go_on("") == (alone(), 0)
    world.second = updated(World.engine(tmp_path), other)
    said, n_found = world.go_on("")
    assert (said != alone(), n_found) == (True, 0)


@pytest.mark.slow
def test_a_second_export_writes_nothing_again(tmp_path):
    world = World(tmp_path, tmp_path)
    world.export()
    written = [path.stat().st_mtime_ns for path in world.files()]
    world.export()
    assert [path.stat().st_mtime_ns for path in world.files()] == written
    for path in world.files()[:4]:  # another engine removed them
        path.unlink()
    world.export()
    assert len(world.files()) == 9


BROKEN: dict[str, Callable[[list[Path]], object]] = {
    "gone": lambda files: files[4].unlink(),
    "a bit flipped": lambda files: flip(files[2]),
    "cut": lambda files: files[0].write_bytes(files[0].read_bytes()[:50]),
    "all gone": lambda files: [path.unlink() for path in files],
    "a byte short": lambda files: files[3].write_bytes(b"JKV1" + files[5].read_bytes()[4:-1]),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_page_that_is_lost_or_broken_is_computed_again(how, tmp_path):
    world = World(tmp_path, tmp_path)
    world.export()
    BROKEN[how](world.files())
    said, n_cached = world.go_on("")
    assert said == alone()
    assert n_cached < 9 * Z


@pytest.mark.slow
def test_another_tenants_pages_have_other_names(tmp_path):
    world = World(tmp_path, tmp_path)
    world.export(tenant="a")
    assert world.go_on("", tenant="b") == (alone(), 0)


@pytest.mark.slow
def test_an_aborted_export_writes_nothing_later(tmp_path):
    """What it published may be given to others before anybody writes it."""
    world = World(tmp_path, tmp_path)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    world.first.submit(Request(id="before", prompt_ids=PROMPT, params=params))
    run(world.first)
    world.first.submit(Request(id="p", prompt_ids=PROMPT, params=params, exports_kv=True))
    world.first.step()  # in flight, with a prefix that was cached and is not exported yet
    world.first.cancel("p")
    world.first.step()
    assert not world.first.scheduler.resources.exports
    run(world.first)
    assert not world.files()
    assert not world.first.busy


@pytest.mark.slow
def test_the_server_gives_what_the_directory_has(tmp_path):
    world = World(tmp_path / "a", tmp_path / "b", with_server=True)
    address = world.first.runner.report()["kv_transfer_address"]  # type: ignore[attr-defined]
    world.export()
    assert world.go_on(address) == (alone(), 9 * Z)
    stats: Stats = world.second.stats()
    assert stats.values["kv_transfer_pages_received_total"] == 9
    assert world.first.stats().values["kv_transfer_pages_sent_total"] == 9
    world.first.close()


@pytest.mark.slow
def test_a_server_that_is_gone_is_a_miss(tmp_path):
    world = World(tmp_path / "a", tmp_path / "b", with_server=True)
    address = world.first.runner.report()["kv_transfer_address"]  # type: ignore[attr-defined]
    world.export()
    world.first.close()
    assert world.go_on(address) == (alone(), 0)


# -- the transfer alone


N = 64


def store(root: Path, identity: str = "0123456789abcdef", n: int = N) -> DiskStore:
    return DiskStore(root, identity, page_bytes=n, max_bytes=100 * (n + 8))


def name(i: int) -> bytes:
    return bytes([i]) * 16


def page(i: int, n: int = N) -> bytes:
    return bytes((i + k) % 256 for k in range(n))


@pytest.fixture
def served(tmp_path):
    own = store(tmp_path / "own")
    for i in range(4):
        own.put(name(i), page(i))
    opened = KVTransferServer(("127.0.0.1", 0), own, "key")
    yield opened, own
    opened.close()


def test_what_is_there_and_what_is_not(served, tmp_path):
    opened, _ = served
    clients = KVTransferClients(store(tmp_path / "other"), "key")
    assert [clients.get(opened.address, name(i)) for i in (2, 9, 0)] == [page(2), None, page(0)]
    clients.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": "other"}, "another key"),
        ({"identity": "fedcba9876543210"}, "another model"),
        ({"n": 32}, "another model"),
    ],
)
def test_who_does_not_belong_is_told_why(served, tmp_path, caplog, changes, why):
    opened, _ = served
    key = changes.pop("key", "key")
    clients = KVTransferClients(store(tmp_path / "other", **changes), key)
    assert clients.get(opened.address, name(1)) is None
    assert why in caplog.text


def test_a_connection_that_ended_unnoticed_is_made_anew(served, tmp_path, monkeypatch):
    opened, _ = served
    monkeypatch.setattr(kv_transfer, "IDLE_S", 0.05)
    clients = KVTransferClients(store(tmp_path / "other"), "key")
    assert clients.get(opened.address, name(1)) == page(1)
    time.sleep(0.3)
    assert clients.get(opened.address, name(2)) == page(2)
    clients.close()


def test_a_damaged_file_does_not_get_through(served, tmp_path):
    opened, own = served
    for path in own.root.rglob("*.kv"):
        flip(path)
    now = 0.0
    clients = KVTransferClients(store(tmp_path / "other"), "key", clock=lambda: now)
    assert clients.get(opened.address, name(1)) is None
    own._forget(name(1).hex())
    own.put(name(1), page(1))
    assert clients.get(opened.address, name(1)) is None, "it is left alone for a while"
    now = kv_transfer.RETRY_S
    assert clients.get(opened.address, name(1)) == page(1)


ANSWERS = {
    "nothing": b"",
    "another verdict": b"\x09",
    "half a length": b"\x00\x07",
    "a page that is too long": b"\x00\xff\xff\xff\x7f",
    "half a page": b"\x00\x48\x00\x00\x00abc",
    "noise": b"\x00\x48\x00\x00\x00" + b"x" * 72,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_whatever_a_server_says_is_a_miss_or_a_page(answer, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def say() -> None:
            client, _ = server.accept()
            with client, contextlib.suppress(OSError):
                client.recv(1000)
                client.sendall(ANSWERS[answer])
                client.shutdown(socket.SHUT_WR)
                client.recv(1000)

        threading.Thread(target=say, daemon=True).start()
        clients = KVTransferClients(store(tmp_path), "key")
        assert clients.get(f"127.0.0.1:{server.getsockname()[1]}", name(1)) is None
        clients.close()


@pytest.mark.parametrize("said", [b"", b"x" * 60, b"x" * 4, kv_transfer.MAGIC + bytes(56)])
def test_whatever_a_client_says_the_server_goes_on(served, tmp_path, said):
    opened, _ = served
    host, port = opened.address.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(5)
        assert client.recv(10) in (b"", b"\x01", b"\x02")
    assert KVTransferClients(store(tmp_path / "other"), "key").get(opened.address, name(1)) == page(
        1
    )


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:99999", "host:x"])
def test_an_address_that_is_none(text):
    with pytest.raises(ConfigError, match="kv_transfer_address must be HOST:PORT"):
        kv_transfer.parse_address(text, "kv_transfer_address")


def test_a_transfer_needs_a_directory_and_a_key(tmp_path):
    with pytest.raises(ConfigError, match="disk_dir") as found:
        make_runner(BUCKETS, kv_transfer_address="127.0.0.1:0")
    assert found.value.field == "kv_transfer_address"
    with pytest.raises(ConfigError) as found:
        make_runner(BUCKETS, kv_transfer_key="k")
    assert found.value.field == "kv_transfer_key", "it would be ignored"
    gib = (N_HOST + 0.5) * PAGE_BYTES / 2**30
    with pytest.raises(ConfigError) as found:
        make_runner(
            BUCKETS,
            kv_transfer_address="127.0.0.1:0",
            disk_dir=str(tmp_path),
            host_memory_gb=gib,
            disk_gb=0.1,
        )
    assert found.value.field == "kv_transfer_key"


@pytest.mark.slow
def test_more_pages_than_one_program_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(moves, "WIDTH", 4)
    world = World(tmp_path, tmp_path)
    world.export()
    assert len(world.files()) == 9
    assert world.go_on("") == (alone(), 9 * Z)


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    gib = (N_HOST + 0.5) * PAGE_BYTES / 2**30
    with pytest.raises(ConfigError, match="other users") as found:
        make_runner(BUCKETS, disk_dir=str(tmp_path), host_memory_gb=gib, disk_gb=0.1)
    assert found.value.field == "disk_dir"
    new = tmp_path / "new"
    store(new)
    assert new.stat().st_mode & 0o777 == 0o700
