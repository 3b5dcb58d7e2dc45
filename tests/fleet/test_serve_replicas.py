"""Replicas as a user meets them: ``jserve serve --replicas 2`` with a chat of the openai SDK whose replica is killed in
mid-stream, and SIGTERM; values of taps; a server on somebody else's Ray; ``AsyncLLM(replicas=2)``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
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

from jserve import LLM, AsyncLLM, SamplingParams
from tests.whole import test_taps
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


def left(mark: str) -> list[list[str]]:
    """Commands of the processes that have ``mark``, after time to end."""
    end = time.monotonic() + LEFT_S
    while family(mark) and time.monotonic() < end:
        time.sleep(0.1)
    return [one.cmdline() for one in family(mark)]


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
    assert left(mark) == [], "nothing of Ray is left"


@pytest.mark.timeout(600)
def test_a_replica_gives_values_of_taps(tiny_dir: Path, mark: str, tmp_path: Path) -> None:
    """The plugin is read where the engine is, and its arrays come back over Serve's handle."""
    plugin = tmp_path / "own_taps.py"
    plugin.write_text(test_taps.PLUGIN)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    options = {**SMALL_OPTIONS, "compile_cache": cache, "allow_taps": True, "plugins": plugin}
    try:
        server = Server(tiny_dir, tmp_path / "log", **options, replicas=1)
        test_taps.check_values(server)
        assert server.stop() == 0
    finally:
        for one in family(mark):
            one.kill()


ELSE = """
import sys
import ray
from ray import serve

ray.init(address=sys.argv[1], namespace="else", log_to_driver=False)

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Else:
    def __call__(self):
        return "somebody else's"

if sys.argv[2] == "deploy":
    serve.start(proxy_location="Disabled")
    serve.run(Else.bind(), name="else", route_prefix=None)
print(*sorted(serve.status().applications), "says", serve.get_app_handle("else").remote().result())
"""
"""An application beside ours, and all that Serve runs."""


@pytest.fixture
def address(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """That of a Ray which somebody else started."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{free.getsockname()[1]}"
    flags = {"port": at.rpartition(":")[2], "node-ip-address": "127.0.0.1", "num-cpus": 1}
    flags |= {"include-dashboard": "false", "object-store-memory": 128 << 20}
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    with (tmp_path / "ray.log").open("w") as log:
        made = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in flags.items())],
            stdout=log,
            stderr=log,
        )
    try:
        while "Ray runtime started" not in (tmp_path / "ray.log").read_text():
            assert made.poll() is None, (tmp_path / "ray.log").read_text()
            time.sleep(0.2)
        yield at
    finally:
        made.terminate()
        for one in family(mark):
            one.kill()


def somebody_else(address: str, does: str) -> str:
    """The last line that ``ELSE`` prints."""
    command = [sys.executable, "-c", ELSE, address, does]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not told.returncode, told.stderr
    return told.stdout.splitlines()[-1]


@pytest.mark.timeout(900)
def test_a_server_on_somebody_elses_ray_leaves_everything_else(
    tiny_dir: Path, address: str, tmp_path: Path
) -> None:
    """It deploys an application of its own beside what is there, and takes that one with it."""
    assert somebody_else(address, "deploy") == "else says somebody else's"
    options = {**SMALL_OPTIONS, "structured_outputs": False, "ray_address": address}
    server = Server(tiny_dir, tmp_path / "log", **options, replicas=1)
    try:
        sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)
        answer = sdk.completions.create(model="tiny-llama", prompt="the quick", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert somebody_else(address, "look") == "else jserve says somebody else's"
        assert server.stop() == 0
    finally:
        server.process.kill()
    assert somebody_else(address, "look") == "else says somebody else's"


async def test_replicas_from_python_answer_as_one_engine(tiny_dir: Path, mark: str) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    options = {**SMALL_OPTIONS, "structured_outputs": False, "dtype": "float32"}
    prompts = ["the quick", "fox " * 20]
    with LLM(str(tiny_dir), **options) as one:
        whole = [out.outputs[0].token_ids for out in one.generate(prompts, params, use_tqdm=False)]
    try:
        async with AsyncLLM(str(tiny_dir), **options, replicas=2) as several:
            assert [one.state for one in several.engine.replicas()] == ["ready", "ready"]
            for prompt, ids in zip(prompts, whole, strict=True):
                told = [
                    list(o.outputs[0].token_ids) async for o in several.generate(prompt, params)
                ]
                assert told[-1] == list(ids)
                assert len(told) > 10, "step by step"
        assert left(mark) == [], "nothing of Ray is left"
    finally:
        for one in family(mark):
            one.kill()
