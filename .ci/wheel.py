"""Serve from an installed wheel as a user does: another directory, the shipped model, one chat completion, the page.

    VENV/bin/python -I .ci/wheel.py SCRATCH

Run by an environment that has the wheel and nothing else of this repository (``-I`` keeps the
checkout off its path). Exit code 0: all of it worked; else an error says what did not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

READY_S, ANSWER_S, STOP_S = 400.0, 60.0, 30.0
OPTIONS = "--max-num-seqs 4 --max-model-len 512 --max-num-batched-tokens 128 --no-prompt-logprobs"


def get(url: str, body: dict[str, object] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=ANSWER_S) as reply:
        return reply.read()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def serving(scratch: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server in a directory of its own; its log goes to stderr when something fails."""
    home, port = scratch / "elsewhere", free_port()
    home.mkdir()
    argv = [str(Path(sys.executable).with_name("jserve")), "serve", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--compile-cache", str(home / "cache"), *OPTIONS.split()]
    with open(home / "log", "wb") as log:
        server = subprocess.Popen(argv, cwd=home, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", server
    except BaseException:
        sys.stderr.write((home / "log").read_text(errors="replace")[-5000:])
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> float:
    """Seconds until ``/ready`` is 200."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < READY_S:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode} before it was ready")
        with contextlib.suppress(OSError):
            get(url + "/ready")
            return waited
        time.sleep(0.5)
    sys.exit(f"the server is not ready after {READY_S:g} s")


def check(url: str) -> str:
    """The answer to one chat completion; the page is there too."""
    page = get(url + "/").decode()
    assert "chat.js" in page, f"this is not the page: {page[:200]!r}"
    model, *_ = json.loads(get(url + "/v1/models"))["data"]
    message = {"role": "user", "content": "Hello! Who are you?"}
    body = {"model": model["id"], "messages": [message], "max_tokens": 48, "temperature": 0}
    answer = json.loads(get(url + "/v1/chat/completions", body))
    text = answer["choices"][0]["message"]["content"]
    assert text.strip(), f"an empty answer: {answer}"
    assert answer["usage"]["completion_tokens"] > 0
    return text


def main() -> None:
    scratch = Path(sys.argv[1])
    with serving(scratch) as (url, server):
        waited = wait_ready(url, server)
        text = check(url)
        server.send_signal(signal.SIGTERM)
        code = server.wait(STOP_S)
        assert code == 0, f"SIGTERM ended the server with {code}"
    log = (scratch / "elsewhere/log").read_text().splitlines()
    kernels = next(line.split()[1:] for line in log if line.startswith("  kernels"))
    print(f"wheel: ready after {waited:.0f} s, kernels {' '.join(kernels)}, says {text!r}")


if __name__ == "__main__":
    main()
