"""Weights and pauses through the real engine process: the operator's port, one stream that lives through both."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from jserve.cli import app
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_serve import Server
from tests.whole.test_weights import drawn, names_of

LENGTH, N = 2048, 1500
"""Of the context and of an answer: it is not over before the pause."""


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") / "run.journal"


@pytest.fixture(scope="module")
def long_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a longer context."""
    root = tmp_path_factory.mktemp("long") / "long-llama"
    shutil.copytree(tiny_dir, root)
    config = json.loads((root / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def server(long_dir: Path, journal: Path, port: int) -> Iterator[Server]:
    options = {"enable_admin": True, "admin_port": port, "journal": str(journal)}

    options |= SMALL_OPTIONS | {"max_model_len": LENGTH}
    made = Server(long_dir, journal.parent / "log", **options)
    yield made
    if made.process.poll() is None:
        made.process.kill()


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stream_lives_through_a_pause_and_other_weights(
    server: Server, long_dir: Path, tmp_path: Path, port: int, journal: Path
) -> None:
    admin = f"http://127.0.0.1:{port}"
    other = tmp_path / "other"
    shutil.copytree(long_dir, other)
    save_file(names_of(drawn(long_dir, 5), long_dir), other / "model.safetensors")
    asked = {"prompt": "the fox", "max_tokens": N, "temperature": 0, "ignore_eos": True}
    asked |= {"return_token_ids": True}
    [alone] = json.load(post(f"{server.url}/v1/completions", asked))["choices"]
    assert alone["weight_versions"] == [{"version": "0", "start": 0, "end": N}]

    with post(f"{server.url}/v1/completions", asked | {"stream": True}) as stream:
        events = (line[6:] for line in stream if line.startswith(b"data: {"))
        told = [json.loads(next(events))["choices"][0]]
        assert json.load(post(f"{admin}/pause", {"mode": "keep"}))["paused"]
        update = {"weight_dir": str(other), "version": "step-1", "running": "mix"}
        assert json.load(post(f"{admin}/update_weights", update))["version"] == "step-1"
        assert not json.load(post(f"{admin}/resume", {}))["paused"]
        told += [json.loads(event)["choices"][0] for event in events]
    spans = [span for choice in told for span in choice.get("weight_versions", ())]
    ids = [i for choice in told for i in choice.get("token_ids", ())]
    assert len(ids) == spans[-1]["end"] == N
    assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans)][:-1]
    first = max(s["end"] for s in spans if s["version"] == "0")
    assert 0 < first < N, "it was over before the pause"
    assert {s["version"] for s in spans if s["start"] >= first} == {"step-1"}
    assert ids[:first] == alone["token_ids"][:first]
    assert ids != alone["token_ids"]

    metrics = urllib.request.urlopen(f"{server.url}/metrics", timeout=10).read().decode()
    counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    of = {name.split("{")[0]: float(value) for name, value in counts.items()}
    assert of["jserve:weight_updates_total"] == 1
    assert of["jserve:weight_update_seconds_total"] > 0
    assert server.stop() == 0
    actions = [json.loads(line) for line in journal.read_bytes().splitlines()]
    assert [e["action"] for e in actions if e["type"] == "operated"] == ["pause", "resume"]
    done = CliRunner().invoke(app, ["replay", str(journal)])
    assert done.exit_code == 0, done.output
    assert "every decision as recorded" in done.stdout
