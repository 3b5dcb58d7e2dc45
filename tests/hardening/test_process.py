"""The process and its machine: descriptors, disks that are full, logs that cannot be written, drains."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from jserve import faults
from jserve.api.http.server import SPARE_FILES, _allow_files
from jserve.errors import ConfigError
from jserve.runner.disk import READ_ONLY_S, DiskStore
from tests.api.fake import FakeEngine, chat_body, until
from tests.api.http.test_api_server import CHAT, started, stream
from tests.whole.conftest import SMALL_OPTIONS


async def test_the_port_stays_open_for_the_router_to_notice():
    engine = FakeEngine()
    async with aiohttp.ClientSession() as http:
        running = await started(engine, drain_delay_s=0.5)
        begin = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: engine.draining)
        async with http.get(running.url + "/ready") as response:
            assert response.status == 503
        async with http.post(running.url + CHAT, json=chat_body()) as response:
            assert response.status == 503
            assert response.headers["Connection"] == "close"
        await asyncio.sleep(0.2)
        async with http.get(running.url + "/health") as response:
            assert response.status == 200, "idle, and still there"
        assert await running.code() == 0
        assert time.monotonic() - begin >= 0.5


async def test_a_stream_under_way_outlives_the_delay():
    engine = FakeEngine(("x" * 20,))
    engine.delay = 0.02
    async with aiohttp.ClientSession() as http:
        running = await started(engine, drain_delay_s=0.05)
        task = asyncio.create_task(stream(http, running.url))
        await until(lambda: engine.records and engine.records[0].n_sent > 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await task)[1][-1] == "[DONE]"
        assert await running.code() == 0


def test_the_limit_of_open_files_follows_the_connections(monkeypatch, caplog):
    limits, set_ = [1024, 5000], []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: set_.append(both))
    _allow_files(4000)
    assert set_ == [(4000 + SPARE_FILES, 5000)]
    assert not caplog.records
    _allow_files(800)
    assert len(set_) == 1, "enough as it is"
    _allow_files(6000)
    assert set_[-1] == (5000, 5000)
    assert "5000 open files are allowed" in caplog.text


FULL_TABLE = """
import asyncio, resource, socket, sys
import aiohttp
from tests.api.fake import FakeEngine, live

async def main():
    async with live(FakeEngine()) as srv:
        assert (await srv.get("/health"))[0] == 200  # the connection that is kept
        port = int(srv.url.rsplit(":", 1)[1])
        socks = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        import os
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, hard))
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=1)
                socks.append(sock)
            except OSError:
                break
        await asyncio.sleep(0.3)
        for _ in range(5):
            assert (await srv.get("/health"))[0] == 200, "a kept connection is still answered"
        for sock in socks:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await asyncio.sleep(1.3)
        async with aiohttp.ClientSession() as http:
            async with http.get(srv.url + "/health") as response:
                assert response.status == 200, "and new ones are accepted again"
    print("ok")

asyncio.run(main())
"""


@pytest.mark.slow
def test_running_out_of_descriptors_is_survived():
    done = subprocess.run(
        [sys.executable, "-c", FULL_TABLE], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def store(tmp_path: Path, clock=time.monotonic) -> DiskStore:
    return DiskStore(tmp_path, "model", page_bytes=8, max_bytes=10_000, clock=clock)


def test_a_disk_that_is_full_makes_the_tier_read_only_for_a_while(tmp_path):
    now = [0.0]
    kept = store(tmp_path, lambda: now[0])
    assert kept.put(b"a" * 16, b"12345678")
    with faults.armed("disk.write", 1) as shot:
        assert not kept.put(b"b" * 16, b"12345678")
    assert shot.fired
    assert kept.read_only
    assert not kept.put(b"c" * 16, b"12345678")
    assert kept.get(b"a" * 16) == b"12345678", "what is there is still read"
    now[0] = READ_ONLY_S + 1
    assert kept.put(b"c" * 16, b"12345678")
    assert not list(tmp_path.rglob("*.partial"))


def test_a_disk_that_cannot_be_read_is_a_miss(tmp_path):
    kept = store(tmp_path)
    kept.put(b"a" * 16, b"12345678")
    with faults.armed("disk.read", 1):
        assert kept.get(b"a" * 16) is None
    assert len(kept) == 0
    assert faults.POINTS["disk.write"][0].raises("x").errno == errno.ENOSPC  # type: ignore[attr-defined]


def test_a_compile_cache_that_others_can_write_is_refused(tmp_path):
    from jserve.runner.programs import use_compile_cache

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="written by other users") as caught:
        use_compile_cache(shared)
    assert caught.value.field == "compile_cache"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="compile_cache"):
        use_compile_cache(tmp_path / "file" / "below")


def test_the_tree_never_unpickles_evaluates_or_asks_for_the_wall_clock():
    """Nothing a client or a model's file holds is executed; time limits never follow the wall clock."""
    root = Path(__file__).parent.parent.parent / "jserve"
    banned = ("pickle.", "yaml.load(", "torch.load", "allow_pickle=True", " eval(", " exec(")
    # When a thing was made, or a limit is over, for clients.
    wall = {
        "api/http/error_format.py",
        "api/openai/usage.py",
        "api/request/parsed.py",
        "api/responses/reply.py",
        "engine/kv_events.py",
    }
    # It reads what only this user, or root, can have written (tests/runner/test_program_files.py).
    unpickles = "runner/program_files.py"
    for path in root.rglob("*.py"):
        source = path.read_text()
        name = path.relative_to(root).as_posix()
        for word in banned:
            allowed = word == "pickle." and name == unpickles
            assert allowed or word not in source, f"{path.name}: {word}"
        assert "time.time(" not in source or name in wall, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_log_that_cannot_be_written_stops_nothing(tiny_dir, tmp_path):
    from tests.whole.test_serve import Server

    options = {**SMALL_OPTIONS, "compile_cache": str(tmp_path / "cache"), "log_level": "debug"}
    server = Server(tiny_dir, Path("/dev/full"), **options)
    assert server.status("/ready") == 200
    assert server.status("/nowhere") == 404
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_process_that_dies_of_a_fault_point_comes_back(tiny_dir, tmp_path, monkeypatch):
    """The whole of ``jserve serve``, with a point armed from the environment."""
    from tests.whole.test_serve import Server, client

    monkeypatch.setenv("JSERVE_FAULTS", "sched.commit@12")
    options = {**SMALL_OPTIONS, "compile_cache": str(tmp_path / "cache"), "max_restarts": 3}
    server = Server(tiny_dir, tmp_path / "log", **options)
    for _ in range(3):
        answer = client(server).completions.create(model="tiny-llama", prompt="x", max_tokens=8)
        assert answer.choices[0].finish_reason == "length", "it goes on in the next engine"
    told = urllib.request.urlopen(server.url + "/metrics", timeout=10).read().decode()
    assert server.stop() == 0
    deaths = re.search(r"^jserve:engine_deaths_total\S* (\S+)$", told, re.M)
    assert deaths is not None
    assert float(deaths[1]) > 0, "the point never fired"
    assert "fault points are armed: sched.commit@12" in (tmp_path / "log").read_text()
