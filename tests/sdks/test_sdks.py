"""Real clients in environments of their own, against ``jserve serve`` with the shipped model.

Each script in ``scripts/`` talks to a server as that library's users do and fails on the first thing
that is not as they expect. Slow: every environment is a ``pip install``. They are made two at a time
while the server starts; what needs torch or transformers finds those of this environment. One that
cannot be made is a skip that says why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from jserve import build
from tests.whole.test_serve import Server

SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_S, RUN_S = 600, 300
OPTIONS = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 128}
ENVIRONMENTS = {
    "openai 3": ["openai>=3,<4"],
    "openai 2": ["openai>=2,<3"],
    "anthropic": ["anthropic"],
    "langchain": ["langchain-openai"],
    "instructor": ["instructor"],
    "litellm": ["litellm", "mcp"],  # in turn: its own import needs mcp, which it does not ask for
    "lm-eval": ["lm-eval[api]", "accelerate"],
    "guidellm": ["guidellm"],
}
BORROW = {"lm-eval", "guidellm"}
"""Environments that find packages of this one: torch is most of theirs."""
RUNS = [
    ("openai 3", "openai_sdk.py"),
    ("openai 2", "openai_sdk.py"),
    ("anthropic", "anthropic_sdk.py"),
    ("langchain", "langchain_sdk.py"),
    ("instructor", "instructor_sdk.py"),
    ("litellm", "litellm_sdk.py"),
    ("lm-eval", "lm_eval_harness.py"),
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def made(name: str, root: Path) -> Path | str:
    """The interpreter of a new environment in ``root``, or why there is none."""
    venv.create(root, with_pip=True)
    if name in BORROW:
        inside = sysconfig.get_path("purelib", "venv", {"base": str(root)})
        (Path(inside) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    python = root / "bin" / "python"
    for package in ENVIRONMENTS[name]:
        command = [python, "-m", "pip", "install", "-q", "--no-compile", package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            return f"pip cannot install {package}: {done.stderr.strip()[-200:]}"
    return python


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The interpreter of an environment by name; skips where it could not be made."""
    root = tmp_path_factory.mktemp("sdks")
    pool = ThreadPoolExecutor(2)
    all_: dict[str, Future[Path | str]] = {
        name: pool.submit(made, name, root / name.replace(" ", "-")) for name in ENVIRONMENTS
    }

    def wait(name: str) -> Path:
        found = all_[name].result()
        if isinstance(found, str):
            pytest.skip(found)
        return found

    yield wait
    pool.shutdown(cancel_futures=True)
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def served(python: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("served")
    server = Server(build.shipped(), root / "log", compile_cache=str(root / "cache"), **OPTIONS)
    yield server
    if server.process.poll() is None:
        assert server.stop() == 0


def told(*command: object) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=RUN_S, env=env
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("name", "script"), RUNS)
def test_a_client_library_finds_what_it_expects(
    python: Callable[[str], Path], served: Server, name: str, script: str
) -> None:
    said = told(python(name), SCRIPTS / script, served.url, "jserve-mini", build.shipped())
    assert said.strip().splitlines()[-1].startswith("ok")


@pytest.mark.parametrize(
    ("profile", "n"),
    [("kind=concurrent,streams=4", 12), ("kind=throughput,max_concurrency=256", 256)],
    ids=["4 streams", "all at once"],
)
def test_guidellm_drives_it_without_an_error(
    python: Callable[[str], Path], served: Server, tmp_path: Path, profile: str, n: int
) -> None:
    report = tmp_path / "report.json"
    told(
        python("guidellm").parent / "guidellm",
        *("run", "--disable-progress", "--profile", profile),
        *("--backend", f"kind=openai_http,target={served.url},model=jserve-mini"),
        *("--constraint", f"kind=max_requests,count={n}"),
        *("--tokenizer", f"kind=hf_auto,model={build.shipped()}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    (done,) = json.loads(report.read_text())["benchmarks"]
    requests = done["metrics"]["request_totals"]
    assert requests["successful"] >= n
    assert requests["errored"] == 0


@pytest.mark.parametrize(
    ("n", "rate"),
    [(12, ["--max-concurrency", "4"]), (512, ["--request-rate", "inf"])],
    ids=["4 streams", "all at once"],
)
def test_vllms_load_generator_drives_it_without_an_error(
    served: Server, tmp_path: Path, n: int, rate: list[str]
) -> None:
    found = shutil.which("vllm")
    if found is None:
        pytest.skip("there is no vllm on the PATH: it is too large to install for a test")
    # Its command wants a distribution called vllm; builds for CPUs have another name.
    run = (
        "from vllm.benchmarks.serve import add_cli_args, main;"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser;"
        "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
    )
    report = tmp_path / "report.json"
    told(
        *(Path(found).parent / "python", "-c", run, "--disable-tqdm"),
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", served.url, "--model", "jserve-mini", "--tokenizer", build.shipped()),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"),
        *("--num-prompts", str(n), *rate, "--ignore-eos"),
        *("--save-result", "--save-detailed", "--result-filename", report),
    )
    done = json.loads(report.read_text())
    assert (done["completed"], done["failed"]) == (n, 0), set(done["errors"])
    assert done["total_output_tokens"] == n * 16


def test_every_script_is_run() -> None:
    assert {script for _, script in RUNS} == {path.name for path in SCRIPTS.glob("*.py")}
