"""How the kernels come into an installation: which compiler is found, what pip is asked for, what the build hook does,
and that an installation serves whatever became of it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jserve import cli
from jserve.native import compile as compiling, library
from jserve.native.compile import FOLDER, NativeBuildError, find_compiler, platform_of, zig
from tests.native.conftest import level_of

ROOT = FOLDER.parent.parent
PACKAGING = FOLDER / "packaging"
HERE = find_compiler()
needs_compiler = pytest.mark.skipif(HERE is None, reason="no C compiler")
TARGETS = list(compiling.ZIG_TARGETS)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "JSERVE_NO_NATIVE", "JSERVE_WHEEL_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)


def executable(folder: Path, name: str, text: str = "#!/bin/sh\nexit 3\n") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_users_compiler_comes_first_then_the_machines_then_zig(
    bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_compiler() is None
    monkeypatch.setattr(compiling, "zig_platform", lambda: TARGETS[0])
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name == "ziglang")
    assert find_compiler() == zig(TARGETS[0])
    gcc = executable(tmp_path, "gcc")
    assert find_compiler() == [str(gcc)]
    assert find_compiler("ccache clang -m64") == ["ccache", "clang", "-m64"]


def test_a_wheel_is_named_after_what_its_library_was_compiled_for() -> None:
    assert [platform_of(zig(name)) for name in TARGETS] == TARGETS
    own = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert platform_of(["/usr/bin/gcc"]) == own
    with pytest.raises(NativeBuildError, match="win_amd64"):
        zig("win_amd64")


@pytest.mark.parametrize(
    ("system", "machine", "target"),
    [
        ("Linux", "x86_64", "x86_64-linux-gnu.2.17"),
        ("Linux", "aarch64", "aarch64-linux-gnu.2.17"),
        ("Darwin", "arm64", "aarch64-macos.11.0"),
        ("Linux", "s390x", ""),
        ("Windows", "x86_64", ""),
    ],
)
def test_zig_is_for_machines_that_it_was_tried_for(
    system: str, machine: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.platform_module, "system", lambda: system)
    monkeypatch.setattr(compiling.platform_module, "machine", lambda: machine)
    assert compiling.ZIG_TARGETS.get(compiling.zig_platform(), "") == target


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the packaging, over a hatchling that does nothing: it need not be installed here."""
    made = {n: types.ModuleType(n) for n in ("hatchling", "hatchling.build")}
    for ask in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        setattr(made["hatchling.build"], ask, lambda settings: ["editables"])
    made["hatchling"].build = made["hatchling.build"]  # type: ignore[attr-defined]
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    for known in (*made.values(), interface):
        monkeypatch.setitem(sys.modules, known.__name__, known)
    monkeypatch.syspath_prepend(str(PACKAGING))
    monkeypatch.delitem(sys.modules, "backend", raising=False)
    spec = importlib.util.spec_from_file_location(name, PACKAGING / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "backend", raising=False)
    return module


def test_pip_is_asked_for_zig_only_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = loaded("backend", monkeypatch)
    of = compiling
    monkeypatch.setattr(backend, "compiling", lambda: of)
    monkeypatch.setattr(of, "zig_platform", lambda: TARGETS[0])
    monkeypatch.setattr(of.importlib.util, "find_spec", lambda name: None)
    for name in ("CC", "JSERVE_NO_NATIVE", "JSERVE_WHEEL_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    zig_too = ["editables", f"ziglang=={of.ZIG}"]
    asks = (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable)
    assert [ask() for ask in asks] == [zig_too, zig_too]
    executable(tmp_path, "cc")
    assert [ask() for ask in asks] == [["editables"], ["editables"]]
    monkeypatch.setenv("JSERVE_WHEEL_PLATFORM", TARGETS[1])
    assert backend.get_requires_for_build_wheel() == zig_too
    monkeypatch.setenv("JSERVE_NO_NATIVE", "1")
    assert backend.get_requires_for_build_wheel() == ["editables"]
    monkeypatch.delenv("JSERVE_NO_NATIVE")
    monkeypatch.setattr(of, "zig_platform", lambda: "")
    assert backend.get_requires_for_build_wheel() == ["editables"]


def hook(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any], list[str]]:
    """(the hook, its build data, warnings)."""
    made, said = loaded("hook", monkeypatch).NativeKernels(), []
    made.app = types.SimpleNamespace(display_warning=said.append)
    return made, {"force_include": {}}, said


