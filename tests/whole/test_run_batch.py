"""``jserve run-batch`` with the shipped model: interrupted, resumed, the same answers as in one go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
N = 30


def command(source: Path, target: Path) -> list[str]:
    options = ["--max-num-seqs=2", "--concurrency=3", "-o", str(target)]
    return [sys.executable, "-m", "jserve.cli", "run-batch", str(source), *options]


def answers(path: Path) -> dict[str, str]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["custom_id"] for r in records}) == len(records)
    assert all(r["error"] is None and r["response"]["status_code"] == 200 for r in records)
    bodies = {r["custom_id"]: r["response"]["body"] for r in records}
    return {name: b["choices"][0]["message"]["content"] for name, b in bodies.items()}


def batch(path: Path, n: int) -> Path:
    def line(i: int) -> str:
        messages = [{"role": "user", "content": f"What is {i} + 30?"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 120}
        url = "/v1/chat/completions"
        return json.dumps({"custom_id": f"q{i}", "method": "POST", "url": url, "body": body})

    path.write_text("".join(line(i) + "\n" for i in range(n)))
    return path


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    source, target = batch(tmp_path / "in.jsonl", N), tmp_path / "out.jsonl"
    running = subprocess.Popen(command(source, target), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while not (target.exists() and target.read_bytes().count(b"\n") >= 3):
        assert running.poll() is None, running.stderr.read() if running.stderr else ""
        assert time.monotonic() < end
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    first = answers(target)
    assert running.returncode == 130, said
    assert 3 <= len(first) < N
    assert "run the same command again" in said
    assert "Traceback" not in said
    done = subprocess.run(command(source, target), capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert f"{N} of {N} lines answered, 0 failed" in done.stderr
    found = answers(target)
    assert {name: found[name] for name in first} == first
    assert {*found} == {f"q{i}" for i in range(N)}
    assert sum(found[f"q{i}"] == f"{i} + 30 = {i + 30}" for i in range(N)) > N / 2
