"""``jserve serve`` as a user meets it: two processes, the openai SDK, bad input, a killed engine, SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.whole.conftest import SMALL_OPTIONS

START_S, STOP_S = 280, 60


class Server:
    """A running ``jserve serve`` with its address."""

    def __init__(self, directory: Path, log: Path, **options: object) -> None:
        flags = [
            f"--{k.replace('_', '-')}={v}" for k, v in options.items() if not isinstance(v, bool)
        ]
        flags += [
            f"--{'' if v else 'no-'}{k.replace('_', '-')}"
            for k, v in options.items()
            if v in (True, False) and isinstance(v, bool)
        ]
        command = [sys.executable, "-m", "jserve.cli", "serve", str(directory), "--port=0", *flags]
        self.log = log
        with log.open("w") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
        self.banner = self._read_banner()
        self.url = re.search(r"http://\S+", self.banner)[0]  # type: ignore[index]

    def _read_banner(self) -> str:
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("curl"):
                return "".join(lines)
        raise AssertionError(f"no banner: {''.join(lines)} {self.log.read_text()}")

    def status(self, path: str) -> int:
        try:
            return urllib.request.urlopen(self.url + path, timeout=10).status
        except urllib.error.HTTPError as e:
            return e.code

    def engine(self) -> psutil.Process:
        [child] = [
            c for c in psutil.Process(self.process.pid).children() if "engine" in c.cmdline()
        ]
        return child

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("serve")
    # The session's cache, where there is one: what tests of the other doors compiled is there.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(root / "cache"))
    options = {**SMALL_OPTIONS, "compile_cache": cache, "max_restarts": 2}
    made = Server(tiny_dir, root / "log", **options)
    yield made
    if made.process.poll() is None:
        made.process.kill()


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_the_banner_says_what_runs_where(server: Server) -> None:
    for word in ("tiny-llama", "context 160", "cpu", "KV", "programs", "curl -N http://127.0.0.1"):
        assert word in server.banner
    assert server.status("/ready") == 200
    assert server.status("/health") == 200


def test_the_curl_line_works_as_pasted(server: Server) -> None:
    line = server.banner[server.banner.index("curl") :].strip().replace("curl -N", "curl -sN")
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert told.stdout.rstrip().endswith("data: [DONE]")


def test_a_stream_is_the_answer_in_pieces(server: Server) -> None:
    sdk = client(server)
    [model] = list(sdk.models.list())
    asked = {
        "model": model.id,
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 20,
    }
    whole = sdk.chat.completions.create(**asked)
    pieces = [
        c.choices[0].delta.content or ""
        for c in sdk.chat.completions.create(**asked, stream=True)
        if c.choices
    ]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20


def test_metrics_say_that_nothing_compiled_while_serving(server: Server) -> None:
    client(server).completions.create(model="tiny-llama", prompt="x", max_tokens=4)
    metrics = ""
    for _ in range(20):
        metrics = urllib.request.urlopen(server.url + "/metrics", timeout=10).read().decode()
        if "compiles_after_ready" in metrics:
            break
        time.sleep(0.5)
    assert re.search(r"^jserve:compiles_after_ready_total\S* 0.0$", metrics, re.M)


def test_bad_input_is_refused_by_name(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client(server).completions.create(model="tiny-llama", prompt="x", temperature=7)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client(server).completions.create(model="gpt-9", prompt="x")


@pytest.mark.slow
def test_a_killed_engine_comes_back_and_its_requests_go_on(server: Server) -> None:
    asked = {"model": "tiny-llama", "prompt": "x", "max_tokens": 150, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client(server).completions.create(**asked).choices[0].text
    stream = iter(client(server).completions.create(**asked, stream=True))
    text = next(stream).choices[0].text
    server.engine().kill()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == whole
    assert server.status("/ready") == 200


def test_sigterm_ends_both_processes_cleanly(server: Server) -> None:
    engine = server.engine()
    assert server.stop() == 0
    engine.wait(10)
    assert not psutil.pid_exists(server.process.pid) or server.process.returncode == 0


@pytest.mark.slow
def test_broken_weights_end_with_code_2_before_the_port_opens(
    tiny_dir: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x20\x00\x00\x00\x00\x00\x00\x00{")
    command = [sys.executable, "-m", "jserve.cli", "serve", str(tmp_path), "--port=0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "300"}
    )
    assert ended.returncode == 2
    assert "model.safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
