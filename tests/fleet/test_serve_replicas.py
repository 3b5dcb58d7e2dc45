"""``jserve serve --replicas 2`` as a user meets it: Ray beside it, a chat of the openai SDK whose replica is killed
in mid-stream, SIGTERM."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray Serve is not installed: pip install 'jserve[ray]'", allow_module_level=True)

from tests.whole.conftest import SMALL_OPTIONS, tiny_dir
from tests.whole.test_serve import Server

__all__ = ["tiny_dir"]
pytestmark = [pytest.mark.ray, pytest.mark.slow]
MARK, LEFT_S = "JSERVE_TEST_RUN", 30.0
N_TOKENS, N_BEFORE = 1500, 40
"""Tokens of an answer, and pieces of it that came before its replica is killed."""


@pytest.fixture
def long_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with a context in which an answer takes seconds."""
    made = Path(shutil.copytree(tiny_dir, tmp_path / "tiny-llama"))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return made


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of the server, which all that it starts inherit."""
    root, made = str(Path(__file__).parents[2]), uuid.uuid4().hex
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "600")  # a busy machine starts slowly
    monkeypatch.setenv(MARK, made)
    return made


def family(mark: str) -> list[psutil.Process]:
    """All processes that have ``mark`` but this one."""
    found = []
    for one in psutil.process_iter():
        try:
            if one.environ().get(MARK) == mark and one.pid != os.getpid():
                found.append(one)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def server(long_dir: Path, mark: str, tmp_path: Path) -> Iterator[Server]:
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    options = {**SMALL_OPTIONS, "compile_cache": cache, "structured_outputs": False}
    options |= {"max_model_len": 2048, "dtype": "float32", "enable_admin": True, "admin_port": 0}
    try:
        yield Server(long_dir, tmp_path / "log", **options, replicas=2)
    finally:
        for one in family(mark):
            one.kill()


def replicas(server: Server) -> list[dict[str, Any]]:
    """As the operator's port has them."""
    at = re.search(r"the operator's port is (http://\S+)", server.log.read_text())
    assert at is not None, server.log.read_text()
    found = urllib.request.urlopen(at[1].rstrip("/") + "/replicas", timeout=30)
    return json.load(found)["replicas"]


def listened(response: Any) -> list[bytes]:
    """The bytes of ``response``, as they are read."""
    heard: list[bytes] = []
    read = response.iter_bytes

    def iter_bytes(*args: Any) -> Iterator[bytes]:
        for part in read(*args):
            heard.append(part)
            yield part

    response.iter_bytes = iter_bytes
    return heard


def busy(server: Server) -> int:
    """The process of the replica that works, once it says so."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        found = [one["pid"] for one in replicas(server) if one["running"]]
        if found:
            [pid] = found
            return pid
        time.sleep(0.02)
    raise AssertionError("no replica works")


def test_a_chat_outlives_its_replica_and_nothing_outlives_the_server(
    server: Server, mark: str
) -> None:
    assert len(family(mark)) > 4, "Ray runs beside it"
    assert [one["state"] for one in replicas(server)] == ["ready", "ready"]
    sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=240)
    asked: dict[str, Any] = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": N_TOKENS,
        "extra_body": {"ignore_eos": True},
    }
    raw = sdk.chat.completions.with_raw_response.create(**asked)
    assert raw.headers.get("x-jserve-resumed") is None
    [whole] = raw.parse().choices
    assert whole.finish_reason == "length"

    stream = sdk.chat.completions.create(**asked, stream=True)
    heard = listened(stream.response)
    text, ends, killed = "", [], 0
    for n, chunk in enumerate(stream):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        ends += [choice.finish_reason] if choice.finish_reason else []
        if n == N_BEFORE:
            killed = busy(server)
            os.kill(killed, signal.SIGKILL)
    assert text == whole.message.content
    assert ends == ["length"]
    assert b"".join(heard).count(b": x-jserve-resumed: 1\n\n") == 1, (
        "a comment, which the SDK skips"
    )
    assert killed not in [one["pid"] for one in replicas(server)]

    assert server.stop() == 0
    end = time.monotonic() + LEFT_S
    while family(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert [one.cmdline() for one in family(mark)] == [], "nothing of Ray is left"
