"""Real clients in environments of their own, against ``jserve serve`` with the shipped model.

Each script in ``scripts/`` talks to a server as that library's users do and fails on the first thing
that is not as they expect. Slow: every environment is a ``pip install``; one that cannot be made is a
skip that says why.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from jserve import build
from tests.whole.test_serve import Server

SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_S, RUN_S = 1500, 600
OPTIONS = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 128}
ENVIRONMENTS = {
    "openai 3": ["openai>=3,<4", "pydantic"],
    "openai 2": ["openai>=2,<3", "pydantic"],
    "clients": ["anthropic", "langchain-openai", "instructor", "litellm", "mcp"],
    "lm-eval": ["torch==2.13.0", "lm-eval[api]", "transformers>=5", "accelerate"],
    "guidellm": ["torch==2.13.0", "guidellm"],
}
RUNS = [
    ("openai 3", "openai_sdk.py"),
    ("openai 2", "openai_sdk.py"),
    ("clients", "anthropic_sdk.py"),
    ("clients", "langchain_sdk.py"),
    ("clients", "instructor_sdk.py"),
    ("clients", "litellm_sdk.py"),
    ("lm-eval", "lm_eval_harness.py"),
]


@functools.cache
def python(name: str) -> str:
    """The interpreter of an environment with the packages of ``name``; skips where pip fails."""
    root = Path(tempfile.mkdtemp(prefix="jserve-sdk-"))
    venv.create(root, with_pip=True)
    path = str(root / "bin" / "python")
    for package in ENVIRONMENTS[name]:  # in order: torch first decides which build others take
        done = subprocess.run(
            [path, "-m", "pip", "install", "-q", package],
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
        if done.returncode:
            pytest.skip(f"pip cannot install {package}: {done.stderr.strip()[-200:]}")
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("served")
    made = Server(build.shipped(), root / "log", compile_cache=str(root / "cache"), **OPTIONS)
    yield made
    if made.process.poll() is None:
        assert made.stop() == 0


def told(command: list[str]) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "script"), RUNS)
def test_a_client_library_finds_what_it_expects(served: Server, name: str, script: str) -> None:
    arguments = [served.url, "jserve-mini", str(build.shipped())]
    said = told([python(name), str(SCRIPTS / script), *arguments])
    if "skip:" in said:
        pytest.skip(said.strip())
    assert said.strip().splitlines()[-1].startswith("ok")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_guidellm_drives_it_without_an_error(served: Server, tmp_path: Path) -> None:
    import json

    command = Path(python("guidellm")).parent / "guidellm"
    report = tmp_path / "report.json"
    told(
        [
            str(command),
            *("run", "--disable-progress", "--profile", "kind=concurrent,streams=4"),
            *("--backend", f"kind=openai_http,target={served.url},model=jserve-mini"),
            *("--constraint", "kind=max_requests,count=12"),
            *("--tokenizer", f"kind=hf_auto,model={build.shipped()}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={report}"),
        ]
    )
    (done,) = json.loads(report.read_text())["benchmarks"]
    requests = done["metrics"]["request_totals"]
    assert requests["successful"] >= 12
    assert requests["errored"] == 0


def test_every_script_is_run() -> None:
    assert {script for _, script in RUNS} == {path.name for path in SCRIPTS.glob("*.py")}
    assert {name for name, _ in RUNS} | {"guidellm"} == set(ENVIRONMENTS)
