"""``jserve serve --replicas 2`` as a user meets it: Ray started beside it, a chat over HTTP, SIGTERM."""

from __future__ import annotations

import importlib.util
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray Serve is not installed: pip install 'jserve[ray]'", allow_module_level=True)

from tests.whole.conftest import SMALL_OPTIONS, tiny_dir
from tests.whole.test_serve import Server

__all__ = ["tiny_dir"]
pytestmark = [pytest.mark.ray, pytest.mark.slow]
ANSWER_S = 120


@pytest.fixture
def server(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "600")  # a busy machine starts slowly
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    options = {**SMALL_OPTIONS, "compile_cache": cache, "structured_outputs": False}
    made = Server(tiny_dir, tmp_path / "log", **options, replicas=2)
    yield made
    if made.process.poll() is None:
        made.process.kill()


def _chat(server: Server, **more: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "the quick brown fox"}], "temperature": 0}
    body = json.dumps(asked | {"model": "tiny-llama", "max_tokens": 24} | more).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=ANSWER_S)


def _pieces(response: Any) -> list[dict[str, Any]]:
    lines = [line.decode().strip() for line in response]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events[:-1]]


def test_two_replicas_answer_a_chat_and_end_with_the_server(server: Server) -> None:
    assert server.status("/ready") == 200
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert any("raylet" in one.name() for one in family), "Ray runs beside it"
    whole = json.load(_chat(server))
    [choice] = whole["choices"]
    assert whole["usage"]["completion_tokens"] == 24
    pieces = _pieces(_chat(server, stream=True))
    text = [one["delta"].get("content") or "" for one in pieces]
    assert "".join(text) == choice["message"]["content"]
    assert sum(map(bool, text)) > 1, "it comes in pieces"
    assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "length"
    metrics = urllib.request.urlopen(f"{server.url}/metrics", timeout=10).read().decode()
    [line] = [
        one for one in metrics.splitlines() if one.startswith('jserve:replicas{state="ready"')
    ]
    assert float(line.split()[-1]) == 2
    assert server.stop() == 0
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "nothing of Ray is left"