@needs_compiler
@pytest.mark.slow
def test_a_wheel_takes_the_library_and_the_platform_of_its_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, data, said = hook(monkeypatch)
    made.initialize("standard", data)
    [(file, name)] = data["force_include"].items()
    assert name == f"jserve/native/{compiling.library_path().name}"
    assert not data["pure_python"]
    assert data["tag"] == f"py3-none-{platform_of(HERE or [])}"
    assert library.load(Path(file)).level in library.LEVELS
    made.finalize("standard", data, "")
    assert not Path(file).exists()
    assert not said


MADE_FOR = {
    "manylinux_2_17_x86_64": (b"\x7fELF", 18, b"\x3e\x00"),
    "manylinux_2_17_aarch64": (b"\x7fELF", 18, b"\xb7\x00"),
    "macosx_11_0_arm64": (b"\xcf\xfa\xed\xfe", 4, b"\x0c\x00\x00\x01"),
    "macosx_11_0_x86_64": (b"\xcf\xfa\xed\xfe", 4, b"\x07\x00\x00\x01"),
}
"""How a library of a platform begins, and where it names which processor."""


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
@pytest.mark.parametrize("platform", TARGETS)
def test_a_wheel_for_another_machine(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of CONTRIBUTING.md: what the hook puts into the wheel is of that platform, with all handlers."""
    monkeypatch.setenv("JSERVE_WHEEL_PLATFORM", platform)
    made, data, said = hook(monkeypatch)
    made.initialize("standard", data)
    assert not said
    [(file, name)] = data["force_include"].items()
    library_of_it = Path(file).read_bytes()
    made.finalize("standard", data, "")
    assert name == f"jserve/native/{compiling.library_name(platform)}"
    assert data["tag"] == f"py3-none-{platform}"
    begin, at, processor = MADE_FOR[platform]
    assert library_of_it.startswith(begin)
    assert library_of_it[at:].startswith(processor)
    assert all(handler.encode() in library_of_it for handler in library.HANDLERS.values())
    assert compiling.source_hash().encode() in library_of_it


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_failure_is_a_warning_and_a_wheel_for_any_platform(
    version: str, bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "TIMEOUT_S", 10)
    made, data, said = hook(monkeypatch)
    made.initialize(version, data)
    monkeypatch.setenv("CC", str(executable(tmp_path, "mycc")))
    made.initialize(version, data)
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    made.initialize(version, data)
    made.finalize(version, data, "")
    assert data == {"force_include": {}}
    for line, reason in zip(said, ("no C compiler", "mycc fails", "cannot be run"), strict=True):
        assert reason in line
        assert line.startswith("jserve is installed without native kernels: ")
    monkeypatch.setenv("JSERVE_NO_NATIVE", "1")
    made.initialize(version, data)
    assert len(said) == 3


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation whose library is in a folder of this test's."""
    path = tmp_path / "libjserve.so"
    monkeypatch.setattr(compiling, "library_path", lambda: path)
    monkeypatch.setattr(library, "library_path", lambda: path)
    library.forget()
    yield path
    library.forget()


@pytest.mark.slow
@needs_compiler
def test_jserve_native_builds_and_repairs(elsewhere: Path) -> None:
    elsewhere.write_bytes(b"\x7fELF and no more")
    with pytest.raises(library.NoLibrary, match="cannot be loaded"):
        library.installed()
    built = CliRunner().invoke(cli.app, ["native"], env={"CC": ""})
    assert built.exit_code == 0, built.output
    assert built.stdout.strip() == f"{elsewhere}: level {library.installed().level}"


@pytest.mark.parametrize(
    ("cc", "reason"), [("", "no C compiler"), ("false", "false fails"), ("/no/cc", "cannot be run")]
)
def test_jserve_native_says_why_it_cannot(
    cc: str, reason: str, bare: None, elsewhere: Path, tmp_path: Path
) -> None:
    executable(tmp_path, "false")
    told = CliRunner().invoke(cli.app, ["native"], env={"CC": cc})
    assert told.exit_code == 2
    assert reason in told.stderr
    assert not elsewhere.exists()


def test_who_lacks_kernels_is_told_what_builds_them(elsewhere: Path) -> None:
    with pytest.raises(library.NoLibrary, match="no library was built; `jserve native` builds it"):
        library.installed()


SERVES = """
import json, sys
from jserve import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", dtype="bfloat16", max_num_seqs=2, max_num_batched_tokens=32,
          max_model_len=160, compile_cache="", prompt_logprobs=False, structured_outputs=False)
[out] = llm.generate(["the quick"], SamplingParams(max_tokens=4, ignore_eos=True))
facts = {k: llm.info[k] for k in ("kernels", "no_kernels")}
import jserve
print(json.dumps(facts | {"n": len(out.outputs[0].token_ids), "at": jserve.__file__}))
"""
NO_COMPILER = {"PATH": "/nowhere"}
INSTALLED: dict[str, tuple[dict[str, str], str]] = {
    "with a compiler": ({}, "."),
    "without one, zig from the index": (NO_COMPILER, "."),
    "without one, off line": (NO_COMPILER, "--no-index"),
    "with a broken one": ({"CC": "/bin/false"}, "."),
    "without kernels, as asked for": ({"JSERVE_NO_NATIVE": "1"}, "."),
    "with an older library": ({}, "stale"),
    "from a wheel": ({}, "wheel"),
}
"""Environment and way of each."""
REASONS = {
    "without one, off line": "no library was built",
    "with a broken one": "no library was built",
    "without kernels, as asked for": "no library was built",
    "with an older library": "built from other sources",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows of this tree."""
    root = tmp_path_factory.mktemp("checkout")
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    for name in filter(None, listed.stdout.split("\0")):
        target = root / name
        if (ROOT / name).is_file() and not name.startswith(("bench/", "tests/")):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    return root


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", INSTALLED)
def test_whatever_became_of_the_kernels_it_serves_and_says_so(
    case: str, checkout: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    environ, way = INSTALLED[case]
    for old in (checkout / "jserve/native").glob("libjserve.*"):
        old.unlink()
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # The dependencies of this environment, jserve apart.
    (site / "deps.pth").write_text(sysconfig.get_path("purelib") + "\n")
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CC")}
    env = {**base, **environ}

    def pip(*args: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "pip", *args, "--no-deps", "-q"]
        return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)

    if pip(
        "install", "hatchling", "editables", "pathspec", "pluggy", "trove-classifiers", "packaging"
    ).returncode:
        pytest.skip("hatchling cannot be downloaded")
    if "zig" in case:
        zig = f"ziglang=={compiling.ZIG}"
        if pip("download", zig, "-d", str(tmp_path / "zig")).returncode:
            pytest.skip(f"{zig} cannot be downloaded")
    if way == "wheel":
        done = pip("wheel", ".", "-w", str(tmp_path / "dist"))
        assert done.returncode == 0, done.stderr
        [wheel] = (tmp_path / "dist").glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert not [name for name in names if "/packaging/" in name]
        done = pip("install", str(wheel))
    else:
        off_line = ("--no-index", "--no-build-isolation") if way == "--no-index" else ()
        done = pip("install", *off_line, "-e", ".")
    assert done.returncode == 0, done.stderr
    if way == "stale":
        source = checkout / "jserve/native/kernels.c"
        before = source.read_text()
        source.write_text(before + "\n")
    try:
        out = subprocess.run(
            [str(python), "-c", SERVES, str(tiny_dir)],
            cwd=tmp_path,
            env=base,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        if way == "stale":
            source.write_text(before)
    assert out.returncode == 0, out.stderr
    facts = json.loads(out.stdout.splitlines()[-1])
    assert facts["n"] == 4
    assert facts["at"].startswith(str(site if way == "wheel" else checkout))
    if case in REASONS:
        assert facts["kernels"] == "xla"
        assert REASONS[case] in facts["no_kernels"]
        return
    [built] = (Path(facts["at"]).parent / "native").glob("libjserve.*")
    level = level_of(built)
    assert facts["kernels"] == (level if level != "plain" else "xla")
    assert level != "plain" or "slower" in facts["no_kernels"]
